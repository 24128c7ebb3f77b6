//! The pool of pages.

use crate::format::PAGE_TOKENS;
use std::collections::VecDeque;

/// A page of the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Page {
    pub(super) slab: u32,
    /// Within the slab.
    pub(super) index: u32,
}

/// What has been done to one page.
#[derive(Debug, Clone, Copy)]
pub(super) enum PageChange {
    Taken(Page),
    Shared(Page),
    Released(Page),
}

impl PageChange {
    pub(super) fn page(self) -> Page {
        let (PageChange::Taken(page) | PageChange::Shared(page) | PageChange::Released(page)) = self;
        page
    }
}

/// The pages of all sequences, with the number of sequences that hold each.
#[derive(Debug, Clone, Default)]
pub(super) struct Pool {
    /// By slab and page.
    holders: Vec<Vec<u32>>,
    /// The next page to hand out is the last. Released pages come last in turn, but for those of new slabs, because what released them may be undone.
    free: VecDeque<Page>,
    /// Holders of all pages, each page's first not counted.
    surplus: u32,
}

impl Pool {
    pub(super) fn new(slab_pages: &[u32]) -> Pool {
        let mut pool = Pool::default();
        for (slab, &pages) in (0..).zip(slab_pages) {
            pool.add_slab(slab, pages);
        }
        pool
    }

    /// Adds a slab in a place that is empty or the next.
    pub(super) fn add_slab(&mut self, slab: u32, pages: u32) {
        self.holders.resize(self.holders.len().max(slab as usize + 1), Vec::new());
        self.holders[slab as usize] = vec![0; pages as usize];
        for index in 0..pages {
            self.free.push_front(Page { slab, index });
        }
    }

    /// Removes a slab of which no page is held.
    pub(super) fn remove_slab(&mut self, slab: u32) {
        self.holders[slab as usize].clear();
        self.free.retain(|page| page.slab != slab);
    }

    /// Slabs with pages, none of which is held.
    pub(super) fn empty_slabs(&self) -> Vec<u32> {
        let slabs = (0..).zip(&self.holders);
        slabs.filter(|(_, h)| !h.is_empty() && h.iter().all(|n| *n == 0)).map(|(slab, _)| slab).collect()
    }

    pub(super) fn free_pages(&self) -> u32 {
        self.free.len() as u32
    }

    /// By how much the pages of all sequences together are more than those in use.
    pub(super) fn surplus(&self) -> u32 {
        self.surplus
    }

    pub(super) fn is_shared(&self, page: Page) -> bool {
        self.holders[page.slab as usize][page.index as usize] > 1
    }

    /// The page that the `n`-th next [`Self::take`] gives.
    pub(super) fn peek(&self, n: u32) -> Option<Page> {
        let n = n as usize;
        self.free.len().checked_sub(n + 1).map(|i| self.free[i])
    }

    fn holders(&mut self, page: Page) -> &mut u32 {
        &mut self.holders[page.slab as usize][page.index as usize]
    }

    pub(super) fn take(&mut self) -> Option<(Page, PageChange)> {
        let page = self.free.pop_back()?;
        *self.holders(page) = 1;
        Some((page, PageChange::Taken(page)))
    }

    pub(super) fn share(&mut self, page: Page) -> PageChange {
        *self.holders(page) += 1;
        self.surplus += 1;
        PageChange::Shared(page)
    }

    pub(super) fn release(&mut self, page: Page) -> PageChange {
        let holders = self.holders(page);
        *holders -= 1;
        if *holders == 0 {
            self.free.push_front(page);
        } else {
            self.surplus -= 1;
        }
        PageChange::Released(page)
    }

    /// Undoes a change; those after it have been undone.
    pub(super) fn undo(&mut self, change: PageChange) {
        match change {
            PageChange::Taken(page) => {
                *self.holders(page) = 0;
                self.free.push_back(page);
            }
            PageChange::Shared(page) => {
                *self.holders(page) -= 1;
                self.surplus -= 1;
            }
            PageChange::Released(page) => {
                let holders = self.holders(page);
                *holders += 1;
                if *holders > 1 {
                    self.surplus += 1;
                } else if let Some(at) = self.free.iter().position(|free| *free == page) {
                    // It is the first, but for those of slabs that have come since.
                    self.free.remove(at);
                }
            }
        }
    }
}

/// Pages for `blocks` blocks of `group` tokens.
pub(super) fn pages_for(blocks: u32, group: u32) -> u32 {
    blocks.div_ceil(PAGE_TOKENS / group)
}
