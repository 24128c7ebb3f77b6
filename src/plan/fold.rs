//! Attention of long chunks: one partial result per row (or one of packed and one of unpacked tokens, if values are rotated), which passes over consecutive splits extend in order of position.
//!
//! The partials of a decode step are one per row and split, so that many workgroups share a long context. A chunk of a prompt has rows enough, and a
//! partial per split would grow with the context. Each addition is the same whichever pass makes it, so the bits do not depend on how the splits
//! of a sequence are divided into passes, and so not on the slabs where its pages lie.

use super::attention::{Attention, Split};
use super::{FoldPass, FoldSplit, Round, RowTile, StepPlan, TileRun};
use crate::geometry::Geometry;
use std::ops::Range;

/// Consecutive splits of one sequence in one buffer.
struct Segment {
    slab: Option<u32>,
    splits: Range<u32>,
}

/// A tile and the range of its sequence's segments that it sees.
struct FoldTile {
    sequence: usize,
    tile: RowTile,
}

/// Adds the attention of all sequences whose number of queries asks for it, for one class of layers.
pub(super) fn plan_folds(g: &Geometry, sequences: &[Attention<'_>], class: u32, plan: &mut StepPlan) {
    let sliding_window = g.attention_classes[class as usize].sliding_window;
    let row_tile = g.fold_tile();
    let mut segments = Vec::new();
    let mut tiles = Vec::new();
    for sequence in sequences.iter().filter(|s| g.folds(s.queries)) {
        let rows = sequence.queries * g.heads_per_group;
        tiles.extend((0..rows).step_by(row_tile as usize).map(|first_row| FoldTile {
            sequence: segments.len(),
            tile: RowTile {
                first_query: sequence.first_query,
                first_row,
                rows: row_tile.min(rows - first_row),
                position: sequence.position,
                first_partial: 0,
                splits: 1,
                first_history: 0,
                history_splits: 0,
            },
        }));
        segments.push(segments_of(&sequence.splits(g, sliding_window), plan));
    }

    // As many tiles at a time as the scratch holds, of as many heads.
    let kv_heads = g.layout.kv_heads;
    let partial_rows = g.fold_partials() * row_tile;
    let fitting = (g.scratch_cells / partial_rows).max(1);
    let heads = fitting.min(kv_heads);
    let heads = kv_heads.div_ceil(kv_heads.div_ceil(heads));
    for tiles in tiles.chunks((fitting / heads) as usize) {
        let first_tile = plan.tiles.len() as u32;
        plan.tiles.extend(
            tiles.iter().zip(0..).map(|(t, i)| RowTile { first_partial: i * partial_rows, ..t.tile }),
        );
        let fold = passes(g, tiles, first_tile, &segments, sliding_window, plan);
        let round = Round {
            class,
            row_tile,
            heads: 0..0,
            tiles: first_tile..plan.tiles.len() as u32,
            history: Vec::new(),
            window: 0..0,
            fold,
        };
        for first in (0..kv_heads).step_by(heads as usize) {
            plan.rounds.push(Round { heads: first..kv_heads.min(first + heads), ..round.clone() });
        }
    }
}

/// Adds a sequence's splits to the plan.
fn segments_of(splits: &[Split], plan: &mut StepPlan) -> Vec<Segment> {
    let mut segments: Vec<Segment> = Vec::new();
    for split in splits {
        let at = plan.splits.len() as u32;
        plan.splits.push(FoldSplit {
            source: split.source,
            tokens: split.tokens,
            first_position: split.first_position,
        });
        match segments.last_mut() {
            Some(last) if last.slab == split.slab => last.splits.end = at + 1,
            _ => segments.push(Segment { slab: split.slab, splits: at..at + 1 }),
        }
    }
    segments
}

/// The passes that cover every tile's segments, each tile's in order.
fn passes(
    g: &Geometry,
    tiles: &[FoldTile],
    first_tile: u32,
    segments: &[Vec<Segment>],
    sliding_window: Option<u32>,
    plan: &mut StepPlan,
) -> Vec<FoldPass> {
    let mut passes = Vec::new();
    let mut next = vec![0; segments.len()];
    // By tile: whether unpacked and packed tokens have no partial result yet. They share one unless values are rotated.
    let mut fresh = vec![[true; 2]; tiles.len()];
    // The buffer that the first unfinished sequence needs, with all the others that are at it too.
    while let Some(slab) =
        segments.iter().zip(&next).find_map(|(own, &next)| own.get(next).map(|segment| segment.slab))
    {
        let first_run = plan.runs.len() as u32;
        for (i, FoldTile { sequence, tile }) in tiles.iter().enumerate() {
            let Some(segment) = segments[*sequence].get(next[*sequence]) else { continue };
            if segment.slab != slab {
                continue;
            }
            let splits = seen_by(g, tile, &segment.splits, sliding_window, plan);
            if !splits.is_empty() {
                let own = if g.layout.values.rotated && slab.is_some() { 1 } else { 0 };
                let tile = first_tile + i as u32;
                let partial = plan.tiles[tile as usize].first_partial + own as u32 * g.fold_tile();
                let fresh = std::mem::take(&mut fresh[i][own]);
                plan.runs.push(TileRun { tile, partial, splits, fresh });
            }
        }
        let runs = first_run..plan.runs.len() as u32;
        if !runs.is_empty() {
            passes.push(FoldPass { slab, runs });
        }
        for (own, next) in segments.iter().zip(&mut next) {
            if own.get(*next).is_some_and(|segment| segment.slab == slab) {
                *next += 1;
            }
        }
    }
    for (tile, [no_unpacked, no_history]) in plan.tiles[first_tile as usize..].iter_mut().zip(fresh) {
        if g.layout.values.rotated && !no_history {
            (tile.splits, tile.first_history, tile.history_splits) = (2, 1, 1);
            // Without a window even the newest token may be packed, once its step is over.
            if no_unpacked {
                (tile.splits, tile.first_history) = (1, 0);
                tile.first_partial += g.fold_tile();
            }
        }
    }
    passes
}

/// Those of the splits with a token that some row of the tile sees.
fn seen_by(
    g: &Geometry,
    tile: &RowTile,
    splits: &Range<u32>,
    sliding_window: Option<u32>,
    plan: &StepPlan,
) -> Range<u32> {
    let first = tile.position + tile.first_row / g.heads_per_group;
    let last = tile.position + (tile.first_row + tile.rows - 1) / g.heads_per_group;
    let from = sliding_window.map_or(0, |n| (first + 1).saturating_sub(n));
    let own = &plan.splits[splits.start as usize..splits.end as usize];
    let skipped = own.iter().take_while(|s| s.first_position + s.tokens <= from).count() as u32;
    let seen = own.iter().take_while(|s| s.first_position <= last).count() as u32;
    splits.start + skipped..splits.start + seen.max(skipped)
}
