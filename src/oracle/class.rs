//! Layers that share plans, and how they carry them out.

use super::cache::{AttentionOutput, LayerInput};
use super::{Partial, Row, Tensor, Tokens, Unpacked};
use super::{append::append, attend_packed::attend_packed, attend_unpacked::attend_unpacked};
use super::{copy_blocks::copy_blocks, copy_tokens::copy_tokens, merge::merge, pack_block, unpack::unpack};
use crate::error::Error;
use crate::geometry::Geometry;
use crate::plan::{
    Applied, AttendItem, CacheId, FoldSplit, Planner, Round, RowTile, SequenceId, SequenceView, Slot,
    StepPlan,
};
use crate::state::{LayerState, UnpackedTokens};

#[derive(Debug, Clone)]
pub(super) struct LayerMemory {
    pub(super) slabs: Vec<Vec<u32>>,
    pub(super) ring: Unpacked,
}

/// The layers of one [class](crate::LayerFormat).
#[derive(Debug, Clone)]
pub(super) struct Class {
    pub(super) planner: Planner,
    pub(super) layers: Vec<LayerMemory>,
    staging: Unpacked,
}

impl Class {
    pub(super) fn new(cache: CacheId, g: Geometry) -> Class {
        let layer = LayerMemory {
            slabs: (0..g.slabs()).map(|s| vec![0; (g.slab_bytes(s) / 4) as usize]).collect(),
            ring: Unpacked::new(&g, g.unpacked_slots()),
        };
        Class {
            layers: vec![layer; g.layers as usize],
            staging: Unpacked::new(&g, g.staging_tokens),
            planner: Planner::of(cache, g),
        }
    }

    pub(super) fn geometry(&self) -> &Geometry {
        self.planner.geometry()
    }

    /// What `plan` returns, after the pool has grown if it must.
    pub(super) fn with_room<T>(
        &mut self,
        mut plan: impl FnMut(&mut Planner) -> Result<T, Error>,
    ) -> Result<T, Error> {
        match plan(&mut self.planner) {
            Err(Error::CapacityExceeded { needed, available, .. }) if needed <= available => {
                self.grow(needed)?;
                plan(&mut self.planner)
            }
            other => other,
        }
    }

    /// Makes room for `pages` free pages.
    fn grow(&mut self, pages: u32) -> Result<(), Error> {
        let Some(growth) = self.planner.growth(pages, false)? else { return Ok(()) };
        for layer in &mut self.layers {
            layer.slabs.resize(growth.geometry.slabs() as usize, Vec::new());
            for &slab in &growth.slabs {
                layer.slabs[slab as usize] = vec![0; (growth.geometry.slab_bytes(slab) / 4) as usize];
            }
        }
        self.planner.grow(growth);
        Ok(())
    }

    /// An operation that can be carried out; where it cannot, nothing has changed.
    pub(super) fn apply<T>(
        &mut self,
        plan: impl FnMut(&mut Planner) -> Result<(T, Applied), Error>,
    ) -> Result<(T, Applied), Error> {
        let (result, applied) = self.with_room(plan)?;
        match self.planner.sharing() {
            Ok(None) => {}
            Ok(Some(growth)) => self.planner.grow(growth),
            Err(error) => {
                self.planner.abandon(applied);
                return Err(error);
            }
        }
        Ok((result, applied))
    }

    /// Carries an operation out.
    pub(super) fn carry_out(&mut self, plan: &StepPlan) {
        let g = self.planner.geometry();
        for layer in &mut self.layers {
            copy_tokens(g, plan, &mut layer.ring);
            copy_blocks(g, plan, &mut layer.slabs);
            for range in &plan.unpack_slabs {
                let tokens = &plan.unpacks[range.items.start as usize..range.items.end as usize];
                unpack(g, tokens, &layer.slabs[range.slab as usize], &mut layer.ring);
            }
        }
    }

