//! One sequence: how long it is and where its tokens lie.

use super::Slot;
use super::identity::CacheId;
use super::pool::{Page, Pool};
use crate::error::Error;
use crate::geometry::{Geometry, MAX_TOKENS};
use std::fmt;
use std::ops::Range;

/// A sequence of a cache. An id is never used again after its sequence is removed, and no other cache takes
/// it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId {
    pub(super) number: u64,
    pub(super) cache: CacheId,
}

impl fmt::Display for SequenceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sequence {}", self.number)
    }
}

/// How long a sequence is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SequenceLengths {
    /// Tokens.
    pub tokens: u32,
    /// Groups of tokens that have been packed.
    pub blocks: u32,
    /// How many of those, the oldest, are gone: see [`LayerFormat::history_limit`](crate::LayerFormat::history_limit).
    pub evicted: u32,
}

impl SequenceLengths {
    /// Of a sequence to which `tokens` tokens have been appended and that was never truncated.
    pub(crate) fn of(g: &Geometry, tokens: u32) -> SequenceLengths {
        let after_sinks = tokens.saturating_sub(g.sinks);
        let blocks = after_sinks.saturating_sub(g.window) / g.layout.group;
        let mut lengths = SequenceLengths { tokens, blocks, evicted: 0 };
        lengths.evict(g);
        lengths
    }

    /// Tokens in the window.
    pub(crate) fn window(&self, g: &Geometry) -> u32 {
        self.tokens - self.sinks(g) - self.blocks * g.layout.group
    }

    /// Tokens in sink slots.
    pub(crate) fn sinks(&self, g: &Geometry) -> u32 {
        self.tokens.min(g.sinks)
    }

    /// Pages of the history that are gone.
    pub(super) fn evicted_pages(&self, g: &Geometry) -> u32 {
        self.evicted / g.layout.blocks_per_page()
    }

    /// Blocks that a sequence may lose by the rule of the class, once it has this many tokens.
    fn too_old(&self, g: &Geometry) -> u32 {
        let limit = g.history_limit.unwrap_or(u32::MAX);
        let old = self.tokens.saturating_sub(g.sinks).saturating_sub(limit);
        self.blocks.min(old / g.layout.group)
    }

    /// What is left after a step: blocks all of whose tokens are too old are gone.
    pub(super) fn evict(&mut self, g: &Geometry) {
        self.evicted = self.evicted.max(self.too_old(g));
    }

    /// Whether a sequence of this geometry can have these lengths.
    ///
    /// # Errors
    /// [`Error::SequenceLengths`].
    pub(crate) fn check(&self, g: &Geometry) -> Result<(), Error> {
        let &SequenceLengths { tokens, blocks, evicted } = self;
        let packed = u64::from(blocks) * u64::from(g.layout.group);
        let window = u64::from(tokens.saturating_sub(g.sinks)).checked_sub(packed);
        let fits = window.is_some_and(|n| n <= u64::from(g.held_tokens()));
        // A sequence that was longer once may have lost more than the rule says now.
        let evictable = evicted <= blocks && (evicted == 0 || g.history_limit.is_some());
        if tokens > MAX_TOKENS || !fits || !evictable || self.too_old(g) > evicted {
            return Err(Error::SequenceLengths { tokens, blocks, evicted });
        }
        Ok(())
    }
}

#[derive(Debug, Clone)]
pub(super) struct Sequence {
    /// Which of the layer's rings and sink slots are its own.
    pub(super) home: u32,
    pub(super) lengths: SequenceLengths,
    /// Ring slot of the oldest token of the window.
    pub(super) ring_start: u32,
    /// Pages of the history that are not gone, oldest first; the last may be partly filled.
    pub(super) pages: Vec<Page>,
}

impl Sequence {
    pub(super) fn new(home: u32) -> Sequence {
        Sequence { home, lengths: SequenceLengths::default(), ring_start: 0, pages: Vec::new() }
    }

    fn base(&self, g: &Geometry) -> u32 {
        self.home * g.sequence_slots()
    }

    /// Blocks on the last page if that has room for more.
    pub(super) fn blocks_on_open_page(&self, g: &Geometry) -> u32 {
        self.lengths.blocks % g.layout.blocks_per_page()
    }

    /// The last page, if it has room for more blocks and other sequences hold it too.
    pub(super) fn shared_open_page(&self, g: &Geometry, pool: &Pool) -> Option<Page> {
        let page = *self.pages.last()?;
        (self.blocks_on_open_page(g) > 0 && pool.is_shared(page)).then_some(page)
    }

    /// The blocks on its page number `ordinal`, counted from the first that it ever had, which are filled and not gone.
    pub(super) fn blocks_on(&self, g: &Geometry, ordinal: u32) -> Range<u32> {
        let per_page = g.layout.blocks_per_page();
        let first = ordinal * per_page;
        let SequenceLengths { blocks, evicted, .. } = self.lengths;
        evicted.saturating_sub(first)..per_page.min(blocks - first)
    }

    /// Those on the last page if that has room for more.
    pub(super) fn open_blocks(&self, g: &Geometry) -> Range<u32> {
        match self.blocks_on_open_page(g) {
            0 => 0..0,
            _ => self.blocks_on(g, self.lengths.blocks / g.layout.blocks_per_page()),
        }
    }

    /// Slots of the sinks.
    pub(super) fn sinks(&self, g: &Geometry) -> Vec<Slot> {
        (0..self.lengths.sinks(g)).map(|p| self.sink_slot(g, p)).collect()
    }

    /// Slots of the window, oldest token first.
    pub(super) fn window(&self, g: &Geometry) -> Vec<Slot> {
        (0..self.lengths.window(g)).map(|i| self.ring_slot(g, i)).collect()
    }

    /// (slab, block within the slab) of block `block`.
    pub(super) fn block(&self, g: &Geometry, block: u32) -> (u32, u32) {
        let per_page = g.layout.blocks_per_page();
        let page = self.pages[(block / per_page - self.lengths.evicted_pages(g)) as usize];
        (page.slab, page.index * per_page + block % per_page)
    }

    /// Slot of the sink at `position`.
    pub(super) fn sink_slot(&self, g: &Geometry, position: u32) -> Slot {
        Slot::ring(self.base(g) + position)
    }

    /// Slot of the `i`-th token written to the ring, counted from the oldest one of the window.
    pub(super) fn ring_slot(&self, g: &Geometry, i: u32) -> Slot {
        let slot = (self.ring_start + i) % g.ring_tokens;
        Slot::ring(self.base(g) + g.sinks + slot)
    }
}

/// Where the content of a sequence lies between steps: what a reader of the buffers needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SequenceView {
    /// How long it is.
    pub lengths: SequenceLengths,
    /// Slots of the sinks, in order of position.
    pub sinks: Vec<Slot>,
    /// (slab, index of the block within the slab) of each packed block that is not gone, oldest first.
    pub blocks: Vec<(u32, u32)>,
    /// Slots of the window's tokens, oldest first.
    pub window: Vec<Slot>,
}
