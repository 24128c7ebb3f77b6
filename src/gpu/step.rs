//! A step being recorded.

use super::binding::LayerBinding;
use super::cache::KvCache;
use super::class::Class;
use super::io::LayerIo;
use super::kernels::Pass;
use super::work::{Dispatch, Work};
use crate::error::Error;
use crate::plan::{Operation, PlannedStep, StepPlan, the_same};

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
    /// Of each class of layers.
    parts: Vec<Part>,
    recorded: Vec<bool>,
}

/// A step in a class of layers.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) planned: PlannedStep,
    pub(super) work: Work,
    /// The layer whose new tokens are in the staging buffer.
    pub(super) staged: Option<u32>,
}

impl<'a> Step<'a> {
    pub(super) fn new(cache: &'a mut KvCache, parts: Vec<Part>) -> Step<'a> {
        let recorded = vec![false; cache.layers() as usize];
        Step { cache, parts, recorded }
    }

    /// What is the same of all classes: how many tokens and queries there are.
    fn plan(&self) -> &StepPlan {
        &self.parts[0].planned.plan
    }

    /// New tokens over all sequences of the step: rows of keys and values.
    pub fn tokens(&self) -> u32 {
        self.plan().tokens
    }

    /// Queries over all sequences of the step: rows of queries and outputs.
    pub fn queries(&self) -> u32 {
        self.plan().queries
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
        let (class, index) = self.check(layer, binding, true)?;
        if self.recorded[layer as usize] {
            return Err(Error::LayerRepeated(layer));
        }
        self.record(target.into(), class, index, binding, true);
        self.recorded[layer as usize] = true;
        let part = &mut self.parts[class];
        if part.planned.plan.uses_staging {
            part.staged = Some(layer);
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
        let (class, index) = self.check(layer, binding, false)?;
        if self.plan().tokens > 0 && !self.recorded[layer as usize] {
            return Err(Error::LayerMissing(layer));
        }
        match self.parts[class].staged {
            Some(by) if by != layer => return Err(Error::StagingOverwritten { layer, by }),
            _ => {}
        }
        self.record(target.into(), class, index, binding, false);
        Ok(())
    }

    /// Makes the step the state of the cache. Submit the encoder afterwards, or [`KvCache::discard`] the operation.
    ///
    /// # Errors
    /// [`Error::LayerMissing`]: tokens were appended and a layer was not recorded. The cache is as before the step.
    pub fn finish(self) -> Result<Operation, Error> {
        if self.plan().tokens > 0
            && let Some(missing) = self.recorded.iter().position(|r| !r)
        {
            return Err(Error::LayerMissing(missing as u32));
        }
        let commit = |(class, part): (&mut Class, Part)| class.planner.commit(part.planned);
        Ok(the_same(self.cache.classes.iter_mut().zip(self.parts).map(commit).collect()))
    }

    fn check(&self, layer: u32, binding: &LayerBinding, appends: bool) -> Result<(usize, usize), Error> {
        let place = self.cache.place(layer)?;
        if binding.cache != self.cache.id() {
            return Err(Error::ForeignBinding);
        }
        binding.check_step(self.plan(), appends)?;
        Ok(place)
    }

    fn record(
        &self,
        target: Target<'_, '_>,
        class: usize,
        index: usize,
        binding: &LayerBinding,
        whole: bool,
    ) {
        let (class, work) = (&self.cache.classes[class], &self.parts[class].work);
        match target {
            Target::Pass(pass) => class.dispatch_layer(pass, work, index, binding, whole),
            Target::Encoder(encoder) => {
                let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor {
                    label: Some("kivi layer"),
                    timestamp_writes: None,
                });
                class.dispatch_layer(&mut pass, work, index, binding, whole);
            }
        }
    }
}

impl Class {
    /// Dispatches the work of one of its layers; without `whole`, only its attention.
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
        let (buffers, layout) = (&self.layers[layer], &self.geometry().layout);
        let rotated = self.shared.rotated.as_ref();
        for dispatch in dispatches.iter().filter(|d| d.class.is_none_or(|c| c == class)) {
            let slab = || buffers.slab(dispatch.slab);
            let group = match dispatch.pass {
                Pass::Append => Some(&buffers.append),
                Pass::Pack(tensor) if layout.tensor(tensor).rotates_apart() => {
                    slab().and_then(|s| s.pack_rotated.as_ref())
                }
                Pass::Pack(_) => slab().map(|s| &s.pack),
                Pass::RotateRows(_) => buffers.rotate.as_ref(),
                Pass::RotateQueries => rotated.map(|rotated| &rotated.target),
                Pass::DecodePacked(_) | Pass::PrefillPacked => slab().map(|s| &s.history),
                Pass::DecodeUnpacked(_) | Pass::PrefillUnpacked => Some(&buffers.window),
                Pass::Merge(_) => Some(&self.shared.merge),
                Pass::CopyTokens => Some(&buffers.copy_tokens),
                Pass::CopyBlocks => slab().map(|s| &s.copy),
                Pass::CopyBlocksAcross => buffers.across(dispatch.source, dispatch.slab),
                Pass::Unpack | Pass::UnpackRotated(_) => slab().map(|s| &s.unpack),
            };
            let host = binding.and_then(|binding| match dispatch.pass {
                Pass::Append => binding.append.as_ref(),
                Pass::Merge(_) => binding.output.as_ref(),
                Pass::DecodePacked(_) | Pass::PrefillPacked if layout.keys.rotated => {
                    rotated.map(|rotated| &rotated.queries)
                }
                _ => binding.queries.as_ref(),
            });
            // `prepare` has built all of them, and `check_step` knows that the binding has what the pass needs.
            let (Some(pipeline), Some(group)) = (self.kernels.get(dispatch.pass), group) else { continue };
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
