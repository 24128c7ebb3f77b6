//! What a step does, as plain data.
//!
//! [`Planner`] is the one state machine of the cache: it knows the sequences, their windows and their pages, and turns a step into a
//! [`StepPlan`] of final work lists. The executors (CPU oracle, wgpu) derive nothing from it; they only carry it out. No GPU type appears here.

mod all;
mod attention;
mod fold;
mod identity;
mod operations;
mod planner;
mod pool;
mod sequence;
mod step;
mod table;

pub(crate) use all::{all_or_none, the_same};
#[cfg(feature = "wgpu")]
pub(crate) use attention::plan_attention_over;
pub use identity::CacheId;
pub use planner::{Growth, Planner, Usage};
pub use sequence::{SequenceId, SequenceLengths, SequenceView};
pub use step::{PlannedStep, SequenceStep};
pub use table::{Applied, Operation};

use std::ops::Range;

/// Where an unpacked token lies: a row of the layer's sink slots and rings, or of the staging buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Slot(u32);

impl Slot {
    /// Set in the words of slots in the staging buffer.
    pub const STAGING_BIT: u32 = 1 << 31;

    /// Row `index` of the sink slots and rings.
    pub fn ring(index: u32) -> Slot {
        Slot(index)
    }

    /// Row `index` of the staging buffer.
    pub fn staging(index: u32) -> Slot {
        Slot(index | Slot::STAGING_BIT)
    }

    /// Whether the token is in the staging buffer.
    pub fn is_staging(self) -> bool {
        self.0 & Slot::STAGING_BIT != 0
    }

    /// Row within its buffer.
    pub fn index(self) -> u32 {
        self.0 & !Slot::STAGING_BIT
    }

    /// The word that shaders read.
    pub fn word(self) -> u32 {
        self.0
    }
}

/// A new token enters the cache: input row `row` goes to `slot`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenWrite {
    /// Row of the step's keys and values.
    pub row: u32,
    /// Where it is kept.
    pub slot: Slot,
}

/// `group` unpacked tokens become one block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackBlock {
    /// Index in [`StepPlan::slots`] of the block's first token; the others follow.
    pub first_slot: u32,
    /// Index of the block within its slab.
    pub block: u32,
}

/// Up to `row_tile` rows (query, head) of one sequence that attend together. Row `r` is query `r / heads_per_group`, head `r % heads_per_group` of each KV head's group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowTile {
    /// Row of the step's queries that holds the sequence's first query.
    pub first_query: u32,
    /// First row of the tile.
    pub first_row: u32,
    /// Rows of the tile.
    pub rows: u32,
    /// Position of the sequence's first query.
    pub position: u32,
    /// First partial row of the tile; split `s`, row `r` is partial row `first_partial + s * row_tile + r`.
    pub first_partial: u32,
    /// Splits to merge, in order of position; of tiles of long chunks, the partial results that there are.
    pub splits: u32,
    /// First of those splits that are pages of history.
    pub first_history: u32,
    /// Number of those.
    pub history_splits: u32,
}

/// One tile attends to one split.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttendItem {
    /// Index in [`StepPlan::tiles`].
    pub tile: u32,
    /// First partial row that it writes.
    pub partial: u32,
    /// History: the first block within its slab. Unpacked tokens: index in [`StepPlan::slots`] of the first.
    pub source: u32,
    /// Tokens of the split, 1 to 256.
    pub tokens: u32,
    /// Position of the first; the others follow without gaps. A query sees positions up to its own, from its sliding window's first on.
    pub first_position: u32,
}

/// Work of one pass in one slab.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlabRange {
    /// Slab.
    pub slab: u32,
    /// Range of the work list.
    pub items: Range<u32>,
}

/// A split that tiles of long chunks extend their partial results by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FoldSplit {
    /// As [`AttendItem::source`].
    pub source: u32,
    /// As [`AttendItem::tokens`].
    pub tokens: u32,
    /// As [`AttendItem::first_position`].
    pub first_position: u32,
}

