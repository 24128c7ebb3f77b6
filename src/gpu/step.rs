//! A step being recorded.

use super::binding::LayerBinding;
use super::cache::KvCache;
use super::executor::Part;
use super::io::LayerIo;
use super::work::Work;
use crate::error::Error;
use crate::lifecycle::Begun;
use crate::plan::{Operation, SequenceStep};

/// Where work is recorded: an encoder, or a compute pass that the host has begun on the encoder which holds
/// the step's upload.
#[derive(Debug)]
pub enum Target<'t, 'p> {
    /// Each call records a compute pass of its own.
    Encoder(&'t mut wgpu::CommandEncoder),
    /// Dispatches go into the host's pass; pipeline and bind groups 0 and 1 change.
    Pass(&'t mut wgpu::ComputePass<'p>),
}

impl<'t> From<&'t mut wgpu::CommandEncoder> for Target<'t, 'static> {
    fn from(encoder: &'t mut wgpu::CommandEncoder) -> Self {
        Target::Encoder(encoder)
    }
}

impl<'t, 'p> From<&'t mut wgpu::ComputePass<'p>> for Target<'t, 'p> {
    fn from(pass: &'t mut wgpu::ComputePass<'p>) -> Self {
        Target::Pass(pass)
    }
}

/// One step through all layers: a transaction that [`Step::finish`] commits and dropping abandons.
#[derive(Debug)]
#[must_use = "a step that is not finished changes nothing"]
pub struct Step<'a> {
    cache: &'a mut KvCache,
    begun: Begun<Vec<Work>>,
}

impl KvCache {
    /// Starts a step: validates it and records the upload of its plan into `encoder`. Record the layers with
    /// [`Step::layer`], then call [`Step::finish`]; a step that is dropped instead changes nothing. Encoders
    /// must be submitted in the order recorded.
    ///
    /// No buffer is created, unless the pool must grow, or the upload buffers of three operations before are
    /// still on their way (those of an encoder that is thrown away for ever).
    ///
    /// # Errors
    /// What is wrong with the request: unknown or repeated sequences, too many tokens or queries, no room;
    /// [`Error::OutOfMemory`] for a new slab or the upload, [`Error::Device`] if a kernel cannot be built.
    pub fn begin_step<'a>(
        &'a mut self,
        encoder: &mut wgpu::CommandEncoder,
        steps: &[SequenceStep],
    ) -> Result<Step<'a>, Error> {
        let begun = self.lifecycle.begin_step(encoder, steps)?;
        Ok(Step { cache: self, begun })
    }
}

impl Step<'_> {
    /// New tokens over all sequences of the step: rows of keys and values.
    pub fn tokens(&self) -> u32 {
        self.begun.tokens()
    }

    /// Queries over all sequences of the step: rows of queries and outputs.
    pub fn queries(&self) -> u32 {
        self.begun.queries()
    }

    /// As [`KvCache::bind`], for hosts that learn of a layer's buffers only while the step is being recorded.
    ///
    /// # Errors
    /// As [`KvCache::bind`].
    pub fn bind(&self, io: &LayerIo<'_>) -> Result<LayerBinding, Error> {
        self.cache.bind(io)
    }

    /// Records one layer: its new tokens enter, the queries attend, and what has become too old for the
    /// window is packed.
    ///
    /// Sequences lie one after the other in the order given to `begin_step`. Layers may come in any order,
    /// each once.
    ///
    /// # Errors
    /// What is wrong with the layer or the binding. The step can go on or be dropped.
    pub fn layer<'t, 'p>(
        &mut self,
        target: impl Into<Target<'t, 'p>>,
        layer: u32,
        binding: &LayerBinding,
    ) -> Result<(), Error>
    where
        'p: 't,
    {
        let place = self.check(layer, binding, self.tokens())?;
        self.begun.check_record(layer)?;
        self.record(target.into(), place, binding, Part::Whole);
        self.begun.recorded(layer);
        Ok(())
    }

    /// Records attention to a layer that this step has already recorded, for layers that share its keys and
    /// values. The binding needs only queries and output.
    ///
    /// # Errors
    /// [`Error::LayerMissing`] if the layer has not been recorded; [`Error::StagingOverwritten`] if another
    /// layer was recorded since and the step is longer than the ring.
    pub fn attend<'t, 'p>(
        &mut self,
        target: impl Into<Target<'t, 'p>>,
        layer: u32,
        binding: &LayerBinding,
    ) -> Result<(), Error>
    where
        'p: 't,
    {
        let place = self.check(layer, binding, 0)?;
        self.begun.check_attend(layer)?;
        self.record(target.into(), place, binding, Part::Attention);
        Ok(())
    }

    /// Makes the step the state of the cache. Submit the encoder afterwards, or [`KvCache::discard`] the
    /// operation.
    ///
    /// # Errors
    /// [`Error::LayerMissing`]: tokens were appended and a layer was not recorded. The cache is as before the
    /// step.
    pub fn finish(self) -> Result<Operation, Error> {
        self.cache.lifecycle.finish_step(self.begun)
    }

    /// Whether a binding serves a layer in this step, with so many new tokens; the layer's place.
    fn check(&self, layer: u32, binding: &LayerBinding, tokens: u32) -> Result<(usize, usize), Error> {
        let place = self.cache.shape().place(layer)?;
        if binding.cache != self.cache.id() {
            return Err(Error::ForeignBinding);
        }
        binding.check_step(tokens, self.queries())?;
        Ok(place)
    }

    fn record(
        &self,
        target: Target<'_, '_>,
        (class, index): (usize, usize),
        binding: &LayerBinding,
        part: Part,
    ) {
        let (class, work) = (&self.cache.lifecycle.executor().classes[class], &self.begun.work[class]);
        match target {
            Target::Pass(pass) => class.dispatch_layer(pass, work, index, binding.groups(), part),
            Target::Encoder(encoder) => {
                let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor {
                    label: Some("kivi layer"),
                    timestamp_writes: None,
                });
                class.dispatch_layer(&mut pass, work, index, binding.groups(), part);
            }
        }
    }
}
