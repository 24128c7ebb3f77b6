//! The executor: classes of layers on a device, and how plans are recorded.

use super::device::{mapped_buffer, scoped, submit_and_read, write_mapped};
use super::kernels::{Kernels, Pass};
use super::memory::{Allowance, ClassMemory};
use super::work::{Dispatch, Work};
use crate::error::Error;
use crate::lifecycle::Executor;
use crate::plan::{NewSlab, Plan, PoolSize, SequenceView};
use crate::shape::CacheShape;
use crate::state::{LayerState, UnpackedTokens};
use std::sync::Arc;

/// The host's bind groups of a layer.
#[derive(Debug, Clone, Copy)]
pub(super) struct HostGroups<'a> {
    pub(super) append: Option<&'a wgpu::BindGroup>,
    pub(super) queries: Option<&'a wgpu::BindGroup>,
    pub(super) output: Option<&'a wgpu::BindGroup>,
}

/// Which part of a step in a layer is recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    /// All of it.
    Whole,
    /// Its attention.
    Attention,
}

/// Everything that a cache has on a device.
#[derive(Debug)]
pub(super) struct Gpu {
    pub(super) queue: wgpu::Queue,
    pub(super) kernels: Kernels,
    pub(super) shape: Arc<CacheShape>,
    pub(super) classes: Vec<ClassMemory>,
    /// Bytes that all buffers may take.
    pub(super) memory_limit: Option<u64>,
}

impl Gpu {
    pub(super) fn device(&self) -> &wgpu::Device {
        self.kernels.device()
    }

    /// The adapter and its driver, for messages.
    pub(super) fn adapter(&self) -> String {
        let wgpu::AdapterInfo { name, driver, driver_info, backend, .. } = self.device().adapter_info();
        // Browsers do not say.
        match name.is_empty() {
            true => format!("this {backend:?} adapter"),
            false => format!("{name} ({driver} {driver_info})"),
        }
    }

    /// A buffer that stands in for an optional tensor that a kernel would write.
    pub(super) fn spare(&self) -> &wgpu::Buffer {
        &self.classes[0].shared.staging
    }

    /// Every buffer, by class.
    pub(super) fn buffers(&self) -> impl Iterator<Item = &wgpu::Buffer> {
        self.classes.iter().flat_map(ClassMemory::buffers)
    }

    /// Bytes that may still be allocated.
    fn allowance(&self) -> Allowance {
        let used = || self.classes.iter().map(ClassMemory::bytes).sum();
        Allowance(self.memory_limit.map(|limit| limit.saturating_sub(used())))
    }
}

impl ClassMemory {
    /// The work of a plan.
    pub(super) fn work(&self, plan: &Plan) -> Work {
        let room = self.sizes.budget.scratch_partials;
        Work::new(self.shape(), &self.sizes.tiles, room, &self.kernels, plan)
    }

    /// Builds what `work` needs and records the upload of its words.
    pub(super) fn prepare(&mut self, encoder: &mut wgpu::CommandEncoder, work: &Work) -> Result<(), Error> {
        self.build_for(work)?;
        self.uploads.record(&self.device, encoder, &self.shared.plan, bytemuck::cast_slice(&work.words))
    }

    /// Builds what `work` needs, whose words fit the plan buffer.
    pub(super) fn build_for(&mut self, work: &Work) -> Result<(), Error> {
        for layer in &mut self.layers {
            layer.bound_across();
        }
        for dispatch in work.dispatches() {
            self.kernels.ensure(dispatch.pass)?;
            if dispatch.pass == Pass::CopyBlocksAcross {
                let layouts = &self.kernels.store.layouts().cache;
                let (from, to) = (dispatch.source, dispatch.slab);
                scoped(&self.device, || {
                    for layer in &mut self.layers {
                        layer.ensure_across(&self.device, layouts, &self.shared, from, to);
                    }
                })?;
            }
        }
        let (bytes, most) = (4 * work.words.len() as u64, self.shared.plan.size());
        if bytes > most {
            debug_assert!(false, "{bytes} bytes of plan, {most} at most");
            return Err(Error::Device(format!("a plan of {bytes} bytes is longer than it can be")));
        }
        Ok(())
    }