    /// Carries a step out in layer `index` of the class.
    pub(super) fn run_layer(
        &mut self,
        plan: &StepPlan,
        index: usize,
        input: &LayerInput<'_>,
    ) -> AttentionOutput {
        let g = self.planner.geometry();
        let class = g.layer_classes[index];
        run_layer(g, plan, class, &mut self.layers[index], &mut self.staging, input)
    }

    /// What layer `index` of the class holds of a sequence.
    pub(super) fn state(&self, index: usize, sequence: SequenceId) -> Result<LayerState, Error> {
        let g = self.planner.geometry();
        let view = self.planner.view(sequence)?;
        let memory = &self.layers[index];
        let rows = |slots: &[Slot]| {
            let tensor = |tensor| {
                let row = |s: &Slot| memory.ring.row(g, tensor, s.index(), 0);
                let words = g.token_words() as usize;
                slots.iter().flat_map(|s| memory.ring.words[row(s)..][..words].to_vec()).collect()
            };
            UnpackedTokens { keys: tensor(Tensor::Keys), values: tensor(Tensor::Values) }
        };
        let words = g.layout.block_words() as usize;
        Ok(LayerState {
            lengths: view.lengths,
            sinks: rows(&view.sinks),
            blocks: view
                .blocks
                .iter()
                .flat_map(|&(slab, b)| &memory.slabs[slab as usize][b as usize * words..][..words])
                .copied()
                .collect(),
            window: rows(&view.window),
        })
    }

    /// Writes what layer `index` of the class is to hold of a sequence.
    pub(super) fn write(&mut self, index: usize, view: &SequenceView, state: &LayerState) {
        let g = self.planner.geometry();
        let layer = &mut self.layers[index];
        let (token, block) = (g.token_words() as usize, g.layout.block_words() as usize);
        for (slots, tokens) in [(&view.sinks, &state.sinks), (&view.window, &state.window)] {
            for (tensor, words) in [(Tensor::Keys, &tokens.keys), (Tensor::Values, &tokens.values)] {
                for (slot, words) in slots.iter().zip(words.chunks(token)) {
                    let row = layer.ring.row(g, tensor, slot.index(), 0);
                    layer.ring.words[row..row + token].copy_from_slice(words);
                }
            }
        }
        for (&(slab, index), words) in view.blocks.iter().zip(state.blocks.chunks(block)) {
            layer.slabs[slab as usize][index as usize * block..][..block].copy_from_slice(words);
        }
    }
}

fn run_layer(
    g: &Geometry,
    plan: &StepPlan,
    class: u32,
    memory: &mut LayerMemory,
    staging: &mut Unpacked,
    input: &LayerInput<'_>,
) -> AttentionOutput {
    append(g, plan, Tensor::Keys, input.k, &mut memory.ring, staging);
    append(g, plan, Tensor::Values, input.v, &mut memory.ring, staging);
    let output = attend(g, plan, class, memory, staging, input);
    copy_blocks(g, plan, &mut memory.slabs);
    let tokens = Tokens { ring: &memory.ring, staging };
    let block_words = g.layout.block_words() as usize;
    for range in &plan.pack_slabs {
        let slab = &mut memory.slabs[range.slab as usize];
        for pack in &plan.packs[range.items.start as usize..range.items.end as usize] {
            let slots = &plan.slots[pack.first_slot as usize..][..g.layout.group as usize];
            let block = &mut slab[pack.block as usize * block_words..][..block_words];
            pack_block(g, tokens, slots, block);
        }
    }
    output
}

