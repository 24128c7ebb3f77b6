//! The pool of pages and its slabs, and what grows with it.

use super::Geometry;
use crate::config::CacheConfig;
use crate::error::Error;
use crate::format::PAGE_TOKENS;

/// Pages of a pool, at most: 2³² tokens.
const MAX_PAGES: u64 = 1 << 24;

/// Pages that hold `tokens` tokens however they are spread over the sequences.
pub(super) fn pages_for_tokens(c: &CacheConfig, tokens: u32) -> u32 {
    // A sequence with history has S + W tokens outside it, and at most one page that is not full.
    let history = tokens.saturating_sub(c.format.sink_tokens + c.format.residual_window);
    let pages = u64::from(history.div_ceil(PAGE_TOKENS)) + u64::from(c.max_sequences) - 1;
    pages.min(limited_pages(c)).min(MAX_PAGES) as u32
}

/// Pages that are never more than needed where history is limited: forks share some of them.
fn limited_pages(c: &CacheConfig) -> u64 {
    let Some(limit) = c.format.history_limit else { return u64::MAX };
    // A step begins with what the limit leaves, in whole blocks, and adds its own. The first page may be partly gone, the last partly filled.
    let most = u64::from(limit) + u64::from(c.format.group_size) + u64::from(c.max_step);
    let sequences = u64::from(c.max_sequences);
    // A page that two have cut and that both extend is copied for each, while it is still there.
    sequences * (most.div_ceil(PAGE_TOKENS.into()) + 1) + sequences / 2
}

/// `pages` in slabs that are full but for the last.
pub(super) fn slabs_of(pages: u32, pages_per_slab: u32) -> Vec<u32> {
    (0..pages.div_ceil(pages_per_slab)).map(|s| pages_per_slab.min(pages - s * pages_per_slab)).collect()
}

impl Geometry {
    /// The same cache with one layer and one page.
    ///
    /// # Errors
    /// As [`Self::with_slabs`].
    #[cfg(feature = "wgpu")]
    pub(crate) fn smallest(&self) -> Result<Geometry, Error> {
        let mut g = self.clone();
        (g.layers, g.layer_ids) = (1, vec![0]);
        g.layer_classes.truncate(1);
        g.with_slabs(vec![1])
    }

    /// Pages of the pool.
    pub fn pages(&self) -> u32 {
        self.slab_pages.iter().sum()
    }

    /// Number of slabs of a layer, those that have been given back included.
    pub fn slabs(&self) -> u32 {
        self.slab_pages.len() as u32
    }

    /// Pages of slab `slab`.
    pub fn slab_pages(&self, slab: u32) -> u32 {
        self.slab_pages.get(slab as usize).copied().unwrap_or(0)
    }

    /// Bytes of slab `slab` of one layer.
    pub fn slab_bytes(&self, slab: u32) -> u64 {
        u64::from(self.slab_pages(slab)) * self.layout.page_words() * 4
    }

    /// The same cache with other slabs, and a scratch that suits them.
    ///
    /// # Errors
    /// [`Error::LimitTooLow`] if the longest sequence that fits is longer than attention can hold the partial results of.
    pub(crate) fn with_slabs(&self, slab_pages: Vec<u32>) -> Result<Geometry, Error> {
        Geometry { slab_pages, ..self.clone() }.with_scratch()
    }

    /// The same cache, prepared for sequences that share pages.
    ///
    /// # Errors
    /// As [`Self::with_slabs`].
    pub(crate) fn with_shared_pages(&self, shared_pages: u32) -> Result<Geometry, Error> {
        Geometry { shared_pages, ..self.clone() }.with_scratch()
    }

    /// The same cache when its pool has grown, by the rule of [`Self::grown`], as far as it may.
    ///
    /// # Errors
    /// As [`Self::with_slabs`].
    pub(super) fn fully_grown(&self) -> Result<Geometry, Error> {
        let mut g = self.clone();
        while g.pages() < g.max_pages {
            g = g.grown(1, false)?.0;
        }
        g.with_scratch()
    }

    fn with_scratch(self) -> Result<Geometry, Error> {
        let mut g = self;
        // One row tile of one head over the longest sequence is the least; a step never needs more than all its rows.
        let cell = g.partial_bytes();
        let tile = g.split_tiles().last().map_or(1, |tile| *tile);
        let least = (u64::from(tile) * u64::from(g.splits_at_most()))
            .max(u64::from(g.fold_partials() * g.fold_tile()));
        if least * cell > g.max_binding {
            return Err(Error::LimitTooLow {
                limit: "max_storage_buffer_binding_size",
                available: g.max_binding,
                needed: least * cell,
                what: "the partial results of attention over the longest sequence",
                instead: "lower capacity and max_capacity",
            });
        }
        let wanted = (g.max_scratch_bytes.min(g.max_binding) / cell).max(least);
        g.scratch_cells = wanted.min(g.attention_cells_at_most()) as u32;
        Ok(g)
    }

    /// The same cache with room for at least `missing` pages more: half as many again as there are, unless `exactly`. Returns the slabs that are new.
    ///
    /// # Errors
    /// As [`Self::with_slabs`].
    pub(crate) fn grown(&self, missing: u32, exactly: bool) -> Result<(Geometry, Vec<u32>), Error> {
        let pages = self.pages();
        let wanted = if exactly { missing } else { missing.max(pages / 2) };
        let mut wanted = wanted.min(self.max_pages.saturating_sub(pages));
        let mut slab_pages = self.slab_pages.clone();
        let mut new = Vec::new();
        let mut added = 0;
        while added < missing && wanted > 0 {
            let size = wanted.min(self.pages_per_slab);
            let slab = slab_pages.iter().position(|pages| *pages == 0).unwrap_or(slab_pages.len());
            match slab_pages.get_mut(slab) {
                Some(pages) => *pages = size,
                None => slab_pages.push(size),
            }
            new.push(slab as u32);
            added += size;
            wanted -= size;
        }
        Ok((self.with_slabs(slab_pages)?, new))
    }
}
