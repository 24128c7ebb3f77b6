//! One sequence: how long it is and where its tokens lie.

use super::Slot;
use super::pool::{Page, Pool};
use crate::geometry::Geometry;
use std::fmt;

/// A sequence of a cache. An id is never used again after its sequence is removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId(pub(super) u64);

impl fmt::Display for SequenceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sequence {}", self.0)
    }
}

/// The part of a sequence that changes at every step, without its list of pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Lengths {
    /// Tokens.
    pub(super) tokens: u32,
    /// Packed blocks.
    pub(super) blocks: u32,
    /// Ring slot of the oldest token of the window.
    pub(super) ring_start: u32,
}

impl Lengths {
    /// Tokens in the window.
    pub(super) fn window(&self, g: &Geometry) -> u32 {
        self.tokens - self.sinks(g) - self.blocks * g.layout.group
    }

    /// Tokens in sink slots.
    pub(super) fn sinks(&self, g: &Geometry) -> u32 {
        self.tokens.min(g.sinks)
    }
}

#[derive(Debug, Clone)]
pub(super) struct Sequence {
    /// Which of the layer's rings and sink slots are its own.
    pub(super) home: u32,
    pub(super) lengths: Lengths,
    /// Pages of the history, oldest first; the last may be partly filled.
    pub(super) pages: Vec<Page>,
}

impl Sequence {
    pub(super) fn new(home: u32) -> Sequence {
        Sequence { home, lengths: Lengths::default(), pages: Vec::new() }
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
        let page = self.pages[(block / per_page) as usize];
        (page.slab, page.index * per_page + block % per_page)
    }

    /// Slot of the sink at `position`.
    pub(super) fn sink_slot(&self, g: &Geometry, position: u32) -> Slot {
        Slot::ring(self.base(g) + position)
    }

    /// Slot of the `i`-th token written to the ring, counted from the oldest one of the window.
    pub(super) fn ring_slot(&self, g: &Geometry, i: u32) -> Slot {
        let slot = (self.lengths.ring_start + i) % g.ring_tokens;
        Slot::ring(self.base(g) + g.sinks + slot)
    }
}

/// Where the content of a sequence lies between steps: what a reader of the buffers needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SequenceView {
    /// Tokens of the sequence.
    pub tokens: u32,
    /// Slots of the sinks, in order of position.
    pub sinks: Vec<Slot>,
    /// (slab, index of the block within the slab) of each packed block, oldest first.
    pub blocks: Vec<(u32, u32)>,
    /// Slots of the window's tokens, oldest first.
    pub window: Vec<Slot>,
}
