//! Attention of long chunks: one partial result per row (or one of packed and one of unpacked tokens, if
//! values are rotated), which passes over consecutive splits extend in order of position.
//!
//! The partials of a decode step are one per row and split, so that many workgroups share a long context. A
//! chunk of a prompt has rows enough, and a partial per split would grow with the context. Each addition is
//! the same whichever pass makes it, so the bits do not depend on how the splits of a sequence are divided
//! into passes, and so not on the slabs where its pages lie.

use super::{AttendPass, Attending, Round, RowTile, Schedule, Split, TileRun};
use crate::plan::Extent;
use std::ops::Range;

/// Consecutive splits of one sequence in one buffer.
struct Segment {
    slab: Option<u32>,
    splits: Range<u32>,
}

/// A tile and the range of its sequence's segments that it sees.
struct PrefillTile {
    sequence: usize,
    tile: RowTile,
}

impl Attending<'_> {
    /// Adds the attention of all sequences whose number of queries asks for it.
    pub(super) fn prefill(&self, schedule: &mut Schedule) {
        let row_tile = self.tiles.prefill_tile();
        let mut segments = Vec::new();
        let mut tiles = Vec::new();
        let long = |n: u32| self.tiles.is_prefill(n);
        for sequence in self.plan.attends.iter().filter(|sequence| long(sequence.queries)) {
            let rows = sequence.queries * self.shape.heads_per_kv;
            tiles.extend((0..rows).step_by(row_tile as usize).map(|first_row| PrefillTile {
                sequence: segments.len(),
                tile: RowTile {
                    first_query: sequence.first_query,
                    first_row,
                    rows: row_tile.min(rows - first_row),
                    position: sequence.position,
                    first_partial: 0,
                    partials: 1,
                    first_packed: 0,
                    packed: 0,
                },
            }));
            segments.push(segments_of(&self.seen(&sequence.extents, sequence.position), schedule));
        }

        // As many tiles at a time as the scratch holds, of as many heads.
        let kv_heads = self.shape.layout.kv_heads;
        let partial_rows = self.tiles.prefill_partials() * row_tile;
        let fitting = (self.scratch_partials / partial_rows).max(1);
        let heads = fitting.min(kv_heads);
        let heads = kv_heads.div_ceil(kv_heads.div_ceil(heads));
        for tiles in tiles.chunks((fitting / heads) as usize) {
            let first_tile = schedule.tiles.len() as u32;
            schedule.tiles.extend(
                tiles.iter().zip(0..).map(|(t, i)| RowTile { first_partial: i * partial_rows, ..t.tile }),
            );
            let passes = self.passes(tiles, first_tile, &segments, schedule);
            let round = Round {
                attention: self.attention,
                row_tile,
                heads: 0..0,
                tiles: first_tile..schedule.tiles.len() as u32,
                prefill: true,
                passes,
            };
            for first in (0..kv_heads).step_by(heads as usize) {
                schedule.rounds.push(Round { heads: first..kv_heads.min(first + heads), ..round.clone() });
            }
        }
    }

    /// The passes that cover every tile's segments, each tile's in order.
    fn passes(
        &self,
        tiles: &[PrefillTile],
        first_tile: u32,
        segments: &[Vec<Segment>],
        schedule: &mut Schedule,
    ) -> Vec<AttendPass> {
        let rotated = self.shape.layout.values.rotated;
        let mut passes = Vec::new();
        let mut next = vec![0; segments.len()];
        // By tile: whether unpacked and packed tokens have no partial result yet. They share one unless
        // values are rotated.
        let mut fresh = vec![[true; 2]; tiles.len()];
        // The buffer that the first unfinished sequence needs, with all the others that are at it too.
        while let Some(slab) =
            segments.iter().zip(&next).find_map(|(own, &next)| own.get(next).map(|segment| segment.slab))
        {
            let first_run = schedule.runs.len() as u32;
            for (i, PrefillTile { sequence, tile }) in tiles.iter().enumerate() {
                let Some(segment) = segments[*sequence].get(next[*sequence]) else { continue };
                if segment.slab != slab {
                    continue;
                }
                let splits = self.seen_by(tile, &segment.splits, schedule);
                if !splits.is_empty() {
                    let own = if rotated && slab.is_some() { 1 } else { 0 };
                    let tile = first_tile + i as u32;
                    let first = schedule.tiles[tile as usize].first_partial;
                    schedule.runs.push(TileRun {
                        tile,
                        partial: first + own as u32 * self.tiles.prefill_tile(),
                        first_split: splits.start,
                        splits: splits.end - splits.start,
                        fresh: std::mem::take(&mut fresh[i][own]).into(),
                        unpacked: slab.is_none().into(),
                    });
                }
            }
            let runs = first_run..schedule.runs.len() as u32;
            if !runs.is_empty() {
                let unpacked = if slab.is_none() { runs.end - runs.start } else { 0 };
                passes.push(AttendPass { slab, runs, unpacked });
            }
            for (own, next) in segments.iter().zip(&mut next) {
                if own.get(*next).is_some_and(|segment| segment.slab == slab) {
                    *next += 1;
                }
            }
        }
        for (tile, [no_unpacked, no_packed]) in schedule.tiles[first_tile as usize..].iter_mut().zip(fresh) {
            if rotated && !no_packed {
                (tile.partials, tile.first_packed, tile.packed) = (2, 1, 1);
                // Without a window even the newest token may be packed, once its step is over.
                if no_unpacked {
                    (tile.partials, tile.first_packed) = (1, 0);
                    tile.first_partial += self.tiles.prefill_tile();
                }
            }
        }
        passes
    }

    /// Those of the splits with a token that some row of the tile sees.
    fn seen_by(&self, tile: &RowTile, splits: &Range<u32>, schedule: &Schedule) -> Range<u32> {
        let heads = self.shape.heads_per_kv;
        let first = tile.position + tile.first_row / heads;
        let last = tile.position + (tile.first_row + tile.rows - 1) / heads;
        let from = self.sliding_window().map_or(0, |n| (first + 1).saturating_sub(n));
        let own = &schedule.splits[splits.start as usize..splits.end as usize];
        let skipped = own.iter().take_while(|s| s.first_position + s.tokens <= from).count() as u32;
        let seen = own.iter().take_while(|s| s.first_position <= last).count() as u32;
        splits.start + skipped..splits.start + seen.max(skipped)
    }
}

/// Adds a sequence's splits to the schedule.
fn segments_of(extents: &[Extent], schedule: &mut Schedule) -> Vec<Segment> {
    let mut segments: Vec<Segment> = Vec::new();
    for &Extent { slab, source, tokens, first_position } in extents {
        let at = schedule.splits.len() as u32;
        schedule.splits.push(Split { source, tokens, first_position });
        match segments.last_mut() {
            Some(last) if last.slab == slab => last.splits.end = at + 1,
            _ => segments.push(Segment { slab, splits: at..at + 1 }),
        }
    }
    segments
}
