//! What a step needs at most: its partial results and its plan.

use super::{RowTile, Split, TileRun, Tiles};
use crate::error::Error;
use crate::format::PAGE_TOKENS;
use crate::plan::{BlockCopy, PackBlock, PoolSize, Record, TokenCopy, TokenUnpack, TokenWrite};
use crate::shape::Shape;

/// A class of layers, and how large its pool is.
#[derive(Debug, Clone, Copy)]
pub struct Bounds<'a> {
    /// The shape of the layers.
    pub shape: &'a Shape,
    /// Their tiles.
    pub tiles: &'a Tiles,
    /// The pool. Plans are made for as many shared pages as it says.
    pub pool: PoolSize,
}

/// What an executor makes for the steps of a class.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budget {
    /// The pool that it is for.
    pub pool: PoolSize,
    /// Partial results (of one row of one head over one span) that the scratch holds.
    pub scratch_partials: u32,
    /// Bytes of the scratch.
    pub scratch_bytes: u64,
    /// Bytes that the plan of any operation fits in.
    pub plan_bytes: u64,
}

impl Bounds<'_> {
    /// What steps need. The scratch is as large as the configuration grants and a step may use, and holds at
    /// least one row tile of one head over the longest sequence.
    ///
    /// `pass_bytes` are those of a pass's parameters.
    ///
    /// # Errors
    /// [`Error::LimitTooLow`] if the longest sequence that fits is longer than a binding of `max_binding`
    /// bytes can hold the partial results of.
    pub fn budget(&self, max_binding: u64, pass_bytes: u32) -> Result<Budget, Error> {
        let bytes = self.tiles.partial_bytes();
        let decode = u64::from(self.tiles.largest_decode_tile()) * u64::from(self.spans_at_most());
        let prefill = u64::from(self.tiles.prefill_partials() * self.tiles.prefill_tile());
        let least = decode.max(prefill);
        if least * bytes > max_binding {
            return Err(Error::LimitTooLow {
                limit: "max_storage_buffer_binding_size",
                available: max_binding,
                needed: least * bytes,
                what: "the partial results of attention over the longest sequence",
                instead: "lower capacity and max_capacity",
            });
        }
        let wanted = (self.shape.max_scratch_bytes.min(max_binding) / bytes).max(least);
        let scratch_partials = wanted.min(self.partials_at_most()) as u32;
        Ok(Budget {
            pool: self.pool,
            scratch_partials,
            scratch_bytes: u64::from(scratch_partials) * bytes,
            plan_bytes: self.plan_bytes(scratch_partials, pass_bytes),
        })
    }

    /// Spans of a sequence, at most: those of its pages, of sinks, and of the unpacked tokens of a step.
    fn spans_at_most(&self) -> u32 {
        self.tiles.spans_at_most(self.pool.pages) + self.unpacked_spans()
    }

    /// Spans of unpacked tokens of a sequence, at most.
    fn unpacked_spans(&self) -> u32 {
        let unpacked = self.shape.held_tokens() + self.shape.max_step;
        let short = self.tiles.shortest_span();
        self.shape.sinks.div_ceil(short) + unpacked.div_ceil(short)
    }

    /// Row tiles of long chunks of all sequences in a step, at most.
    fn prefill_tiles_at_most(&self) -> u64 {
        if !self.tiles.may_prefill() {
            return 0;
        }
        // Each sequence has a tile that is not full, at most.
        let rows = u64::from(self.shape.max_batch_tokens) * u64::from(self.shape.heads_per_kv);
        rows.div_ceil(u64::from(self.tiles.prefill_tile())) + self.long_at_most()
    }

    /// Sequences with long chunks in a step, at most.
    fn long_at_most(&self) -> u64 {
        self.shape.max_sequences.min(self.shape.max_batch_tokens / self.tiles.least_prefill()).into()
    }

    /// Pages of all sequences together, at most: those that several share count for each.
    fn all_pages_at_most(&self) -> u64 {
        u64::from(self.pool.pages) + u64::from(self.pool.shared)
    }

    /// Spans of all sequences together, at most.
    fn all_spans_at_most(&self) -> u64 {
        let sequences = u64::from(self.shape.max_sequences);
        // As many as in the shortest spans, where a page may be cut off at its beginning.
        let short =
            u64::from(PAGE_TOKENS / self.tiles.shortest_span()) * self.all_pages_at_most() + sequences;
        let packed = short.min(sequences * u64::from(self.tiles.spans_at_most(self.pool.pages)));
        packed + sequences * u64::from(self.unpacked_spans())
    }

    /// Splits of all sequences together, at most: pages, if not spans are shorter.
    fn all_splits_at_most(&self) -> u64 {
        self.all_pages_at_most() + self.all_spans_at_most()
    }

    /// Partial results of a whole step, at most.
    fn partials_at_most(&self) -> u64 {
        let tile = self.tiles.largest_decode_tile();
        let rows = u64::from(self.tiles.decode_tiles_at_most() * tile) * self.all_spans_at_most();
        let partials = u64::from(self.tiles.prefill_partials() * self.tiles.prefill_tile());
        let prefill_rows = self.prefill_tiles_at_most() * partials;
        rows.max(prefill_rows) * u64::from(self.shape.layout.kv_heads)
    }

    /// Passes of an operation, at most.
    fn passes_at_most(&self, scratch_partials: u32) -> u64 {
        let slabs = u64::from(self.pool.slabs);
        let kinds = self.shape.attention.len() as u64;
        // Two neighbouring rounds together overflow the scratch, or one does that a tile was split over.
        let full = self.partials_at_most().div_ceil(u64::from(scratch_partials.max(1)));
        let rounds = kinds * (3 * full + 2 * self.tiles.decode_tiles().len() as u64);
        // Two sequences may be out of step by two passes.
        let tiles = self.prefill_tiles_at_most();
        let per_round = match slabs > 1 {
            true => self.all_pages_at_most() + 2 * self.long_at_most(),
            false => self.segments_at_most() + 2,
        };
        let partials = self.tiles.prefill_partials() * self.tiles.prefill_tile();
        let fitting = u64::from((scratch_partials / partials).max(1));
        let prefill_rounds = 2 * (tiles * u64::from(self.shape.layout.kv_heads)).div_ceil(fitting) + 1;
        let prefill = if tiles == 0 { 0 } else { kinds * prefill_rounds * (per_round + 1) };
        // What is rotated first has passes of its own. A step may have to copy a page of each sequence that
        // packs, a reorder one of each sequence.
        // Pieces of a span in one slab after the other.
        let pieces = if slabs > 1 { self.tiles.pages_of_a_span() } else { 1 };
        4 + rounds * (pieces * slabs + 3) + 4 * slabs + prefill + u64::from(self.shape.max_sequences)
    }

    /// Pieces in which a long chunk goes through a sequence, at most: the unpacked tokens before and after
    /// the pages, which are in one piece if there is one slab; else in the worst case each page is one.
    fn segments_at_most(&self) -> u64 {
        2 + if self.pool.slabs > 1 { u64::from(self.pool.pages) } else { 1 }
    }

    /// Bytes of the work lists of an operation, at most.
    fn list_bytes(&self) -> u64 {
        let words = |record: u32, count: u64| u64::from(record) * count;
        let sequences = u64::from(self.shape.max_sequences);
        let batch = u64::from(self.shape.max_batch_tokens);
        let group = u64::from(self.shape.layout.group);
        let per_page = u64::from(self.shape.layout.blocks_per_page());
        let held = u64::from(self.shape.sinks + self.shape.held_tokens());
        let kinds = self.shape.attention.len() as u64;
        let prefill_tiles = self.prefill_tiles_at_most();
        let decode_tiles = u64::from(self.tiles.decode_tiles_at_most());
        let tiles = kinds * (sequences * decode_tiles + prefill_tiles);
        let splits = kinds * self.all_splits_at_most();
        let pieces = if self.pool.slabs > 1 { self.all_splits_at_most() } else { self.all_spans_at_most() };
        let runs = kinds * (decode_tiles * pieces + prefill_tiles * self.segments_at_most());
        // A step packs less than a group of what the window held besides new tokens.
        let packed = batch + sequences * (group - 1);
        let attended = batch + sequences * held;
        let step = packed
            + attended
            + words(TokenWrite::WORDS, batch)
            + words(PackBlock::WORDS, packed.div_ceil(group))
            + words(RowTile::WORDS, tiles)
            + words(Split::WORDS, splits)
            + words(TileRun::WORDS, runs)
            + words(BlockCopy::WORDS, sequences * (per_page - 1));
        // The others: a reorder copies the unpacked tokens of all sequences but one, a truncation unpacks
        // less than a group.
        let other = words(TokenCopy::WORDS, sequences * held)
            + words(BlockCopy::WORDS, sequences * per_page)
            + words(TokenUnpack::WORDS, group);
        4 * step.max(other)
    }

    /// Bytes that the plan of any operation fits in.
    fn plan_bytes(&self, scratch_partials: u32, pass_bytes: u32) -> u64 {
        u64::from(pass_bytes) * self.passes_at_most(scratch_partials) + self.list_bytes()
    }
}
