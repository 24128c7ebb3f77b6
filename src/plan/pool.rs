//! The pool of pages.

use crate::format::PAGE_TOKENS;

/// Free pages of a layer class. Page `p` is page `p % pages_per_slab` of slab `p / pages_per_slab`.
#[derive(Debug, Clone)]
pub(super) struct Pool {
    /// The next page to hand out is the last.
    free: Vec<u32>,
    pages_per_slab: u32,
}

impl Pool {
    pub(super) fn new(pages: u32, pages_per_slab: u32) -> Pool {
        Pool { free: (0..pages).rev().collect(), pages_per_slab }
    }

    pub(super) fn free_pages(&self) -> u32 {
        self.free.len() as u32
    }

    /// The page that the `n`-th next allocation gives. A plan looks ahead; [`Self::take`] commits.
    pub(super) fn peek(&self, n: u32) -> Option<u32> {
        let n = n as usize;
        self.free.len().checked_sub(n + 1).map(|i| self.free[i])
    }

    /// Removes the next `n` pages, in the order in which `peek` showed them.
    pub(super) fn take(&mut self, n: u32) {
        self.free.truncate(self.free.len() - n as usize);
    }

    /// Returns pages so that the last one given is the next handed out.
    pub(super) fn give(&mut self, pages: impl IntoIterator<Item = u32>) {
        self.free.extend(pages);
    }

    /// Returns the pages of a removed sequence so that they are handed out last: the removal may be undone.
    pub(super) fn give_last(&mut self, pages: &[u32]) {
        self.free.splice(..0, pages.iter().copied());
    }

    /// Undoes the latest [`Self::give_last`] of `n` pages.
    pub(super) fn take_back(&mut self, n: usize) {
        self.free.drain(..n);
    }

    pub(super) fn slab(&self, page: u32) -> u32 {
        page / self.pages_per_slab
    }

    pub(super) fn page_in_slab(&self, page: u32) -> u32 {
        page % self.pages_per_slab
    }
}

/// Pages for `blocks` blocks of `group` tokens.
pub(super) fn pages_for(blocks: u32, group: u32) -> u32 {
    blocks.div_ceil(PAGE_TOKENS / group)
}
