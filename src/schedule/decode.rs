//! Attention of decode steps: a partial result per row and span.

use super::{AttendPass, Attending, Round, RowTile, Schedule, Split, TileRun};
use crate::plan::{Attend, Extent};
use std::ops::Range;

/// The splits of a span, by the slabs where they are, in order of position.
struct Span {
    is_packed: bool,
    pieces: Vec<(Option<u32>, Range<u32>)>,
}

impl Attending<'_> {
    /// Adds the attention of all sequences with few queries.
    pub(super) fn decode(&self, schedule: &mut Schedule) {
        let kv_heads = self.shape.layout.kv_heads;
        for row_tile in self.tiles.decode_tiles() {
            let mut round = RoundBuilder::new(self.attention, row_tile, 0..kv_heads, schedule);
            let own = |n: u32| n > 0 && !self.tiles.is_prefill(n) && self.tiles.row_tile(n) == row_tile;
            for sequence in self.plan.attends.iter().filter(|sequence| own(sequence.queries)) {
                let spans = self.spans(sequence, schedule);
                let rows = sequence.queries * self.shape.heads_per_kv;
                for first_row in (0..rows).step_by(row_tile as usize) {
                    let tile = RowTile {
                        first_query: sequence.first_query,
                        first_row,
                        rows: row_tile.min(rows - first_row),
                        position: sequence.position,
                        first_partial: 0,
                        partials: spans.len() as u32,
                        first_packed: spans.iter().take_while(|span| !span.is_packed).count() as u32,
                        packed: spans.iter().filter(|span| span.is_packed).count() as u32,
                    };
                    round = self.add(round, tile, &spans, schedule);
                }
            }
            round.finish(schedule);
        }
    }

    /// The spans of a sequence, whose splits are added to the schedule. Those of packed tokens begin at
    /// multiples of their length from the first packed position on.
    fn spans(&self, sequence: &Attend, schedule: &mut Schedule) -> Vec<Span> {
        let length = self.tiles.span_tokens(sequence.position + sequence.queries);
        let mut spans: Vec<Span> = Vec::new();
        let mut last = None;
        for extent in self.seen(&sequence.extents, sequence.position) {
            for split in self.splits_of(&extent, length) {
                let at = schedule.splits.len() as u32;
                let is_packed = extent.slab.is_some();
                let place = is_packed.then(|| (split.first_position - self.shape.sinks) / length);
                schedule.splits.push(split);
                match spans.last_mut() {
                    Some(span) if place.is_some() && place == last => match span.pieces.last_mut() {
                        Some((slab, splits)) if *slab == extent.slab => splits.end = at + 1,
                        _ => span.pieces.push((extent.slab, at..at + 1)),
                    },
                    _ => spans.push(Span { is_packed, pieces: vec![(extent.slab, at..at + 1)] }),
                }
                last = place;
            }
        }
        spans
    }

    /// An extent in splits that are no longer than a span; unpacked tokens in the shortest spans.
    fn splits_of(&self, extent: &Extent, length: u32) -> impl Iterator<Item = Split> + use<> {
        let group = self.shape.layout.group;
        let (at_most, per_source) = match extent.slab {
            Some(_) => (length, group),
            None => (self.tiles.shortest_span(), 1),
        };
        let Extent { source, tokens, first_position, .. } = *extent;
        // A page may begin with blocks that are gone: its splits end where those of a whole one would.
        let skipped = match extent.slab {
            Some(_) => (first_position - self.shape.sinks) % at_most,
            None => 0,
        };
        let ends = (1..).map(move |n| (n * at_most - skipped).min(tokens));
        let begins = std::iter::once(0).chain(ends.clone()).take_while(move |begin| *begin < tokens);
        begins.zip(ends).map(move |(begin, end)| Split {
            source: source + begin / per_source,
            tokens: end - begin,
            first_position: first_position + begin,
        })
    }

    /// Adds a tile to a round, or to one or several new ones if it does not fit; returns the last.
    fn add(
        &self,
        mut round: RoundBuilder,
        tile: RowTile,
        spans: &[Span],
        schedule: &mut Schedule,
    ) -> RoundBuilder {
        let (kv_heads, row_tile) = (self.shape.layout.kv_heads, round.row_tile);
        let partial_rows = spans.len() as u32 * row_tile;
        let new = |heads, schedule: &Schedule| RoundBuilder::new(self.attention, row_tile, heads, schedule);
        // As many heads at a time as the scratch holds, which is made for one at least.
        let heads = (self.scratch_partials / partial_rows.max(1)).clamp(1, kv_heads);
        if heads < kv_heads {
            // Evenly: a round of few heads leaves the device idle.
            let heads = kv_heads.div_ceil(kv_heads.div_ceil(heads));
            round.finish(schedule);
            // Rounds of the same tile and other heads: they differ in nothing else, and so share its work
            // list.
            let mut alone = new(0..heads, schedule);
            alone.add(tile, spans, schedule);
            let at = schedule.rounds.len();
            alone.finish(schedule);
            for first in (heads..kv_heads).step_by(heads as usize) {
                let heads = first..kv_heads.min(first + heads);
                schedule.rounds.push(Round { heads, ..schedule.rounds[at].clone() });
            }
            return new(0..kv_heads, schedule);
        }
        if (round.partial_rows + partial_rows) * kv_heads > self.scratch_partials {
            round.finish(schedule);
            round = new(0..kv_heads, schedule);
        }
        round.add(tile, spans, schedule);
        round
    }
}

