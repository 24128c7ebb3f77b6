//! A cache in main memory.

use super::{Partial, Row, Tensor, Tokens, Unpacked};
use super::{append::append, attend_history::attend_history, attend_window::attend_window};
use super::{copy_blocks::copy_blocks, merge::merge, pack_block};
use crate::config::CacheConfig;
use crate::error::Error;
use crate::geometry::{DEFAULT_MAX_BINDING, Geometry};
use crate::plan::{
    AttendItem, FoldSplit, Operation, Planner, Round, RowTile, SequenceId, SequenceStep, Slot, StepPlan,
};
use crate::state::{LayerState, UnpackedTokens};

/// Inputs of one layer in one step, sequences one after the other.
#[derive(Debug, Clone, Copy, Default)]
pub struct LayerInput<'a> {
    /// New keys after RoPE, `[token][kv head][head_dim]`.
    pub k: &'a [f32],
    /// New values, `[token][kv head][head_dim]`.
    pub v: &'a [f32],
    /// Queries after RoPE, `[query][query head][head_dim]`.
    pub q: &'a [f32],
    /// Learned sink logits, `[query head]`; empty if the layer has none.
    pub sink_logits: &'a [f32],
}

/// Attention of one layer in one step.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct AttentionOutput {
    /// `[query][query head][head_dim]`.
    pub out: Vec<f64>,
    /// Largest magnitude of a scaled logit, `[query][query head]`.
    pub max_logit: Vec<f64>,
    /// Log-sum-exp of the scaled logits, sink logit included, `[query][query head]`.
    pub lse: Vec<f64>,
}

#[derive(Debug, Clone)]
pub(super) struct LayerMemory {
    pub(super) slabs: Vec<Vec<u32>>,
    pub(super) ring: Unpacked,
}

/// The cache on the CPU: the reference for every other backend.
///
/// ```
/// use kivi_wgpu::{CacheConfig, SequenceStep, oracle::{CpuCache, LayerInput}};
/// let mut cache = CpuCache::new(&CacheConfig::new(1, 2, 1, 64))?;
/// let sequence = cache.create_sequence()?;
/// let (k, v, q) = ([0.5; 64], [2.0; 64], [1.0; 128]);
/// let input = LayerInput { k: &k, v: &v, q: &q, ..Default::default() };
/// let (_, output) = cache.step(&[SequenceStep::decode(sequence)], &[input])?;
/// assert_eq!(output[0].out, [2.0; 128]);
/// # Ok::<(), kivi_wgpu::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct CpuCache {
    pub(super) planner: Planner,
    pub(super) layers: Vec<LayerMemory>,
    staging: Unpacked,
}

impl CpuCache {
    /// An empty cache.
    ///
    /// # Errors
    /// As [`Geometry::new`].
    pub fn new(config: &CacheConfig) -> Result<CpuCache, Error> {
        let g = Geometry::new(config, DEFAULT_MAX_BINDING)?;
        let layer = LayerMemory {
            slabs: (0..g.slabs()).map(|s| vec![0; (g.slab_bytes(s) / 4) as usize]).collect(),
            ring: Unpacked::new(&g, g.unpacked_slots()),
        };
        Ok(CpuCache {
            layers: vec![layer; g.layers as usize],
            staging: Unpacked::new(&g, g.staging_tokens),
            planner: Planner::new(g),
        })
    }

    /// The derived sizes.
    pub fn geometry(&self) -> &Geometry {
        self.planner.geometry()
    }

    /// The sequences and their places.
    pub fn planner(&self) -> &Planner {
        &self.planner
    }

    /// Adds an empty sequence.
    ///
    /// # Errors
    /// [`Error::TooManySequences`].
    pub fn create_sequence(&mut self) -> Result<SequenceId, Error> {
        self.planner.create_sequence()
    }

    /// Undoes the latest operation, as far as lengths and places go.
    ///
    /// The oracle has no encoder to throw away: it has carried the operation out. So what a truncation or a reorder has overwritten in a window stays overwritten,
    /// as on a GPU whose encoder was submitted; clone the cache to go back.
    ///
    /// # Errors
    /// [`Error::NotLatest`], [`Error::TooOld`].
    pub fn discard(&mut self, operation: Operation) -> Result<(), Error> {
        self.planner.discard(operation)
    }

    /// Runs one step through all layers; `inputs` has one entry per layer.
    ///
    /// # Errors
    /// As [`Planner::plan_step`], and [`Error::LayerOutOfRange`] or [`Error::BufferTooSmall`] for inputs of the wrong size.
    pub fn step(
        &mut self,
        steps: &[SequenceStep],
        inputs: &[LayerInput<'_>],
    ) -> Result<(Operation, Vec<AttentionOutput>), Error> {
        let planned = self.with_room(|planner| planner.plan_step(steps))?;
        let g = self.planner.geometry().clone();
        if inputs.len() != self.layers.len() {
            return Err(Error::LayerOutOfRange { got: inputs.len() as u32, layers: g.layers });
        }
        for input in inputs {
            check_input(&g, &planned.plan, input)?;
        }
        let mut outputs = Vec::with_capacity(inputs.len());
        for ((layer, input), class) in self.layers.iter_mut().zip(inputs).zip(&g.layer_classes) {
            outputs.push(run_layer(&g, &planned.plan, *class, layer, &mut self.staging, input));
        }
        Ok((self.planner.commit(planned), outputs))
    }

    /// What layer `layer` holds of a sequence.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::LayerOutOfRange`].
    pub fn state(&self, layer: u32, sequence: SequenceId) -> Result<LayerState, Error> {
        let g = self.planner.geometry();
        let view = self.planner.view(sequence)?;
        let memory =
            self.layers.get(layer as usize).ok_or(Error::LayerOutOfRange { got: layer, layers: g.layers })?;
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
            tokens: view.tokens,
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
}

fn check_input(g: &Geometry, plan: &StepPlan, input: &LayerInput<'_>) -> Result<(), Error> {
    let row = u64::from(g.layout.kv_heads * g.layout.head_dim) * 4;
    let query_row = row * u64::from(g.heads_per_group);
    if !input.sink_logits.is_empty() && input.sink_logits.len() != g.query_heads as usize {
        let (needed, got) = (u64::from(g.query_heads) * 4, input.sink_logits.len() as u64 * 4);
        return Err(Error::BufferTooSmall { tensor: "sink_logits", needed, got });
    }
    for (tensor, slice, rows, row) in [
        ("k", input.k, plan.tokens, row),
        ("v", input.v, plan.tokens, row),
        ("q", input.q, plan.queries, query_row),
    ] {
        let (needed, got) = (u64::from(rows) * row, slice.len() as u64 * 4);
        if got < needed {
            return Err(Error::BufferTooSmall { tensor, needed, got });
        }
    }
    Ok(())
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

fn attend(
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
        AttentionOutput { out: vec![0.0; rows * head_dim], max_logit: vec![0.0; rows], lse: vec![0.0; rows] };
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
                    output.max_logit[place] = partials.iter().fold(0.0, |m, p| m.max(p.max_magnitude));
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
            let page = item.source as usize * g.layout.page_words() as usize;
            attend_history(g, &memory.slabs[slab as usize][page..], item, head, rows)
        }
        None => {
            let slots = &plan.slots[item.source as usize..][..item.tokens as usize];
            attend_window(g, Tokens { ring: &memory.ring, staging }, slots, item, head, rows)
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
