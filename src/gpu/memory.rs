//! What a cache has allocated.

use crate::geometry::Geometry;

/// Bytes of a cache's GPU buffers, as allocated.
///
/// Not counted: the recycled upload buffer of each step that has not been executed (a few KiB), and 96 bytes per [`LayerBinding`](super::LayerBinding).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MemoryUsage {
    /// Packed pages, all layers.
    pub packed: u64,
    /// Sink slots and rings of unpacked tokens, all layers.
    pub unpacked: u64,
    /// Unpacked tokens of steps longer than a ring; shared by all layers.
    pub staging: u64,
    /// Partial results of attention; shared by all layers.
    pub scratch: u64,
    /// The plan of the current step.
    pub plan: u64,
}

impl MemoryUsage {
    pub(super) fn of(g: &Geometry) -> MemoryUsage {
        let layers = u64::from(g.layers);
        MemoryUsage {
            packed: layers * (0..g.slabs()).map(|s| g.slab_bytes(s)).sum::<u64>(),
            unpacked: layers * g.unpacked_bytes(),
            staging: g.staging_bytes(),
            scratch: g.scratch_bytes(),
            plan: g.plan_bytes(),
        }
    }

    /// The sum.
    pub fn total(&self) -> u64 {
        self.packed + self.unpacked + self.staging + self.scratch + self.plan
    }
}
