//! A cache in main memory.

use super::executor::Memory;
use super::layer::{AttentionOutput, LayerInput};
use crate::config::CacheConfig;
use crate::error::Error;
use crate::ids::{CacheId, SequenceId};
use crate::lifecycle::Lifecycle;
use crate::plan::{Operation, Plan, Planner, PoolLimits, Request, SequenceStep};
use crate::shape::{CacheShape, Shape};
use crate::snapshot::Snapshot;
use crate::state::LayerState;
use std::sync::Arc;

/// Bytes of a slab, at most: as on a device with WebGPU's default limits.
const MAX_SLAB_BYTES: u64 = 128 << 20;

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
    lifecycle: Lifecycle<Memory>,
    id: CacheId,
}

impl CpuCache {
    /// An empty cache.
    ///
    /// # Errors
    /// As [`CacheShape::new`].
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
        let shape = Arc::new(CacheShape::new(config)?);
        let pool = |shape| PoolLimits::new(shape, config, MAX_SLAB_BYTES);
        let pools = shape.classes.iter().map(pool).collect::<Result<Vec<_>, Error>>()?;
        let memory = Memory::new(shape.clone(), &pools);
        Ok(CpuCache { lifecycle: Lifecycle::new(Planner::with_id(id, shape, pools), memory), id })
    }

    /// What its ids carry, for tests.
    #[doc(hidden)]
    pub fn id(&self) -> CacheId {
        self.id
    }

    /// Layers of the model.
    pub fn layers(&self) -> u32 {
        self.shape().layers()
    }

    /// The sizes of the cache.
    pub fn shape(&self) -> &CacheShape {
        self.planner().shape()
    }

    /// The sizes of a layer.
    ///
    /// # Errors
    /// [`Error::LayerOutOfRange`].
    pub fn shape_of(&self, layer: u32) -> Result<&Shape, Error> {
        self.shape().of_layer(layer)
    }

    /// The sequences and their places.
    pub fn planner(&self) -> &Planner {
        self.lifecycle.planner()
    }

    /// Adds an empty sequence.
    ///
    /// # Errors
    /// [`Error::TooManySequences`].
    pub fn create_sequence(&mut self) -> Result<SequenceId, Error> {
        self.lifecycle.create_sequence()
    }

    /// Tokens of a sequence.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::ForeignSequence`].
    pub fn tokens(&self, sequence: SequenceId) -> Result<u32, Error> {
        self.planner().tokens(sequence)
    }

    /// The sequences of the cache.
    pub fn sequences(&self) -> impl Iterator<Item = SequenceId> {
        self.planner().sequences()
    }

    /// Undoes the latest operation, as far as lengths and places go.
    ///
    /// The oracle has no encoder to throw away: it has carried the operation out. So what a truncation or a
    /// reorder has overwritten in a window stays overwritten, as on a GPU whose encoder was submitted; clone
    /// the cache to go back.
    ///
    /// # Errors
    /// [`Error::NotLatest`], [`Error::TooOld`], [`Error::ForeignOperation`].
    pub fn discard(&mut self, operation: Operation) -> Result<(), Error> {
        self.lifecycle.discard(operation)
    }

    /// Runs one step through all layers; `inputs` has one entry per layer.
    ///
    /// # Errors
    /// As [`Planner::pages_for_step`], and [`Error::LayerOutOfRange`] or [`Error::BufferTooSmall`] for inputs
    /// of the wrong size.
    pub fn step(
        &mut self,
        steps: &[SequenceStep],
        inputs: &[LayerInput<'_>],
    ) -> Result<(Operation, Vec<AttentionOutput>), Error> {
        let mut begun = self.lifecycle.begin_step(&mut (), steps)?;
        if inputs.len() != self.shape().places.len() {
            return Err(Error::LayerOutOfRange { got: inputs.len() as u32, layers: self.layers() });
        }
        for input in inputs {
            check_input(self.shape().first(), &begun.plans()[0], input)?;
        }
        let mut outputs = Vec::with_capacity(inputs.len());
        for (layer, input) in (0..).zip(inputs) {
            let place = self.shape().place(layer)?;
            outputs.push(self.lifecycle.executor_mut().step(place, &begun.plans()[place.0], input));
            begun.recorded(layer);
        }
        Ok((self.lifecycle.finish_step(begun)?, outputs))
    }

    /// Removes a sequence, see [`Request::Remove`].
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::ForeignSequence`].
    pub fn remove_sequence(&mut self, id: SequenceId) -> Result<Operation, Error> {
        self.lifecycle.remove_sequence(id)
    }

    /// Cuts a sequence to its first `tokens` tokens, see [`Request::Truncate`].
    ///
    /// # Errors
    /// As [`Planner::pages_for`].
    pub fn truncate(&mut self, id: SequenceId, tokens: u32) -> Result<Operation, Error> {
        Ok(self.lifecycle.operate(&mut (), Request::Truncate(id, tokens))?.1)
    }

    /// Adds a sequence with the content of another, see [`Request::Fork`].
    ///
    /// # Errors
    /// As [`Planner::pages_for`].
    pub fn fork(&mut self, id: SequenceId) -> Result<(SequenceId, Operation), Error> {
        self.lifecycle.fork(&mut (), id)
    }

    /// Gives each of `sequences` the content that `sequences[parents[i]]` had, see [`Request::Reorder`].
    ///
    /// # Errors
    /// As [`Planner::pages_for`].
    pub fn reorder(&mut self, sequences: &[SequenceId], parents: &[usize]) -> Result<Operation, Error> {
        Ok(self.lifecycle.operate(&mut (), Request::Reorder(sequences, parents))?.1)
    }

    /// What layer `layer` holds of a sequence.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::ForeignSequence`], [`Error::LayerOutOfRange`].
    pub fn state(&self, layer: u32, sequence: SequenceId) -> Result<LayerState, Error> {
        ready(self.lifecycle.state(layer, sequence))
    }

    /// What every layer holds of a sequence.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::ForeignSequence`].
    pub fn save(&self, id: SequenceId) -> Result<Snapshot, Error> {
        ready(self.lifecycle.save(id))
    }

    /// Adds a sequence with the content of a snapshot.
    ///
    /// # Errors
    /// [`Error::SnapshotMismatch`] if it was saved with another configuration; [`Error::TooManySequences`],
    /// [`Error::CapacityExceeded`].
    pub fn load(&mut self, snapshot: &Snapshot) -> Result<(SequenceId, Operation), Error> {
        self.lifecycle.load(&mut (), snapshot)
    }

    /// Gives back every slab of which no page is in use.
    pub fn shrink_to_fit(&mut self) -> Operation {
        self.lifecycle.shrink_to_fit()
    }
}

/// What a future of this executor gives, which has nothing to wait for.
fn ready<T>(future: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
    let never = Err(Error::Device("the oracle waits for nothing".into()));
    crate::lifecycle::now_or_never(future).unwrap_or(never)
}

fn check_input(s: &Shape, plan: &Plan, input: &LayerInput<'_>) -> Result<(), Error> {
    let row = u64::from(s.layout.kv_heads * s.layout.head_dim) * 4;
    let query_row = row * u64::from(s.heads_per_kv);
    if !input.sink_logits.is_empty() && input.sink_logits.len() != s.query_heads as usize {
        let (needed, got) = (u64::from(s.query_heads) * 4, input.sink_logits.len() as u64 * 4);
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
