//! What the layers of a format class have on a device: their buffers, the kernels that use them, and how they
//! grow.

mod layers;

use super::device::{Gather, Uploads, buffer, buffer_now, filled_buffer, scoped, submit_and_read};
use super::kernels::{KernelSet, Kernels, Variant, check_limits};
use super::params::{IoParams, ViewParams};
use crate::error::Error;
use crate::format::Dtype;
use crate::memory::{ClassSizes, MemoryUsage, UPLOADS};
use crate::plan::{NewSlab, PoolSize, SequenceView, Slot, Usage};
use crate::shape::{CacheShape, Shape};
use layers::{LayerBuffers, Shared};
use std::sync::Arc;
use wgpu::BufferUsages;

pub(super) use layers::Rotated;

/// Usages of all buffers that kernels write.
const STORAGE: BufferUsages =
    BufferUsages::STORAGE.union(BufferUsages::COPY_SRC).union(BufferUsages::COPY_DST);
/// Of those that hold plans: parameters of passes are uniforms.
const PLAN: BufferUsages = STORAGE.union(BufferUsages::UNIFORM);

/// The layers of one format class.
#[derive(Debug)]
pub(super) struct ClassMemory {
    pub(super) device: wgpu::Device,
    shape: Arc<CacheShape>,
    /// Which of the cache's classes it is.
    class: usize,
    pub(super) sizes: ClassSizes,
    pub(super) kernels: KernelSet,
    pub(super) layers: Vec<LayerBuffers>,
    pub(super) shared: Shared,
    pub(super) uploads: Uploads,
}

/// Bytes that may still be allocated.
#[derive(Debug, Clone, Copy)]
pub(super) struct Allowance(pub(super) Option<u64>);

impl Allowance {
    fn take(&mut self, what: &'static str, bytes: u64) -> Result<(), Error> {
        if let Some(left) = &mut self.0 {
            *left = left.checked_sub(bytes).ok_or(Error::OutOfMemory { what, bytes })?;
        }
        Ok(())
    }
}

impl ClassMemory {
    /// Allocates what the class begins with.
    pub(super) async fn allocate(
        store: &Kernels,
        shape: Arc<CacheShape>,
        class: usize,
        sizes: ClassSizes,
        variant: Variant,
        allowance: &mut Allowance,
    ) -> Result<ClassMemory, Error> {
        let device = store.device();
        let (s, layouts, budget) = (&shape.classes[class], store.layouts(), sizes.budget);
        let mut usage = MemoryUsage::default();
        usage.add(s, &budget, Usage::default());
        allowance.take("the cache", usage.total())?;
        let storage = |what, size, usage| buffer(device, what, size, usage);
        let plan = storage("kivi plan", budget.plan_bytes, PLAN).await?;
        let staging = storage("kivi staging", s.staging_bytes(), STORAGE).await?;
        let scratch = storage("kivi scratch", budget.scratch_bytes, STORAGE).await?;
        let rotated = match s.rotated_bytes() {
            0 => None,
            bytes => {
                let rows = storage("kivi rotated rows", bytes, STORAGE).await?;
                Some((rows, dense_queries(device, s)?))
            }
        };
        let shared = || Shared::new(device, layouts, plan, staging, scratch, rotated);
        let shared = scoped(device, shared)?;
        let mut layers = Vec::with_capacity(s.layers.len());
        for _ in &s.layers {
            let ring = storage("kivi window", s.unpacked_bytes(), STORAGE).await?;
            let mut slabs = Vec::new();
            for pages in sizes.pool.slabs() {
                slabs.push(Some(storage("kivi slab", slab_bytes(s, pages), STORAGE).await?));
            }
            let layer = || LayerBuffers::new(device, &layouts.cache, &shared, ring, slabs);
            layers.push(scoped(device, layer)?);
        }
        log::info!(
            "KV cache: {} layers on {}: {:.2} bits per packed element, {} pages of 256 tokens in {} slabs per \
             layer, {} bytes, {variant:?} kernels",
            s.layers.len(),
            device.adapter_info().name,
            s.layout.format_bits(),
            budget.pool.pages,
            budget.pool.slabs,
            usage.total(),
        );
        Ok(ClassMemory {
            uploads: Uploads::new(device, budget.plan_bytes)?,
            device: device.clone(),
            kernels: KernelSet::new(store.clone(), s, &sizes.tiles, variant),
            class,
            sizes,
            layers,
            shared,
            shape,
        })
    }

    /// The shape of its layers.
    pub(super) fn shape(&self) -> &Shape {
        &self.shape.classes[self.class]
    }

    /// Runs the attention kernels of a variant from now on.
    pub(super) fn run_variant(&mut self, variant: Variant) {
        let store = self.kernels.store.clone();
        self.kernels = KernelSet::new(store, self.shape(), &self.sizes.tiles, variant);
    }

