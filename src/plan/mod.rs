//! What an operation changes, as plain data.
//!
//! [`Planner`] is the one state machine of a cache: it knows the sequences, and for each format class their
//! windows and pages. It turns an operation into one [`Plan`] per class: what is written, copied, packed and
//! unpacked, and what each sequence attends to. Executors derive nothing from it; they only carry it out. How
//! attention is divided among workgroups is the [schedule](crate::schedule)'s, since it depends on the
//! executor.

mod extents;
mod journal;
mod operations;
mod planner;
mod pool;
mod records;
mod request;
mod sequence;
mod step;
mod table;

#[cfg(feature = "wgpu")]
pub(crate) use extents::attend_over;
pub use extents::{Attend, Extent};
pub use journal::{Applied, Operation};
pub use planner::{Planner, Usage};
pub use pool::{Growth, NewSlab, PoolLimits, PoolSize};
pub(crate) use records::records;
pub use records::{BlockCopy, PackBlock, Record, Slot, TokenCopy, TokenUnpack, TokenWrite};
pub use request::Request;
pub use sequence::{SequenceLengths, SequenceView};
pub use step::{PlannedStep, SequenceStep};

use std::ops::Range;

/// Work in one slab.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlabRange {
    /// Slab.
    pub slab: u32,
    /// Range of the work list.
    pub items: Range<u32>,
}

/// Copies of blocks from one slab to another, or within it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockCopyRange {
    /// Slab that is read.
    pub from: u32,
    /// Slab that is written.
    pub to: u32,
    /// Range of [`Plan::block_copies`].
    pub items: Range<u32>,
}

/// Everything that one operation does in every layer of a class, in this order: writes, attention, copies,
/// packs, unpacks.
///
/// Steps write, attend, copy blocks that they are about to extend, and pack. Forks and reorders copy.
/// Truncations unpack.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Plan {
    /// New tokens over all sequences: rows of the step's keys and values.
    pub tokens: u32,
    /// Queries over all sequences: rows of the step's queries and outputs.
    pub queries: u32,
    /// Slots by list: blocks to pack and unpacked tokens to attend to.
    pub slots: Vec<Slot>,
    /// Tokens that enter.
    pub writes: Vec<TokenWrite>,
    /// Sequences that attend.
    pub attends: Vec<Attend>,
    /// What they attend to.
    pub extents: Vec<Extent>,
    /// Blocks to pack, by slab.
    pub packs: Vec<PackBlock>,
    /// Ranges of `packs`.
    pub pack_slabs: Vec<SlabRange>,
    /// Whether any slot is in the staging buffer, which all layers of the class share.
    pub uses_staging: bool,
    /// Unpacked tokens to copy.
    pub token_copies: Vec<TokenCopy>,
    /// Blocks to copy, by pair of slabs.
    pub block_copies: Vec<BlockCopy>,
    /// Ranges of `block_copies`.
    pub copy_slabs: Vec<BlockCopyRange>,
    /// Tokens to unpack.
    pub unpacks: Vec<TokenUnpack>,
    /// Ranges of `unpacks`.
    pub unpack_slabs: Vec<SlabRange>,
}

impl Plan {
    /// Adds copies of blocks from one slab to another, or within it.
    fn copy_blocks(&mut self, from: u32, to: u32, copies: impl Iterator<Item = BlockCopy>) {
        let start = self.block_copies.len() as u32;
        self.block_copies.extend(copies);
        let end = self.block_copies.len() as u32;
        match self.copy_slabs.last_mut() {
            Some(last) if (last.from, last.to) == (from, to) => last.items.end = end,
            _ => self.copy_slabs.push(BlockCopyRange { from, to, items: start..end }),
        }
    }

    /// Whether there is nothing to carry out.
    pub fn is_empty(&self) -> bool {
        let Self { writes, attends, packs, token_copies, block_copies, unpacks, .. } = self;
        writes.is_empty()
            && attends.is_empty()
            && packs.is_empty()
            && token_copies.is_empty()
            && block_copies.is_empty()
            && unpacks.is_empty()
    }
}

/// Appends `work` to `list` in order of slabs and returns the range of each slab in use.
pub(crate) fn push_by_slab<T>(list: &mut Vec<T>, mut work: Vec<(u32, T)>) -> Vec<SlabRange> {
    work.sort_by_key(|(slab, _)| *slab);
    let mut ranges: Vec<SlabRange> = Vec::new();
    for (slab, item) in work {
        let at = list.len() as u32;
        list.push(item);
        match ranges.last_mut() {
            Some(last) if last.slab == slab => last.items.end = at + 1,
            _ => ranges.push(SlabRange { slab, items: at..at + 1 }),
        }
    }
    ranges
}