/// One tile extends its partial result by consecutive splits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TileRun {
    /// Index in [`StepPlan::tiles`].
    pub tile: u32,
    /// First partial row that it extends: where values are rotated, packed and unpacked tokens have partial results of their own.
    pub partial: u32,
    /// Range of [`StepPlan::splits`], in order of position.
    pub splits: Range<u32>,
    /// Whether this is the first run of that partial result: nothing is there to extend.
    pub fresh: bool,
}

/// Runs that read one buffer. A round's passes run one after the other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoldPass {
    /// The slab, or `None` for unpacked tokens.
    pub slab: Option<u32>,
    /// Range of [`StepPlan::runs`].
    pub runs: Range<u32>,
}

/// Tiles whose partial results fit the scratch together. Rounds run one after the other.
///
/// Partial row `p` of head `h` is cell `p * heads.len() + h - heads.start` of the scratch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Round {
    /// Index in [`Geometry::attention_classes`](crate::Geometry::attention_classes): the round is for layers of this class only.
    pub class: u32,
    /// Rows per workgroup of these tiles.
    pub row_tile: u32,
    /// KV heads.
    pub heads: Range<u32>,
    /// Range of [`StepPlan::tiles`].
    pub tiles: Range<u32>,
    /// Ranges of [`StepPlan::items`] that read packed pages.
    pub history: Vec<SlabRange>,
    /// Range of [`StepPlan::items`] that read unpacked tokens.
    pub window: Range<u32>,
    /// Of tiles of long chunks, which have one partial result per row (two if values are rotated) instead of one per split: the passes that extend it. Such a round has no
    /// `history` and no `window`.
    pub fold: Vec<FoldPass>,
}

/// An unpacked token is copied, within the sink slots and rings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenCopy {
    /// Where it is.
    pub from: Slot,
    /// Where it is wanted too. No copy of the same plan reads this slot.
    pub to: Slot,
}

/// A block is copied to another page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockCopy {
    /// Index of the block within its slab.
    pub from: u32,
    /// Index of the copy within its slab. No copy of the same plan reads it.
    pub to: u32,
}

/// Copies of blocks from one slab to another, or within it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockCopyRange {
    /// Slab that is read.
    pub from: u32,
    /// Slab that is written.
    pub to: u32,
    /// Range of [`StepPlan::block_copies`].
    pub items: Range<u32>,
}

/// A packed token returns to the window: dequantized, then through the entry function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenUnpack {
    /// Index of the block within its slab.
    pub block: u32,
    /// Index of the token within the block.
    pub token: u32,
    /// Where it is kept from now on.
    pub slot: Slot,
}

/// Everything that one operation does in every layer, in this order: writes, the rounds of the layer's class, copies, packs, unpacks.
///
/// Steps write, attend, copy blocks that they are about to extend, and pack. Forks and reorders copy. Truncations unpack.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StepPlan {
    /// New tokens over all sequences: rows of the step's keys and values.
    pub tokens: u32,
    /// Queries over all sequences: rows of the step's queries and outputs.
    pub queries: u32,
    /// Slots by list: blocks to pack and unpacked tokens to attend to.
    pub slots: Vec<Slot>,
    /// Tokens that enter.
    pub writes: Vec<TokenWrite>,
    /// Tiles to attend and merge.
    pub tiles: Vec<RowTile>,
    /// Work of the attention passes.
    pub items: Vec<AttendItem>,
    /// Splits of long chunks.
    pub splits: Vec<FoldSplit>,
    /// Work of the passes of long chunks.
    pub runs: Vec<TileRun>,
    /// Attention, in rounds.
    pub rounds: Vec<Round>,
    /// Blocks to pack, by slab.
    pub packs: Vec<PackBlock>,
    /// Ranges of `packs`.
    pub pack_slabs: Vec<SlabRange>,
    /// Whether any slot is in the staging buffer, which all layers share.
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

impl StepPlan {
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
        let Self { writes, tiles, packs, token_copies, block_copies, unpacks, .. } = self;
        writes.is_empty()
            && tiles.is_empty()
            && packs.is_empty()
            && token_copies.is_empty()
            && block_copies.is_empty()
            && unpacks.is_empty()
    }
}