struct RoundBuilder {
    attention: u32,
    row_tile: u32,
    heads: Range<u32>,
    first_tile: u32,
    partial_rows: u32,
    /// By which of its span's pieces a run is, and the slab.
    packed: Vec<(usize, Option<u32>, TileRun)>,
    unpacked: Vec<TileRun>,
}

impl RoundBuilder {
    fn new(attention: u32, row_tile: u32, heads: Range<u32>, schedule: &Schedule) -> RoundBuilder {
        RoundBuilder {
            attention,
            row_tile,
            heads,
            first_tile: schedule.tiles.len() as u32,
            partial_rows: 0,
            packed: Vec::new(),
            unpacked: Vec::new(),
        }
    }

    fn add(&mut self, tile: RowTile, spans: &[Span], schedule: &mut Schedule) {
        let index = schedule.tiles.len() as u32;
        schedule.tiles.push(RowTile { first_partial: self.partial_rows, ..tile });
        for span in spans {
            for (n, (slab, splits)) in span.pieces.iter().enumerate() {
                let run = TileRun {
                    tile: index,
                    partial: self.partial_rows,
                    first_split: splits.start,
                    splits: splits.end - splits.start,
                    fresh: (n == 0).into(),
                    unpacked: (!span.is_packed).into(),
                };
                match span.is_packed {
                    true => self.packed.push((n, *slab, run)),
                    false => self.unpacked.push(run),
                }
            }
            self.partial_rows += self.row_tile;
        }
    }

    /// Adds the round to the schedule, if it has a tile.
    fn finish(mut self, schedule: &mut Schedule) {
        let tiles = self.first_tile..schedule.tiles.len() as u32;
        if tiles.is_empty() {
            return;
        }
        // A span's pieces one after the other; unpacked tokens with the first slab.
        self.packed.sort_by_key(|(n, slab, _)| (*n, *slab));
        let first = schedule.runs.len() as u32;
        schedule.runs.append(&mut self.unpacked);
        let end = schedule.runs.len() as u32;
        let mut passes = vec![AttendPass { slab: None, runs: first..end, unpacked: end - first }];
        let mut last = None;
        for (n, slab, run) in self.packed {
            let at = schedule.runs.len() as u32;
            schedule.runs.push(run);
            match passes.last_mut() {
                Some(pass) if last.is_none() || last == Some((n, slab)) => {
                    (pass.slab, pass.runs.end) = (slab, at + 1);
                }
                _ => passes.push(AttendPass { slab, runs: at..at + 1, unpacked: 0 }),
            }
            last = Some((n, slab));
        }
        passes.retain(|pass| !pass.runs.is_empty());
        schedule.rounds.push(Round {
            attention: self.attention,
            row_tile: self.row_tile,
            heads: self.heads,
            tiles,
            prefill: false,
            passes,
        });
    }
}