    /// Dispatches the work of one of its layers.
    pub(super) fn dispatch_layer(
        &self,
        pass: &mut wgpu::ComputePass<'_>,
        work: &Work,
        layer: usize,
        host: HostGroups<'_>,
        part: Part,
    ) {
        let whole = part == Part::Whole;
        if whole {
            self.dispatch(pass, work.append.as_slice(), layer, Some(host));
        }
        self.dispatch(pass, &work.attend, layer, Some(host));
        if whole {
            self.dispatch(pass, &work.changes, layer, None);
        }
    }

    pub(super) fn dispatch(
        &self,
        pass: &mut wgpu::ComputePass<'_>,
        dispatches: &[Dispatch],
        layer: usize,
        host: Option<HostGroups<'_>>,
    ) {
        let attention = self.shape().layer_attention[layer];
        for dispatch in dispatches.iter().filter(|d| d.attention.is_none_or(|own| own == attention)) {
            // `prepare` has built all of them, and the binding has what the pass needs.
            let pipeline = self.kernels.get(dispatch.pass);
            let (Some(pipeline), Some(group)) = (pipeline, self.cache_group(dispatch, layer)) else {
                continue;
            };
            pass.set_pipeline(pipeline);
            pass.set_bind_group(0, group, &[dispatch.params]);
            if let Some(host) = host.and_then(|host| self.host_group(dispatch.pass, host)) {
                pass.set_bind_group(1, host, &[]);
            }
            let [x, y, z] = dispatch.workgroups;
            pass.dispatch_workgroups(x, y, z);
        }
    }

    /// The cache's buffers of a pass.
    fn cache_group(&self, dispatch: &Dispatch, layer: usize) -> Option<&wgpu::BindGroup> {
        let (buffers, layout) = (&self.layers[layer], &self.shape().layout);
        let rotated = self.shared.rotated.as_ref();
        let slab = || buffers.slab(dispatch.slab);
        match dispatch.pass {
            Pass::Append => Some(&buffers.append),
            Pass::Pack(tensor) if layout.tensor(tensor).rotates_apart() => slab()?.pack_rotated.as_ref(),
            Pass::Pack(_) => Some(&slab()?.pack),
            Pass::RotateRows(_) => buffers.rotate.as_ref(),
            Pass::RotateQueries => rotated.map(|rotated| &rotated.target),
            // Without packed tokens any slab will do, or none.
            Pass::Decode(..) => Some(slab().map_or(&buffers.unpacked, |slab| &slab.attend)),
            Pass::PrefillPacked => Some(&slab()?.attend),
            Pass::PrefillUnpacked => Some(&buffers.unpacked),
            Pass::Merge(_) => Some(&self.shared.merge),
            Pass::CopyTokens => Some(&buffers.copy_tokens),
            Pass::CopyBlocks => Some(&slab()?.copy),
            Pass::CopyBlocksAcross => buffers.across(dispatch.source, dispatch.slab),
            Pass::Unpack | Pass::UnpackRotated(_) => Some(&slab()?.unpack),
        }
    }

    /// The host's buffers of a pass, or what takes their place.
    fn host_group<'a>(&'a self, pass: Pass, host: HostGroups<'a>) -> Option<&'a wgpu::BindGroup> {
        match pass {
            Pass::Append => host.append,
            Pass::Merge(_) => host.output,
            Pass::Decode(..) | Pass::PrefillPacked if self.shape().layout.keys.rotated => {
                self.shared.rotated.as_ref().map(|rotated| &rotated.queries)
            }
            Pass::Decode(..) | Pass::PrefillPacked | Pass::PrefillUnpacked | Pass::RotateQueries => {
                host.queries
            }
            Pass::Pack(_)
            | Pass::RotateRows(_)
            | Pass::CopyTokens
            | Pass::CopyBlocks
            | Pass::CopyBlocksAcross
            | Pass::Unpack
            | Pass::UnpackRotated(_) => None,
        }
    }
}