pub(super) fn attend(
    g: &Geometry,
    plan: &StepPlan,
    class: u32,
    memory: &LayerMemory,
    staging: &Unpacked,
    input: &LayerInput<'_>,
) -> AttentionOutput {
    let q = input.q;
    let head_dim = g.layout.head_dim as usize;
    let rows = plan.queries as usize * g.query_heads as usize;
    let mut output =
        AttentionOutput { out: vec![0.0; rows * head_dim], magnitude: vec![0.0; rows], lse: vec![0.0; rows] };
    for round in plan.rounds.iter().filter(|round| round.class == class) {
        for tile_index in round.tiles.clone() {
            let tile = &plan.tiles[tile_index as usize];
            for head in round.heads.clone() {
                let places: Vec<usize> = tile_places(g, tile, head).collect();
                let rows: Vec<Row> = places
                    .iter()
                    .zip(tile.first_row..)
                    .map(|(&place, r)| Row {
                        query: q[place * head_dim..][..head_dim].iter().map(|&x| f64::from(x)).collect(),
                        position: tile.position + r / g.heads_per_group,
                        attention: g.attention_classes[class as usize],
                    })
                    .collect();
                let parts = tile_partials(g, plan, round, tile_index, head, memory, staging, &rows);
                for (r, &place) in places.iter().enumerate() {
                    let partials: Vec<Partial> = parts.iter().map(|p| p[r].clone()).collect();
                    let sink = input.sink_logits.get(place % g.query_heads as usize).copied().map(f64::from);
                    let (out, lse) = merge(g.layout.head_dim, &partials, sink);
                    output.out[place * head_dim..][..head_dim].copy_from_slice(&out);
                    output.lse[place] = lse;
                    output.magnitude[place] = partials.iter().fold(0.0, |m, p| m.max(p.magnitude));
                }
            }
        }
    }
    output
}

/// Rows of the step's queries, `[query][query head]`, that a tile covers for one KV head.
fn tile_places(g: &Geometry, tile: &RowTile, head: u32) -> impl Iterator<Item = usize> {
    let (per_group, first_query, query_heads) = (g.heads_per_group, tile.first_query, g.query_heads);
    (tile.first_row..tile.first_row + tile.rows).map(move |r| {
        let query = first_query + r / per_group;
        (query * query_heads + head * per_group + r % per_group) as usize
    })
}

/// The partial results of a tile, one entry per split in order of position.
#[allow(clippy::too_many_arguments)]
fn tile_partials(
    g: &Geometry,
    plan: &StepPlan,
    round: &Round,
    tile: u32,
    head: u32,
    memory: &LayerMemory,
    staging: &Unpacked,
    rows: &[Row],
) -> Vec<Vec<Partial>> {
    let attend = |slab: Option<u32>, item: &AttendItem| match slab {
        Some(slab) => {
            let page = item.source as usize * g.layout.block_words() as usize;
            attend_packed(g, &memory.slabs[slab as usize][page..], item, head, rows)
        }
        None => {
            let slots = &plan.slots[item.source as usize..][..item.tokens as usize];
            attend_unpacked(g, Tokens { ring: &memory.ring, staging }, slots, item, head, rows)
        }
    };
    // Partials of the tile's own by their place, which is in order of position.
    let history = round.history.iter().map(|range| (Some(range.slab), range.items.clone()));
    let mut parts = Vec::new();
    for (slab, items) in history.chain([(None, round.window.clone())]) {
        let items = &plan.items[items.start as usize..items.end as usize];
        parts.extend(items.iter().filter(|i| i.tile == tile).map(|item| (item.partial, attend(slab, item))));
    }
    parts.sort_by_key(|(place, _)| *place);
    let mut parts: Vec<_> = parts.into_iter().map(|(_, part)| part).collect();
    // Splits that extend a partial, in the order of the passes.
    for pass in &round.fold {
        let runs = &plan.runs[pass.runs.start as usize..pass.runs.end as usize];
        for run in runs.iter().filter(|run| run.tile == tile) {
            for split in &plan.splits[run.splits.start as usize..run.splits.end as usize] {
                let FoldSplit { source, tokens, first_position } = *split;
                let item = AttendItem { tile, partial: run.partial, source, tokens, first_position };
                parts.push(attend(pass.slab, &item));
            }
        }
    }
    parts
}
