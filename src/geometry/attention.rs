//! How attention is cut into tiles, and what a step needs at most: its partial results and its plan.

use super::{Geometry, ITEM_WORDS, PLAN_PARAMS_STRIDE, SPLIT_WORDS, TILE_WORDS, UPLOADS};
use crate::format::PAGE_TOKENS;

/// Rows (query, head) of one attention workgroup, at most.
const MAX_ROW_TILE: u32 = 16;
/// Elements of a row tile's queries, at most: 16 KiB of workgroup memory hold two such arrays.
const MAX_TILE_ELEMENTS: u32 = 2048;
/// Queries of one sequence in a step up to which its attention always has a partial result per split.
const MAX_SPLIT_QUERIES: u32 = 8;
/// Rows of one attention workgroup of a long chunk, at most.
const MAX_FOLD_TILE: u32 = 64;
/// Elements of such a tile's outputs, at most: 32 per invocation.
const MAX_FOLD_ELEMENTS: u32 = 8192;

impl Geometry {
    /// Rows of a tile, at most, whose queries have `elements` elements at most.
    fn tile_within(&self, most: u32, elements: u32) -> u32 {
        let padded_dim = self.layout.head_dim.next_multiple_of(16);
        let mut rows = most;
        while rows * padded_dim > elements {
            rows /= 2;
        }
        rows
    }

    /// Whether the attention of a sequence with `queries` queries in a step has [one or two](Self::fold_partials) partial results per row, as long chunks
    /// have, instead of one per split.
    ///
    /// Like [`Self::row_tile`] it depends on nothing else, so that with one variant of the kernels a row's sums run in the same
    /// order in every batch and on every adapter.
    pub fn folds(&self, queries: u32) -> bool {
        queries > MAX_SPLIT_QUERIES
            && queries * self.heads_per_group > self.tile_within(MAX_ROW_TILE, MAX_TILE_ELEMENTS)
    }

    /// Rows per attention workgroup of a chunk that [folds](Self::folds).
    pub fn fold_tile(&self) -> u32 {
        self.tile_within(MAX_FOLD_TILE, MAX_FOLD_ELEMENTS)
    }

    /// Partial results of a row of a long chunk: one, or one of packed and one of unpacked tokens if values are rotated.
    pub fn fold_partials(&self) -> u32 {
        if self.layout.values.rotated { 2 } else { 1 }
    }

    /// Rows (query, head) per attention workgroup for a sequence with `queries` queries in a step.
    pub fn row_tile(&self, queries: u32) -> u32 {
        if self.folds(queries) {
            return self.fold_tile();
        }
        let most = self.tile_within(MAX_ROW_TILE, MAX_TILE_ELEMENTS);
        (queries * self.heads_per_group).next_power_of_two().min(most)
    }

    /// Numbers of queries whose attention has a partial result per split: all of them, or up to a few more than that.
    fn split_queries(&self) -> impl Iterator<Item = u32> {
        (1..=self.max_step.min(MAX_ROW_TILE)).filter(|n| !self.folds(*n))
    }

    /// Row tiles of attention with a partial result per split, smallest first.
    pub fn split_tiles(&self) -> Vec<u32> {
        let mut tiles: Vec<u32> = self.split_queries().map(|n| self.row_tile(n)).collect();
        tiles.dedup();
        tiles
    }

    /// Whether any layer caps its logits: shaders of others go without.
    pub fn has_soft_caps(&self) -> bool {
        self.attention_classes.iter().any(|class| class.soft_cap.is_some())
    }

    /// Whether any step may fold.
    pub fn may_fold(&self) -> bool {
        self.folds(self.max_step)
    }

    /// Splits of the longest possible sequence: its pages, sinks, and the unpacked tokens of a step.
    pub fn splits_at_most(&self) -> u32 {
        let unpacked = self.held_tokens() + self.max_step;
        self.pages() + self.sinks.div_ceil(PAGE_TOKENS) + unpacked.div_ceil(PAGE_TOKENS)
    }

    /// Row tiles with a partial result per split of one sequence in a step, at most.
    fn split_tiles_at_most(&self) -> u32 {
        let tiles = |n: u32| (n * self.heads_per_group).div_ceil(self.row_tile(n));
        self.split_queries().map(tiles).max().unwrap_or(1)
    }

    /// Row tiles of long chunks of all sequences in a step, at most.
    fn fold_tiles_at_most(&self) -> u64 {
        if !self.may_fold() {
            return 0;
        }
        // Each sequence has a tile that is not full, at most.
        let rows = u64::from(self.max_batch_tokens) * u64::from(self.heads_per_group);
        rows.div_ceil(u64::from(self.fold_tile())) + self.folding_at_most()
    }

