//! A cache in main memory.

use super::class::Class;
use crate::config::CacheConfig;
use crate::error::Error;
use crate::geometry::{DEFAULT_MAX_BINDING, Geometry};
use crate::plan::{CacheId, Operation, Planner, SequenceId, SequenceStep, StepPlan, all_or_none, the_same};
use crate::state::LayerState;

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

/// Attention of one layer in one step. What a query that is not finite attends to is NaN.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct AttentionOutput {
    /// `[query][query head][head_dim]`.
    pub out: Vec<f64>,
    /// Largest Σ|q·k| of a token, scaled as logits are, `[query][query head]`.
    pub magnitude: Vec<f64>,
    /// Log-sum-exp of the scaled logits, sink logit included, `[query][query head]`.
    pub lse: Vec<f64>,
}

/// The cache on the CPU: the reference for every other backend. A clone is the same cache at another time:
/// each takes the ids of the other.
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
    id: CacheId,
    /// Classes of layers, that of the first layer first.
    pub(super) classes: Vec<Class>,
    /// Of each layer: its class, and its index there.
    pub(super) places: Vec<(usize, usize)>,
}

impl CpuCache {
    /// An empty cache.
    ///
    /// # Errors
    /// As [`Geometry::all`].
    pub fn new(config: &CacheConfig) -> Result<CpuCache, Error> {
        CpuCache::with_id(config, CacheId::unique())
    }

    /// One that takes another cache's ids of sequences and operations as its own, for tests that run both
    /// side by side.
    ///
    /// # Errors
    /// As [`Self::new`].
    #[doc(hidden)]
    pub fn with_id(config: &CacheConfig, id: CacheId) -> Result<CpuCache, Error> {
        let classes = Geometry::all(config, DEFAULT_MAX_BINDING)?;
        let places = Geometry::places(&classes);
        let classes = classes.into_iter().map(|g| Class::new(id, g)).collect();
        Ok(CpuCache { id, classes, places })
    }

    /// What its ids carry, for tests.
    #[doc(hidden)]
    pub fn id(&self) -> CacheId {
        self.id
    }

    /// Layers of the model.
    pub fn layers(&self) -> u32 {
        self.places.len() as u32
    }

    /// The derived sizes of a layer's class.
    ///
    /// # Errors
    /// [`Error::LayerOutOfRange`].
    pub fn geometry_of(&self, layer: u32) -> Result<&Geometry, Error> {
        Ok(self.class_of(layer)?.0.geometry())
    }

    /// The derived sizes of the first layer's class.
    pub fn geometry(&self) -> &Geometry {
        self.planner().geometry()
    }

    /// The sequences and their places in the first layer's class.
    pub fn planner(&self) -> &Planner {
        &self.classes[0].planner
    }

    /// Adds an empty sequence.
    ///
    /// # Errors
    /// [`Error::TooManySequences`].
    pub fn create_sequence(&mut self) -> Result<SequenceId, Error> {
        Ok(the_same(all_or_none(&mut self.classes, |class| class.planner.create_sequence(), |_, _| {})?))
    }

    /// Undoes the latest operation, as far as lengths and places go.
    ///
    /// The oracle has no encoder to throw away: it has carried the operation out. So what a truncation or a reorder has overwritten in a window stays overwritten,
    /// as on a GPU whose encoder was submitted; clone the cache to go back.
    ///
    /// # Errors
    /// [`Error::NotLatest`], [`Error::TooOld`], [`Error::ForeignOperation`].
    pub fn discard(&mut self, operation: Operation) -> Result<(), Error> {
        self.classes.iter().try_for_each(|class| class.planner.check_discard(operation))?;
        self.classes.iter_mut().try_for_each(|class| class.planner.discard(operation))
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
        let planned = all_or_none(
            &mut self.classes,
            |class| class.with_room(|planner| planner.plan_step(steps)),
            |_, _| {},
        )?;
        if inputs.len() != self.places.len() {
            return Err(Error::LayerOutOfRange { got: inputs.len() as u32, layers: self.layers() });
        }
        for input in inputs {
            check_input(self.geometry(), &planned[0].plan, input)?;
        }
        let mut outputs = Vec::with_capacity(inputs.len());
        for (input, &(class, index)) in inputs.iter().zip(&self.places) {
            outputs.push(self.classes[class].run_layer(&planned[class].plan, index, input));
        }
        let commit = |(class, step): (&mut Class, _)| class.planner.commit(step);
        let operation = the_same(self.classes.iter_mut().zip(planned).map(commit).collect());
        Ok((operation, outputs))
    }

    /// What layer `layer` holds of a sequence.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::ForeignSequence`], [`Error::LayerOutOfRange`].
    pub fn state(&self, layer: u32, sequence: SequenceId) -> Result<LayerState, Error> {
        let (class, index) = self.class_of(layer)?;
        class.state(index, sequence)
    }

    fn class_of(&self, layer: u32) -> Result<(&Class, usize), Error> {
        let layers = self.layers();
        let &(class, index) =
            self.places.get(layer as usize).ok_or(Error::LayerOutOfRange { got: layer, layers })?;
        Ok((&self.classes[class], index))
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
