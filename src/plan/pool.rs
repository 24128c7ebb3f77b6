//! The pool of pages of a format class.

use crate::config::CacheConfig;
use crate::error::Error;
use crate::format::PAGE_TOKENS;
use crate::shape::Shape;
use std::collections::VecDeque;

/// Pages of a pool, at most: 2³² tokens.
const MAX_PAGES: u64 = 1 << 24;

/// A page of the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Page {
    pub(super) slab: u32,
    /// Within the slab.
    pub(super) index: u32,
}

/// How large a pool begins, and how it may grow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolLimits {
    /// Pages at first.
    pub pages: u32,
    /// Pages of one slab, at most.
    pub pages_per_slab: u32,
    /// Pages up to which it grows.
    pub max_pages: u32,
}

/// How large a pool is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolSize {
    /// Pages.
    pub pages: u32,
    /// Slabs, those that have been given back included.
    pub slabs: u32,
    /// Pages that sequences have, all together, beyond those of the pool, because they share some.
    pub shared: u32,
}

/// A slab that a pool is about to get.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NewSlab {
    /// Its index: one that is empty, or the next.
    pub slab: u32,
    /// Its pages.
    pub pages: u32,
}

/// Slabs that a pool is about to get.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Growth {
    /// The format class.
    pub class: usize,
    /// The slabs.
    pub slabs: Vec<NewSlab>,
    /// How large the pool will be.
    pub size: PoolSize,
}

impl PoolLimits {
    /// Of a class of a cache whose slabs are within `max_binding` bytes.
    ///
    /// # Errors
    /// [`Error::LimitTooLow`] if a slab cannot hold a page.
    pub fn new(shape: &Shape, config: &CacheConfig, max_binding: u64) -> Result<PoolLimits, Error> {
        let page_bytes = shape.layout.page_words() * 4;
        let chosen = config.max_slab_bytes.unwrap_or(u64::MAX);
        let slab_limit = max_binding.min(chosen);
        if page_bytes > slab_limit {
            let of_config = chosen < max_binding;
            return Err(Error::LimitTooLow {
                limit: if of_config { "max_slab_bytes" } else { "max_storage_buffer_binding_size" },
                available: slab_limit,
                needed: page_bytes,
                what: "one page of 256 packed tokens, which a slab must hold",
                instead: "use fewer bits or larger groups",
            });
        }
        Ok(PoolLimits {
            pages: pages_for_tokens(shape, config.capacity),
            pages_per_slab: u32::try_from(slab_limit / page_bytes).unwrap_or(u32::MAX),
            max_pages: pages_for_tokens(shape, config.max_capacity.unwrap_or(u32::MAX)),
        })
    }

    /// The pages of each slab at first: full but for the last.
    pub fn slabs(&self) -> Vec<u32> {
        let full = |s: u32| self.pages_per_slab.min(self.pages - s * self.pages_per_slab);
        (0..self.pages.div_ceil(self.pages_per_slab)).map(full).collect()
    }

    /// How large the pool is at first.
    pub fn size(&self) -> PoolSize {
        PoolSize { pages: self.pages, slabs: self.slabs().len() as u32, shared: 0 }
    }

    /// How large it is when it has grown as far as it may, page by page.
    pub fn largest(&self) -> PoolSize {
        let mut slabs = self.slabs();
        while slabs.iter().sum::<u32>() < self.max_pages {
            let new = self.grown(&slabs, 1, false);
            place(&mut slabs, &new);
        }
        PoolSize { pages: slabs.iter().sum(), slabs: slabs.len() as u32, shared: 0 }
    }

    /// The slabs that a pool with these gets for at least `missing` pages more: half as many again as there
    /// are, unless `exactly`.
    fn grown(&self, slabs: &[u32], missing: u32, exactly: bool) -> Vec<NewSlab> {
        let pages: u32 = slabs.iter().sum();
        let wanted = if exactly { missing } else { missing.max(pages / 2) };
        let mut wanted = wanted.min(self.max_pages.saturating_sub(pages));
        let mut slabs = slabs.to_vec();
        let mut new = Vec::new();
        let mut added = 0;
        while added < missing && wanted > 0 {
            let pages = wanted.min(self.pages_per_slab);
            let slab = slabs.iter().position(|pages| *pages == 0).unwrap_or(slabs.len()) as u32;
            new.push(NewSlab { slab, pages });
            place(&mut slabs, &new[new.len() - 1..]);
            added += pages;
            wanted -= pages;
        }
        new
    }
}