impl Executor for Gpu {
    type Recorder = wgpu::CommandEncoder;
    /// Of each class.
    type Work = Vec<Work>;

    fn grow(&mut self, class: usize, slabs: &[NewSlab], size: PoolSize) -> Result<(), Error> {
        let allowance = self.allowance();
        self.classes[class].grow(slabs, size, allowance)
    }

    fn shrink(&mut self, class: usize, slabs: &[u32]) {
        self.classes[class].shrink(slabs);
    }

    fn fit(&mut self, class: usize, size: PoolSize) -> Result<(), Error> {
        let known = self.classes[class].sizes.budget.pool.shared;
        if size.shared <= known {
            return Ok(());
        }
        self.grow(class, &[], size)
    }

    fn prepare(&mut self, encoder: &mut wgpu::CommandEncoder, plans: &[Plan]) -> Result<Vec<Work>, Error> {
        let prepare = |(class, plan): (&mut ClassMemory, &Plan)| {
            let work = class.work(plan);
            if !work.words.is_empty() {
                class.prepare(encoder, &work)?;
            }
            Ok(work)
        };
        self.classes.iter_mut().zip(plans).map(prepare).collect()
    }

    fn carry_out(&mut self, encoder: &mut wgpu::CommandEncoder, _: &[Plan], work: &Vec<Work>) {
        let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor {
            label: Some("kivi operation"),
            timestamp_writes: None,
        });
        for (class, work) in self.classes.iter().zip(work) {
            for layer in 0..class.layers.len() {
                class.dispatch(&mut pass, &work.changes, layer, None);
            }
        }
    }

    /// By copies from buffers that exist until they have been executed.
    fn write(
        &mut self,
        encoder: &mut wgpu::CommandEncoder,
        views: &[SequenceView],
        layers: &[LayerState],
    ) -> Result<(), Error> {
        let mut uploads = Vec::new();
        for (&(class, index), state) in self.shape.places.iter().zip(layers) {
            let (sinks, window) = (&state.sinks, &state.window);
            let words = [&sinks.keys, &sinks.values, &window.keys, &window.values, &state.blocks];
            let words: Vec<u32> = words.into_iter().flatten().copied().collect();
            let mut rest: &[u8] = bytemuck::cast_slice(&words);
            for copies in self.classes[class].places(index, &views[class]).pieces() {
                let size: u64 = copies.iter().map(|(_, _, size)| size).sum();
                let (bytes, tail) = rest.split_at(size as usize);
                rest = tail;
                let usage = wgpu::BufferUsages::MAP_WRITE | wgpu::BufferUsages::COPY_SRC;
                let upload = mapped_buffer(self.device(), "kivi snapshot", size, usage)?;
                write_mapped(&upload, bytes)?;
                uploads.push((upload, copies));
            }
        }
        // Nothing fails any more.
        for (source, copies) in &uploads {
            let mut at = 0;
            for (target, offset, size) in copies {
                encoder.copy_buffer_to_buffer(source, at, target, *offset, *size);
                at += size;
            }
        }
        Ok(())
    }

    /// Submits copies and waits for them.
    async fn read(&self, class: usize, index: usize, view: &SequenceView) -> Result<LayerState, Error> {
        let class = &self.classes[class];
        let words = submit_and_read(self.device(), &self.queue, &class.places(index, view)).await?;
        let mut rest = &words[..];
        let mut take = |n: usize| {
            let (head, tail) = rest.split_at(n);
            rest = tail;
            head.to_vec()
        };
        let token_words = class.shape().token_words() as usize;
        let sink_words = view.sinks.len() * token_words;
        let window_words = view.window.len() * token_words;
        let sinks = UnpackedTokens { keys: take(sink_words), values: take(sink_words) };
        let window = UnpackedTokens { keys: take(window_words), values: take(window_words) };
        Ok(LayerState { lengths: view.lengths, sinks, blocks: rest.to_vec(), window })
    }
}
