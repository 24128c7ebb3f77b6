//! A step being recorded.

use super::binding::LayerBinding;
use super::cache::KvCache;
use super::io::LayerIo;
use super::shaders::Pass;
use super::work::{Dispatch, Work};
use crate::error::Error;
use crate::plan::{Operation, PlannedStep};
use std::sync::Arc;

/// Where work is recorded: an encoder, or a compute pass that the host has begun on the encoder which holds the step's upload.
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
    planned: PlannedStep,
    work: Work,
    recorded: Vec<bool>,
    /// The layer whose new tokens are in the staging buffer.
    staged: Option<u32>,
}

impl<'a> Step<'a> {
    pub(super) fn new(cache: &'a mut KvCache, planned: PlannedStep, work: Work) -> Step<'a> {
        let recorded = vec![false; cache.layers.len()];
        Step { cache, planned, work, recorded, staged: None }
    }

    /// New tokens over all sequences of the step: rows of keys and values.
    pub fn tokens(&self) -> u32 {
        self.planned.plan.tokens
    }

    /// Queries over all sequences of the step: rows of queries and outputs.
    pub fn queries(&self) -> u32 {
        self.planned.plan.queries
    }

    /// As [`KvCache::bind`], for hosts that learn of a layer's buffers only while the step is being recorded.
    ///
    /// # Errors
    /// As [`KvCache::bind`].
    pub fn bind(&self, io: &LayerIo<'_>) -> Result<LayerBinding, Error> {
        self.cache.bind(io)
    }

    /// Records one layer: its new tokens enter, the queries attend, and what has become too old for the window is packed.
    ///
    /// Sequences lie one after the other in the order given to `begin_step`. Layers may come in any order, each once.
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
        let index = self.check(layer, binding, true)?;
        if self.recorded[index] {
            return Err(Error::LayerRepeated(layer));
        }
        self.record(target.into(), index, binding, true);
        self.recorded[index] = true;
        if self.planned.plan.uses_staging {
            self.staged = Some(layer);
        }
        Ok(())
    }

    /// Records attention to a layer that this step has already recorded, for layers that share its keys and values. The binding needs only
    /// queries and output.
    ///
    /// # Errors
    /// [`Error::LayerMissing`] if the layer has not been recorded; [`Error::StagingOverwritten`] if another layer was recorded since and the step is longer than the ring.
    pub fn attend<'t, 'p>(
        &mut self,
        target: impl Into<Target<'t, 'p>>,
        layer: u32,
        binding: &LayerBinding,
    ) -> Result<(), Error>
    where
        'p: 't,
    {
        let index = self.check(layer, binding, false)?;
        if self.planned.plan.tokens > 0 && !self.recorded[index] {
            return Err(Error::LayerMissing(layer));
        }
        match self.staged {
            Some(by) if by != layer => return Err(Error::StagingOverwritten { layer, by }),
            _ => {}
        }
        self.record(target.into(), index, binding, false);
        Ok(())
    }

    /// Makes the step the state of the cache. Submit the encoder afterwards, or [`KvCache::discard`] the operation.
    ///
    /// # Errors
    /// [`Error::LayerMissing`]: tokens were appended and a layer was not recorded. The cache is as before the step.
    pub fn finish(self) -> Result<Operation, Error> {
        if self.planned.plan.tokens > 0
            && let Some(missing) = self.recorded.iter().position(|r| !r)
        {
            return Err(Error::LayerMissing(missing as u32));
        }
        Ok(self.cache.planner.commit(self.planned))
    }

    fn check(&self, layer: u32, binding: &LayerBinding, appends: bool) -> Result<usize, Error> {
        if layer as usize >= self.cache.layers.len() {
            return Err(Error::LayerOutOfRange { got: layer, layers: self.cache.layers.len() as u32 });
        }
        if !Arc::ptr_eq(&binding.cache, &self.cache.identity()) {
            return Err(Error::ForeignBinding);
        }
        binding.check_step(&self.planned.plan, appends)?;
        Ok(layer as usize)
    }

    fn record(&self, target: Target<'_, '_>, layer: usize, binding: &LayerBinding, whole: bool) {
        match target {
            Target::Pass(pass) => self.cache.dispatch_layer(pass, &self.work, layer, binding, whole),
            Target::Encoder(encoder) => {
                let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor {
                    label: Some("kivi layer"),
                    timestamp_writes: None,
                });
                self.cache.dispatch_layer(&mut pass, &self.work, layer, binding, whole);
            }
        }
    }
}

impl KvCache {
    /// Dispatches the work of one layer; without `whole`, only its attention.
    pub(super) fn dispatch_layer(
        &self,
        pass: &mut wgpu::ComputePass<'_>,
        work: &Work,
        layer: usize,
        binding: &LayerBinding,
        whole: bool,
    ) {
        if whole {
            self.dispatch(pass, work.append.as_slice(), layer, Some(binding));
        }
        self.dispatch(pass, &work.attend, layer, Some(binding));
        if whole {
            self.dispatch(pass, &work.changes, layer, None);
        }
    }

    pub(super) fn dispatch(
        &self,
        pass: &mut wgpu::ComputePass<'_>,
        dispatches: &[Dispatch],
        layer: usize,
        binding: Option<&LayerBinding>,
    ) {
        let class = self.geometry().layer_classes[layer];
        let buffers = &self.layers[layer];
        for dispatch in dispatches.iter().filter(|d| d.class.is_none_or(|c| c == class)) {
            let slab = || buffers.slab(dispatch.slab);
            let group = match dispatch.pass {
                Pass::Append => Some(&buffers.append),
                Pass::PackKeys | Pass::PackValues => slab().map(|s| &s.pack),
                Pass::AttendHistory(_) | Pass::FoldHistory => slab().map(|s| &s.history),
                Pass::AttendWindow(_) | Pass::FoldWindow => Some(&buffers.window),
                Pass::Merge(_) => Some(&self.shared.merge),
                Pass::CopyTokens => Some(&buffers.copy_tokens),
                Pass::CopyBlocks => slab().map(|s| &s.copy),
                Pass::CopyBlocksAcross => buffers.across(dispatch.source, dispatch.slab),
                Pass::Unpack | Pass::UnpackRotated => slab().map(|s| &s.unpack),
            };
            let host = binding.and_then(|binding| match dispatch.pass {
                Pass::Append => binding.append.as_ref(),
                Pass::Merge(_) => binding.output.as_ref(),
                _ => binding.queries.as_ref(),
            });
            // `prepare` has built all of them, and `check_step` knows that the binding has what the pass needs.
            let (Some(pipeline), Some(group)) = (self.pipelines.get(dispatch.pass), group) else { continue };
            pass.set_pipeline(pipeline);
            pass.set_bind_group(0, group, &[dispatch.params]);
            if let Some(host) = host {
                pass.set_bind_group(1, host, &[]);
            }
            let [x, y, z] = dispatch.groups;
            pass.dispatch_workgroups(x, y, z);
        }
    }
}
