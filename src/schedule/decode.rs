//! Attention of decode steps: a partial result per row and split.

use super::{AttendItem, Attending, Round, RowTile, Schedule};
use crate::plan::{Extent, push_by_slab};
use std::ops::Range;

impl Attending<'_> {
    /// Adds the attention of all sequences with few queries.
    pub(super) fn decode(&self, schedule: &mut Schedule) {
        let kv_heads = self.shape.layout.kv_heads;
        for row_tile in self.tiles.decode_tiles() {
            let mut round = RoundBuilder::new(self.attention, row_tile, 0..kv_heads, schedule);
            let own = |n: u32| n > 0 && !self.tiles.is_prefill(n) && self.tiles.row_tile(n) == row_tile;
            for sequence in self.plan.attends.iter().filter(|sequence| own(sequence.queries)) {
                let extents = self.seen(&sequence.extents, sequence.position);
                let rows = sequence.queries * self.shape.heads_per_kv;
                for first_row in (0..rows).step_by(row_tile as usize) {
                    let tile = RowTile {
                        first_query: sequence.first_query,
                        first_row,
                        rows: row_tile.min(rows - first_row),
                        position: sequence.position,
                        first_partial: 0,
                        splits: extents.len() as u32,
                        first_packed: extents.iter().take_while(|e| e.slab.is_none()).count() as u32,
                        packed_splits: extents.iter().filter(|e| e.slab.is_some()).count() as u32,
                    };
                    round = self.add(round, tile, &extents, schedule);
                }
            }
            round.finish(schedule);
        }
    }

    /// Adds a tile to a round, or to one or several new ones if it does not fit; returns the last.
    fn add(
        &self,
        mut round: RoundBuilder,
        tile: RowTile,
        extents: &[Extent],
        schedule: &mut Schedule,
    ) -> RoundBuilder {
        let (kv_heads, row_tile) = (self.shape.layout.kv_heads, round.row_tile);
        let partial_rows = extents.len() as u32 * row_tile;
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
            alone.add(tile, extents, schedule);
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
        round.add(tile, extents, schedule);
        round
    }
}

struct RoundBuilder {
    attention: u32,
    row_tile: u32,
    heads: Range<u32>,
    first_tile: u32,
    partial_rows: u32,
    packed: Vec<(u32, AttendItem)>,
    unpacked: Vec<AttendItem>,
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

    fn add(&mut self, tile: RowTile, extents: &[Extent], schedule: &mut Schedule) {
        let index = schedule.tiles.len() as u32;
        schedule.tiles.push(RowTile { first_partial: self.partial_rows, ..tile });
        for &Extent { slab, source, tokens, first_position } in extents {
            let item = AttendItem { tile: index, partial: self.partial_rows, source, tokens, first_position };
            self.partial_rows += self.row_tile;
            match slab {
                Some(slab) => self.packed.push((slab, item)),
                None => self.unpacked.push(item),
            }
        }
    }

    /// Adds the round to the schedule, if it has a tile.
    fn finish(self, schedule: &mut Schedule) {
        let tiles = self.first_tile..schedule.tiles.len() as u32;
        if tiles.is_empty() {
            return;
        }
        let packed = push_by_slab(&mut schedule.items, self.packed);
        let first = schedule.items.len() as u32;
        schedule.items.extend(self.unpacked);
        schedule.rounds.push(Round {
            attention: self.attention,
            row_tile: self.row_tile,
            heads: self.heads,
            tiles,
            packed,
            unpacked: first..schedule.items.len() as u32,
            prefill: Vec::new(),
        });
    }
}