/// Puts new slabs in their places.
fn place(slabs: &mut Vec<u32>, new: &[NewSlab]) {
    for &NewSlab { slab, pages } in new {
        slabs.resize(slabs.len().max(slab as usize + 1), 0);
        slabs[slab as usize] = pages;
    }
}

/// Pages that hold `tokens` tokens however they are spread over the sequences.
fn pages_for_tokens(shape: &Shape, tokens: u32) -> u32 {
    // A sequence with packed tokens has S + W outside them, and at most one page that is not full.
    let packed = tokens.saturating_sub(shape.sinks + shape.window);
    let pages = u64::from(packed.div_ceil(PAGE_TOKENS)) + u64::from(shape.max_sequences) - 1;
    pages.min(limited_pages(shape)).min(MAX_PAGES) as u32
}

/// Pages that are never more than needed where history is limited: forks share some of them.
fn limited_pages(shape: &Shape) -> u64 {
    let Some(limit) = shape.history_limit else { return u64::MAX };
    // A step begins with what the limit leaves, in whole blocks, and adds its own. The first page may be
    // partly gone, the last partly filled.
    let most = u64::from(limit) + u64::from(shape.layout.group) + u64::from(shape.max_step);
    let sequences = u64::from(shape.max_sequences);
    // A page that two have cut and that both extend is copied for each, while it is still there.
    sequences * (most.div_ceil(PAGE_TOKENS.into()) + 1) + sequences / 2
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
#[derive(Debug, Clone)]
pub(super) struct Pool {
    limits: PoolLimits,
    /// By slab and page; empty for a slab that has been given back.
    holders: Vec<Vec<u32>>,
    /// The next page to hand out is the last. Released pages come last in turn, but for those of new slabs,
    /// because what released them may be undone.
    free: VecDeque<Page>,
    /// Holders of all pages, each page's first not counted.
    shared: u32,
}

impl Pool {
    pub(super) fn new(limits: PoolLimits) -> Pool {
        let slabs = limits.slabs();
        let mut pool = Pool { limits, holders: Vec::new(), free: VecDeque::new(), shared: 0 };
        for (slab, pages) in (0..).zip(slabs) {
            pool.add_slab(NewSlab { slab, pages });
        }
        pool
    }

    /// Adds a slab in a place that is empty or the next.
    pub(super) fn add_slab(&mut self, NewSlab { slab, pages }: NewSlab) {
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

    /// Pages of each slab.
    pub(super) fn slab_pages(&self) -> Vec<u32> {
        self.holders.iter().map(|slab| slab.len() as u32).collect()
    }

    pub(super) fn size(&self) -> PoolSize {
        let pages = self.slab_pages().iter().sum();
        PoolSize { pages, slabs: self.holders.len() as u32, shared: self.shared }
    }

    pub(super) fn free_pages(&self) -> u32 {
        self.free.len() as u32
    }

    /// Free pages, and those by which the pool may grow.
    pub(super) fn available_pages(&self) -> u32 {
        self.free_pages() + self.limits.max_pages.saturating_sub(self.size().pages)
    }

    /// What the pool must get so that `pages` of its pages are free.
    pub(super) fn growth(&self, pages: u32, exactly: bool) -> Option<(Vec<NewSlab>, PoolSize)> {
        let missing = pages.checked_sub(self.free_pages()).filter(|missing| *missing > 0)?;
        let mut slabs = self.slab_pages();
        let new = self.limits.grown(&slabs, missing, exactly);
        place(&mut slabs, &new);
        let (pages, slabs) = (slabs.iter().sum(), slabs.len() as u32);
        Some((new, PoolSize { pages, slabs, shared: self.shared }))
    }

    pub(super) fn is_shared(&self, page: Page) -> bool {
        self.holders[page.slab as usize][page.index as usize] > 1
    }

    /// Sequences that hold a page.
    pub(super) fn held_by(&self, page: Page) -> u32 {
        self.holders[page.slab as usize][page.index as usize]
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
        self.shared += 1;
        PageChange::Shared(page)
    }

    pub(super) fn release(&mut self, page: Page) -> PageChange {
        let holders = self.holders(page);
        *holders -= 1;
        if *holders == 0 {
            self.free.push_front(page);
        } else {
            self.shared -= 1;
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
                self.shared -= 1;
            }
            PageChange::Released(page) => {
                let holders = self.holders(page);
                *holders += 1;
                if *holders > 1 {
                    self.shared += 1;
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