    /// Adds slabs to every layer and makes what steps need when the pool is so large: all of it, or nothing.
    /// In browsers a failure shows only when a buffer is used.
    pub(super) fn grow(
        &mut self,
        slabs: &[NewSlab],
        size: PoolSize,
        mut allowance: Allowance,
    ) -> Result<(), Error> {
        let s = &self.shape.classes[self.class];
        let budget = self.sizes.budget_for(s, size)?;
        if budget == self.sizes.budget && slabs.is_empty() {
            return Ok(());
        }
        let longest = budget.plan_bytes.max(self.sizes.promised_plan_bytes);
        check_limits(s, &self.sizes.tiles, longest, &self.device.limits())?;
        let mut storage = |what, size, usage| {
            allowance.take(what, size)?;
            buffer_now(&self.device, what, size, usage)
        };
        let mut new = Vec::with_capacity(self.layers.len());
        for _ in &self.layers {
            let slabs = slabs.iter().map(|slab| storage("kivi slab", slab_bytes(s, slab.pages), STORAGE));
            new.push(slabs.collect::<Result<Vec<_>, Error>>()?);
        }
        let plan = match budget.plan_bytes > self.shared.plan.size() {
            true => Some(storage("kivi plan", budget.plan_bytes, PLAN)?),
            false => None,
        };
        let scratch = match budget.scratch_bytes > self.shared.scratch.size() {
            true => Some(storage("kivi scratch", budget.scratch_bytes, STORAGE)?),
            false => None,
        };
        if plan.is_some() {
            allowance.take("kivi upload", UPLOADS * budget.plan_bytes)?;
            self.uploads.grow(&self.device, budget.plan_bytes)?;
        }

        // From here on nothing fails but a device that is lost.
        log::debug!("the pool grows to {} pages in {} slabs per layer", size.pages, size.slabs);
        self.sizes.budget = budget;
        self.rebind(plan, scratch)?;
        let (device, layouts) = (&self.device, self.kernels.store.layouts());
        scoped(device, || {
            for (layer, buffers) in self.layers.iter_mut().zip(new) {
                for (slab, buffer) in slabs.iter().zip(buffers) {
                    layer.add_slab(device, &layouts.cache, &self.shared, slab.slab as usize, buffer);
                }
            }
        })
    }

    /// Puts other buffers in the place of shared ones.
    fn rebind(&mut self, plan: Option<wgpu::Buffer>, scratch: Option<wgpu::Buffer>) -> Result<(), Error> {
        if plan.is_none() && scratch.is_none() {
            return Ok(());
        }
        let (device, layouts) = (self.device.clone(), self.kernels.store.layouts());
        scoped(&device, || {
            let plan = plan.unwrap_or_else(|| self.shared.plan.clone());
            let scratch = scratch.unwrap_or_else(|| self.shared.scratch.clone());
            let staging = self.shared.staging.clone();
            let rotated = self.shared.rotated.as_ref().map(Rotated::buffers);
            self.shared = Shared::new(&device, layouts, plan, staging, scratch, rotated);
            let old = std::mem::take(&mut self.layers);
            let rebound = |layer: LayerBuffers| layer.rebound(&device, &layouts.cache, &self.shared);
            self.layers = old.into_iter().map(rebound).collect();
        })
    }

    /// Gives back slabs of every layer.
    pub(super) fn shrink(&mut self, slabs: &[u32]) {
        for layer in &mut self.layers {
            slabs.iter().for_each(|slab| layer.remove_slab(*slab as usize));
        }
    }

    /// Where the words of a sequence in layer `index` lie: sinks' keys and values, the window's, then the
    /// blocks.
    pub(super) fn places(&self, index: usize, view: &SequenceView) -> Gather<'_> {
        let (s, buffers) = (self.shape(), &self.layers[index]);
        let token = u64::from(s.token_words()) * 4;
        let block = u64::from(s.layout.block_words()) * 4;
        let values = u64::from(s.unpacked_slots()) * token;
        let mut gather = Gather::default();
        for slots in [&view.sinks, &view.window] {
            for tensor in [0, values] {
                for slot in slots {
                    gather.add(&buffers.ring, tensor + u64::from(Slot::index(*slot)) * token, token);
                }
            }
        }
        for &(slab, index) in &view.blocks {
            let Some(slab) = buffers.slab(slab as usize) else { continue };
            gather.add(&slab.buffer, u64::from(index) * block, block);
        }
        gather
    }

    /// The first words of the first slab of the first layer.
    pub(super) async fn submit_and_read_slab(
        &self,
        queue: &wgpu::Queue,
        words: u32,
    ) -> Result<Vec<u32>, Error> {
        let mut gather = Gather::default();
        if let Some(slab) = self.layers[0].slab(0) {
            gather.add(&slab.buffer, 0, u64::from(words) * 4);
        }
        submit_and_read(&self.device, queue, &gather).await
    }

    /// Every buffer: slabs by layer, rings by layer, rotated rows, then plan, staging and scratch.
    pub(super) fn buffers(&self) -> impl Iterator<Item = &wgpu::Buffer> {
        let slabs = self.layers.iter().flat_map(|l| l.slabs.iter().flatten().map(|slab| &slab.buffer));
        let rings = self.layers.iter().map(|l| &l.ring);
        let shared = [&self.shared.plan, &self.shared.staging, &self.shared.scratch];
        let rotated = self.shared.rotated.as_ref().map(|rotated| &rotated.buffer);
        slabs.chain(rings).chain(rotated).chain(shared)
    }

    /// Bytes of all buffers.
    pub(super) fn bytes(&self) -> u64 {
        self.buffers().map(wgpu::Buffer::size).sum::<u64>() + self.uploads.bytes()
    }
}

/// Bytes of a slab of so many pages.
fn slab_bytes(s: &Shape, pages: u32) -> u64 {
    u64::from(pages) * s.layout.page_words() * 4
}

/// How queries lie where keys are rotated, in the words of a host's tensors: f32, `[query][query head]`, each
/// rotated and then as it is.
fn dense_queries(device: &wgpu::Device, s: &Shape) -> Result<wgpu::Buffer, Error> {
    let (head_stride, dtype) = (2 * s.layout.head_dim, Dtype::F32.index());
    let q = ViewParams { offset: 0, token_stride: s.query_heads * head_stride, head_stride, dtype };
    let io = IoParams { q, ..IoParams::default() };
    filled_buffer(device, "kivi io", bytemuck::bytes_of(&io), BufferUsages::STORAGE)
}
