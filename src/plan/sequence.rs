//! One sequence: how long it is and where its tokens lie.

use super::Slot;
use crate::geometry::Geometry;
use std::fmt;

/// A sequence of a cache. An id is never used again after its sequence is removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SequenceId {
    pub(super) index: u32,
    pub(super) generation: u32,
}

impl fmt::Display for SequenceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sequence {}.{}", self.index, self.generation)
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
    pub(super) id: SequenceId,
    pub(super) lengths: Lengths,
    /// Pages of the history, oldest first; the last may be partly filled.
    pub(super) pages: Vec<u32>,
}

impl Sequence {
    fn base(&self, g: &Geometry) -> u32 {
        self.id.index * g.sequence_slots()
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
