//! How an executor divides attention: tiles of rows, splits, rounds, and partial results.
//!
//! A row is a query of one query head. Rows of one sequence attend together in [tiles](RowTile). What they
//! attend to comes in [splits](Split), each a part of an extent of the plan. Tiles of decode steps have a
//! partial result per row and *span*, some tokens of the sequence: few of a short one, so that many
//! workgroups share it, and many of a long one, so that there are few to join. Tiles of long chunks have one
//! per row (two where values are rotated). A [run](TileRun) extends partial results by consecutive splits
//! that are in one buffer. Rounds are as many tiles as the scratch holds partial results for.
//!
//! Spans and splits depend only on a sequence's own length and number of queries, so a row's result never
//! depends on its batch, on the scratch, or on where a page lies.

mod bounds;
mod decode;
mod prefill;
mod tiles;

pub use bounds::{Bounds, Budget};
pub use tiles::{TileLimits, Tiles};

use crate::plan::{Extent, Plan, records};
use crate::shape::Shape;
use std::ops::Range;

records! {
    /// Up to `row_tile` rows of one sequence that attend together. Row `r` is query `r / heads_per_kv`, head
    /// `r % heads_per_kv` of each KV head's query heads.
    RowTile {
        /// Row of the step's queries that holds the sequence's first query.
        first_query: u32,
        /// First row of the tile.
        first_row: u32,
        /// Rows of the tile.
        rows: u32,
        /// Position of the sequence's first query.
        position: u32,
        /// First partial row of the tile; partial result `p`, row `r` is partial row `first_partial + p *
        /// row_tile + r`.
        first_partial: u32,
        /// Partial results to merge, in order of position.
        partials: u32,
        /// First of those that are of packed pages.
        first_packed: u32,
        /// Number of those.
        packed: u32,
    }

    /// Up to a page of tokens that tiles extend their partial results by.
    Split {
        /// As [`Extent::source`].
        source: u32,
        /// As [`Extent::tokens`].
        tokens: u32,
        /// As [`Extent::first_position`].
        first_position: u32,
    }

    /// One tile extends its partial result by consecutive splits.
    TileRun {
        /// Index in [`Schedule::tiles`].
        tile: u32,
        /// First partial row that it extends: where values are rotated, packed and unpacked tokens have
        /// partial results of their own.
        partial: u32,
        /// The first split: its index in [`Schedule::splits`], and in a plan buffer the word where it lies.
        first_split: u32,
        /// Number of splits, in order of position.
        splits: u32,
        /// Whether this is the first run of that partial result, 1 or 0: nothing is there to extend.
        fresh: u32,
        /// Whether its tokens are unpacked, 1 or 0.
        unpacked: u32,
    }
}

/// Runs that read one slab, or unpacked tokens, or both. A round's passes run one after the other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttendPass {
    /// The slab, or `None` if all tokens are unpacked.
    pub slab: Option<u32>,
    /// Range of [`Schedule::runs`].
    pub runs: Range<u32>,
    /// How many of them, the first, are over unpacked tokens.
    pub unpacked: u32,
}

/// Tiles whose partial results fit the scratch together. Rounds run one after the other.
///
/// Partial row `p` of head `h` is number `p * heads.len() + h - heads.start` of the scratch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Round {
    /// Index in [`Shape::attention`]: the round is for layers that attend in this way only.
    pub attention: u32,
    /// Rows per workgroup of these tiles.
    pub row_tile: u32,
    /// KV heads.
    pub heads: Range<u32>,
    /// Range of [`Schedule::tiles`].
    pub tiles: Range<u32>,
    /// Whether its tiles are those of long chunks. Then a pass reads a slab or unpacked tokens, not both.
    pub prefill: bool,
    /// The passes that make or extend the partial results.
    pub passes: Vec<AttendPass>,
}

/// The attention of a step in one class.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Schedule {
    /// Tiles to attend and merge.
    pub tiles: Vec<RowTile>,
    /// What tiles attend to.
    pub splits: Vec<Split>,
    /// Work of the attention passes.
    pub runs: Vec<TileRun>,
    /// In order.
    pub rounds: Vec<Round>,
}

impl Schedule {
    /// Divides the attention of a plan, for each way in which layers attend, among tiles whose partial
    /// results fit a scratch of so many.
    pub fn new(shape: &Shape, tiles: &Tiles, scratch_partials: u32, plan: &Plan) -> Schedule {
        let mut schedule = Schedule::default();
        for attention in 0..shape.attention.len() as u32 {
            let attending = Attending { shape, tiles, scratch_partials, plan, attention };
            attending.decode(&mut schedule);
            attending.prefill(&mut schedule);
        }
        schedule
    }
}

/// A plan's attention in one of the ways in which layers attend.
struct Attending<'a> {
    shape: &'a Shape,
    tiles: &'a Tiles,
    scratch_partials: u32,
    plan: &'a Plan,
    /// Index in [`Shape::attention`].
    attention: u32,
}

impl Attending<'_> {
    fn sliding_window(&self) -> Option<u32> {
        self.shape.attention[self.attention as usize].sliding_window
    }

    /// Those of a sequence's extents that some of its queries, the first of which is at `position`, sees.
    fn seen(&self, extents: &Range<u32>, position: u32) -> Vec<Extent> {
        // The first query sees positions from here on, the others from later ones.
        let from = self.sliding_window().map_or(0, |n| (position + 1).saturating_sub(n));
        let extents = &self.plan.extents[extents.start as usize..extents.end as usize];
        extents.iter().filter(|extent| extent.first_position + extent.tokens > from).copied().collect()
    }
}
