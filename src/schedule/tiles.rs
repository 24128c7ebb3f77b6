//! Tiles of rows.

use crate::format::PAGE_TOKENS;
use crate::shape::Shape;

/// The tiles that an executor's attention kernels take, at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TileLimits {
    /// Rows of a decode tile.
    pub decode_rows: u32,
    /// Elements of a decode tile's queries.
    pub decode_elements: u32,
    /// Queries of one sequence in a step up to which its attention always has a partial result per span.
    pub decode_queries: u32,
    /// Tokens of a span, by the length up to which a sequence has such: the last is for all longer ones.
    pub spans: [(u32, u32); 5],
    /// Rows of a tile of a long chunk.
    pub prefill_rows: u32,
    /// Elements of such a tile's outputs.
    pub prefill_elements: u32,
}

impl TileLimits {
    /// Of the WGSL kernels.
    pub const WGSL: TileLimits = TileLimits {
        decode_rows: 8,
        // 16 KiB of workgroup memory hold four arrays of so many.
        decode_elements: 1024,
        decode_queries: 8,
        // At most 64 spans up to 2^17 tokens.
        spans: [(1 << 10, 64), (1 << 12, 128), (1 << 14, 256), (1 << 16, 1024), (u32::MAX, 2048)],
        prefill_rows: 64,
        // 32 for each invocation.
        prefill_elements: 8192,
    };
}

/// The tiles of a class of layers.
///
/// They depend on nothing else, so that with one variant of the kernels a row's sums run in the same order in
/// every batch and on every adapter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tiles {
    heads_per_kv: u32,
    head_dim: u32,
    max_step: u32,
    values_rotated: bool,
    /// Rows of the largest decode tile.
    largest: u32,
    decode_queries: u32,
    spans: [(u32, u32); 5],
    prefill: u32,
}

impl Tiles {
    /// Of layers of a shape.
    pub fn new(shape: &Shape, limits: &TileLimits) -> Tiles {
        let padded_dim = shape.layout.head_dim.next_multiple_of(16);
        let within = |most: u32, elements: u32| {
            let mut rows = most;
            while rows * padded_dim > elements {
                rows /= 2;
            }
            rows
        };
        Tiles {
            heads_per_kv: shape.heads_per_kv,
            head_dim: shape.layout.head_dim,
            max_step: shape.max_step,
            values_rotated: shape.layout.values.rotated,
            largest: within(limits.decode_rows, limits.decode_elements),
            decode_queries: limits.decode_queries,
            // Whole blocks.
            spans: limits.spans.map(|(length, tokens)| (length, tokens.max(shape.layout.group))),
            prefill: within(limits.prefill_rows, limits.prefill_elements),
        }
    }

    /// Whether a sequence with `queries` queries in a step attends as long chunks do, with
    /// [one or two](Self::prefill_partials) partial results per row instead of one per span.
    pub fn is_prefill(&self, queries: u32) -> bool {
        queries > self.decode_queries && queries * self.heads_per_kv > self.largest
    }

    /// Whether any step may.
    pub fn may_prefill(&self) -> bool {
        self.is_prefill(self.max_step)
    }

    /// Rows per workgroup of a long chunk.
    pub fn prefill_tile(&self) -> u32 {
        self.prefill
    }

    /// Partial results of a row of a long chunk: one, or one of packed and one of unpacked tokens if values
    /// are rotated.
    pub fn prefill_partials(&self) -> u32 {
        if self.values_rotated { 2 } else { 1 }
    }

    /// Rows per workgroup for a sequence with `queries` queries in a step.
    pub fn row_tile(&self, queries: u32) -> u32 {
        if self.is_prefill(queries) {
            return self.prefill;
        }
        (queries * self.heads_per_kv).next_power_of_two().min(self.largest)
    }

    /// Numbers of queries with a partial result per span: all of them, or up to a few more than that.
    fn decode_counts(&self) -> impl Iterator<Item = u32> {
        let most = self.largest.max(self.decode_queries);
        (1..=self.max_step.min(most)).filter(|n| !self.is_prefill(*n))
    }

    /// Row tiles of decode steps, smallest first.
    pub fn decode_tiles(&self) -> Vec<u32> {
        let mut tiles: Vec<u32> = self.decode_counts().map(|n| self.row_tile(n)).collect();
        tiles.dedup();
        tiles
    }

    /// The largest of those.
    pub fn largest_decode_tile(&self) -> u32 {
        self.decode_tiles().last().copied().unwrap_or(1)
    }

    /// Row tiles of one sequence in a decode step, at most.
    pub(super) fn decode_tiles_at_most(&self) -> u32 {
        let tiles = |n: u32| (n * self.heads_per_kv).div_ceil(self.row_tile(n));
        self.decode_counts().map(tiles).max().unwrap_or(1)
    }

    /// Queries of a sequence that attends as long chunks do, at least.
    pub(super) fn least_prefill(&self) -> u32 {
        self.decode_queries + 1
    }

    /// Tokens of a span of a sequence of this many tokens.
    pub(super) fn span_tokens(&self, length: u32) -> u32 {
        let fitting = self.spans.iter().find(|(up_to, _)| length <= *up_to);
        fitting.map_or(self.shortest_span(), |(_, tokens)| *tokens)
    }

    /// Tokens of the shortest spans, which those of unpacked tokens are.
    pub(super) fn shortest_span(&self) -> u32 {
        self.spans[0].1
    }

    /// Pages that a span reaches over, at most.
    pub(super) fn pages_of_a_span(&self) -> u64 {
        let longest = self.spans.iter().map(|(_, tokens)| tokens.div_ceil(PAGE_TOKENS)).max();
        longest.unwrap_or(1).into()
    }

    /// Spans of up to `pages` pages of one sequence, at most.
    pub(super) fn spans_at_most(&self, pages: u32) -> u32 {
        // Of sequences as long as those with one kind of spans can be; pages may begin in the middle of one.
        let spans = self.spans.iter().map(|&(length, tokens)| {
            let most = (u64::from(pages) * u64::from(PAGE_TOKENS)).min(length.into());
            most.div_ceil(tokens.into()) as u32 + 1
        });
        spans.max().unwrap_or(0)
    }

    /// Bytes of one partial result: maximum, sum, padding, and the output.
    pub fn partial_bytes(&self) -> u64 {
        16 + 4 * u64::from(self.head_dim)
    }
}
