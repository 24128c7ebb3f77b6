//! Layers that share plans: their planner, their buffers and their kernels.

use super::buffers::{buffer, filled_buffer, scoped};
use super::cache::KvCacheOptions;
use super::io::{ABSENT, IoParams, ViewParams};
use super::kernels::{KernelSet, Kernels, Pass, Variant};
use super::layers::{LayerBuffers, Shared};
use super::upload::Uploads;
use super::work::Work;
use crate::error::Error;
use crate::format::Dtype;
use crate::geometry::Geometry;
use crate::memory::MemoryUsage;
use crate::plan::{CacheId, Planner};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// The layers of one [class](crate::LayerFormat).
#[derive(Debug)]
pub(super) struct Class {
    pub(super) device: wgpu::Device,
    pub(super) planner: Planner,
    pub(super) kernels: KernelSet,
    pub(super) layers: Vec<LayerBuffers>,
    pub(super) shared: Shared,
    pub(super) uploads: Uploads,
    /// Allocations until some fail, and how many; only tests set it.
    pub(super) failing: Arc<(AtomicU64, AtomicU64)>,
}

impl Class {
    /// Of a geometry; `queue` may be used to learn about the adapter.
    pub(super) async fn allocate(
        device: &wgpu::Device,
        queue: &wgpu::Queue,
        (cache, g): (CacheId, Geometry),
        store: &Kernels,
        options: &KvCacheOptions<'_>,
    ) -> Result<Class, Error> {
        let variant = Variant::choose(options.variant, device, queue, &g).await?;

        use wgpu::BufferUsages as Usage;
        let storage = Usage::STORAGE | Usage::COPY_SRC | Usage::COPY_DST;
        let plan = buffer(device, "kivi plan", g.plan_bytes(), storage | Usage::UNIFORM).await?;
        let staging = buffer(device, "kivi staging", g.staging_bytes(), storage).await?;
        let scratch = buffer(device, "kivi scratch", g.scratch_bytes(), storage).await?;
        let layouts = store.layouts();
        let rotated = match g.rotated_bytes() {
            0 => None,
            bytes => {
                let rows = buffer(device, "kivi rotated rows", bytes, storage).await?;
                Some((rows, dense_queries(device, &g)?))
            }
        };
        let shared = || Shared::new(device, layouts, plan, staging, scratch, rotated);
        let shared = scoped(device, shared)?;
        let mut layers = Vec::with_capacity(g.layers as usize);
        for _ in 0..g.layers {
            let ring = buffer(device, "kivi window", g.unpacked_bytes(), storage).await?;
            let mut slabs = Vec::with_capacity(g.slabs() as usize);
            for slab in 0..g.slabs() {
                slabs.push(Some(buffer(device, "kivi slab", g.slab_bytes(slab), storage).await?));
            }
            let layer = || LayerBuffers::new(device, &layouts.cache, &shared, ring, slabs);
            layers.push(scoped(device, layer)?);
        }
        log::info!(
            "KV cache: {} layers on {}: {:.2} bits per packed element, {} pages of 256 tokens in {} slabs per layer, {} bytes, {variant:?} kernels",
            g.layers,
            device.adapter_info().name,
            g.layout.format_bits(),
            g.pages(),
            g.slabs(),
            MemoryUsage::new([(&g, crate::plan::Usage::default())]).total(),
        );
        Ok(Class {
            uploads: Uploads::new(device, g.plan_bytes())?,
            device: device.clone(),
            kernels: KernelSet::new(store.clone(), &g, variant),
            planner: Planner::of(cache, g),
            layers,
            shared,
            failing: Default::default(),
        })
    }

    /// Runs the attention kernels of a variant from now on.
    pub(super) fn run_variant(&mut self, variant: Variant) {
        self.kernels = KernelSet::new(self.kernels.store.clone(), self.planner.geometry(), variant);
    }

    pub(super) fn geometry(&self) -> &Geometry {
        self.planner.geometry()
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

    /// Every buffer, for tests.
    pub(super) fn buffers(&self) -> impl Iterator<Item = &wgpu::Buffer> {
        let slabs = self.layers.iter().flat_map(|l| l.slabs.iter().flatten().map(|slab| &slab.buffer));
        let rings = self.layers.iter().map(|l| &l.ring);
        let shared = [&self.shared.plan, &self.shared.staging, &self.shared.scratch];
        let rotated = self.shared.rotated.as_ref().map(|rotated| &rotated.buffer);
        slabs.chain(rings).chain(rotated).chain(shared)
    }
}

/// How rotated queries lie, in the words of a host's tensors: f32, `[query][query head][channel]`.
fn dense_queries(device: &wgpu::Device, g: &Geometry) -> Result<wgpu::Buffer, Error> {
    let absent = ViewParams { dtype: ABSENT, ..ViewParams::default() };
    let (head_stride, dtype) = (g.layout.head_dim, Dtype::F32.index());
    let q = ViewParams { offset: 0, token_stride: g.query_heads * head_stride, head_stride, dtype };
    let io = IoParams { k: absent, v: absent, q, out: absent, sinks: absent, lse: absent };
    filled_buffer(device, "kivi io", bytemuck::bytes_of(&io), wgpu::BufferUsages::STORAGE)
}