    /// Sequences with long chunks in a step, at most.
    fn folding_at_most(&self) -> u64 {
        self.max_sequences.min(self.max_batch_tokens / (MAX_SPLIT_QUERIES + 1)).into()
    }

    /// Pages of all sequences together, at most: those that several share count for each.
    fn all_pages_at_most(&self) -> u64 {
        u64::from(self.pages()) + u64::from(self.shared_pages)
    }

    /// Splits of all sequences together, at most.
    fn all_splits_at_most(&self) -> u64 {
        let own = self.splits_at_most() - self.pages();
        self.all_pages_at_most() + u64::from(self.max_sequences) * u64::from(own)
    }

    /// Partial results of a whole step, at most.
    pub(super) fn attention_cells_at_most(&self) -> u64 {
        let tile = self.split_tiles().last().map_or(1, |tile| *tile);
        let rows = u64::from(self.split_tiles_at_most() * tile) * self.all_splits_at_most();
        let fold_rows = self.fold_tiles_at_most() * u64::from(self.fold_partials() * self.fold_tile());
        rows.max(fold_rows) * u64::from(self.layout.kv_heads)
    }

    /// Bytes of one partial result: maximum, sum, padding, and the output.
    pub fn partial_bytes(&self) -> u64 {
        16 + 4 * u64::from(self.layout.head_dim)
    }

    /// Bytes of the attention scratch.
    pub fn scratch_bytes(&self) -> u64 {
        u64::from(self.scratch_cells) * self.partial_bytes()
    }

    /// Bytes of the upload buffers that a cache always has.
    pub(crate) fn upload_bytes(&self) -> u64 {
        UPLOADS * self.plan_bytes()
    }

    /// Bytes that the plan of any operation of this geometry fits in.
    pub fn plan_bytes(&self) -> u64 {
        let sequences = u64::from(self.max_sequences);
        let batch = u64::from(self.max_batch_tokens);
        let group = u64::from(self.layout.group);
        let slabs = u64::from(self.slabs());
        let classes = self.attention_classes.len() as u64;
        let fold_tiles = self.fold_tiles_at_most();
        let tiles = classes * (sequences * u64::from(self.split_tiles_at_most()) + fold_tiles);

        // Two neighbouring rounds together overflow the scratch, or one does that a tile was split over.
        let class_rounds = 3 * self.attention_cells_at_most().div_ceil(u64::from(self.scratch_cells.max(1)))
            + 2 * self.split_tiles().len() as u64;
        let rounds = classes * class_rounds;
        // A fold goes through the unpacked tokens before and after the history, which is in one piece if there is one slab; else in the worst
        // case each page is one. Two sequences may be out of step by two passes.
        let pieces = if slabs > 1 { u64::from(self.pages()) } else { 1 };
        let segments = pieces + 2;
        let all_pieces = self.all_pages_at_most();
        let passes_per_round = if slabs > 1 { all_pieces + 2 * self.folding_at_most() } else { segments + 2 };
        let fits = u64::from((self.scratch_cells / (self.fold_partials() * self.fold_tile())).max(1));
        let fold_rounds = 2 * (fold_tiles * u64::from(self.layout.kv_heads)).div_ceil(fits) + 1;
        let fold_passes = if fold_tiles == 0 { 0 } else { classes * fold_rounds * (passes_per_round + 1) };
        // What is rotated first has passes of its own. A step may have to copy a page of each sequence that packs, a reorder one of each sequence.
        let passes = 4 + rounds * (slabs + 2) + 4 * slabs + fold_passes + sequences;
        let items = classes * u64::from(self.split_tiles_at_most()) * self.all_splits_at_most();
        let splits = if fold_tiles == 0 { 0 } else { classes * self.all_splits_at_most() };
        let runs = classes * fold_tiles * segments;
        // A step packs less than a group of what the window held besides new tokens.
        let packed = batch + sequences * (group - 1);
        let attended = batch + sequences * u64::from(self.sinks + self.held_tokens());
        let words = packed
            + attended
            + 2 * batch
            + 2 * packed.div_ceil(group)
            + u64::from(TILE_WORDS) * tiles
            + u64::from(ITEM_WORDS) * items
            + u64::from(SPLIT_WORDS) * splits
            + u64::from(ITEM_WORDS) * runs
            + 2 * sequences * u64::from(self.layout.blocks_per_page() - 1);
        // The others: a reorder copies the unpacked tokens of all sequences but one, a truncation unpacks less than a group.
        let copied = 2 * sequences * u64::from(self.sinks + self.held_tokens());
        let words = words.max(copied + 2 * sequences * u64::from(self.layout.blocks_per_page()) + 3 * group);
        u64::from(PLAN_PARAMS_STRIDE) * passes + 4 * words
    }
}
