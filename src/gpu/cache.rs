//! The cache, its buffers and its bind groups.

use super::binding::LayerBinding;
use super::buffers::{buffer, scoped};
use super::io::LayerIo;
use super::layers::{LayerBuffers, Shared};
use super::pipelines::{HostLayouts, Pipelines};
use super::shaders::{MAX_GROUPS, Pass};
use super::shapes::workgroup_bytes;
use super::step::Step;
use super::upload::Uploads;
use super::variant::Variant;
use super::work::Work;
use crate::config::CacheConfig;
use crate::error::Error;
use crate::format::PAGE_TOKENS;
use crate::geometry::Geometry;
use crate::memory::MemoryUsage;
use crate::plan::{Operation, Planner, SequenceId, SequenceStep};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// Choices that concern the device and not the content of the cache.
#[derive(Debug, Clone, Copy, Default)]
#[non_exhaustive]
pub struct KvCacheOptions<'a> {
    /// The host's cache of compiled pipelines.
    pub pipeline_cache: Option<&'a wgpu::PipelineCache>,
    /// Builds every pipeline at construction instead of at the first step that needs it.
    pub warm_up: bool,
    /// The attention kernels to run; `None`: what suits the device, see [`KvCache::variant`].
    pub variant: Option<Variant>,
}

impl<'a> KvCacheOptions<'a> {
    /// Compiles pipelines through the host's `cache`.
    #[must_use]
    pub fn with_pipeline_cache(mut self, cache: &'a wgpu::PipelineCache) -> Self {
        self.pipeline_cache = Some(cache);
        self
    }

    /// Runs this variant of the attention kernels.
    #[must_use]
    pub fn with_variant(mut self, variant: Variant) -> Self {
        self.variant = Some(variant);
        self
    }

    /// Builds every pipeline at construction.
    #[must_use]
    pub fn with_warm_up(mut self) -> Self {
        self.warm_up = true;
        self
    }
}

/// A quantized key/value cache on a host's wgpu device. See the [crate docs](crate) for an example.
///
/// It never submits and never blocks, except where a name says so and for the self-test at construction. It installs no callback on the device.
/// Ids of sequences and operations belong to the cache that gave them.
#[derive(Debug)]
pub struct KvCache {
    pub(super) device: wgpu::Device,
    pub(super) queue: wgpu::Queue,
    pub(super) planner: Planner,
    pub(super) pipelines: Pipelines,
    pipeline_cache: Option<wgpu::PipelineCache>,
    pub(super) layers: Vec<LayerBuffers>,
    pub(super) shared: Shared,
    pub(super) uploads: Uploads,
    /// Allocations until some fail, and how many; only tests set it.
    pub(super) failing: (AtomicU64, AtomicU64),
    identity: Arc<()>,
}

impl KvCache {
    /// An empty cache on the host's device.
    ///
    /// Allocates what `capacity` tokens need; a pool that is full grows by slabs. The kernels' arithmetic is checked by packing a few adversarial groups, and
    /// where subgroup kernels are wanted the order of a workgroup's invocations, for which small command buffers are submitted to `queue`.
    ///
    /// # Errors
    /// An invalid configuration, a device limit that is too low, [`Error::OutOfMemory`], [`Error::Arithmetic`].
    pub async fn new(
        device: &wgpu::Device,
        queue: &wgpu::Queue,
        config: &CacheConfig,
    ) -> Result<KvCache, Error> {
        Self::with_options(device, queue, config, &KvCacheOptions::default()).await
    }

    /// As [`Self::new`], with options.
    ///
    /// # Errors
    /// As [`Self::new`], and [`Error::VariantUnavailable`]; with a warm-up, [`Error::Device`] if a pipeline cannot be built.
    pub async fn with_options(
        device: &wgpu::Device,
        queue: &wgpu::Queue,
        config: &CacheConfig,
        options: &KvCacheOptions<'_>,
    ) -> Result<KvCache, Error> {
        let mut cache = Self::allocate(device, queue, config, options).await?;
        if cache.geometry().pages() == 0 && cache.geometry().max_pages > 0 {
            // A pool that begins empty: another cache of the kind stands in.
            let filled = CacheConfig {
                layers: 1,
                layer_attention: Vec::new(),
                capacity: config.sink_tokens + config.residual_window + PAGE_TOKENS,
                max_capacity: None,
                ..config.clone()
            };
            super::self_test::run(&mut Self::allocate(device, queue, &filled, options).await?).await?;
        } else {
            super::self_test::run(&mut cache).await?;
        }
        Ok(cache)
    }

    /// As [`Self::new`]; blocks until the self-test has run.
    ///
    /// # Errors
    /// As [`Self::new`].
    #[cfg(not(target_arch = "wasm32"))]
    pub fn new_blocking(
        device: &wgpu::Device,
        queue: &wgpu::Queue,
        config: &CacheConfig,
    ) -> Result<KvCache, Error> {
        pollster::block_on(Self::new(device, queue, config))
    }

    /// As [`Self::with_options`]; blocks until the self-test has run.
    ///
    /// # Errors
    /// As [`Self::with_options`].
    #[cfg(not(target_arch = "wasm32"))]
    pub fn with_options_blocking(
        device: &wgpu::Device,
        queue: &wgpu::Queue,
        config: &CacheConfig,
        options: &KvCacheOptions<'_>,
    ) -> Result<KvCache, Error> {
        pollster::block_on(Self::with_options(device, queue, config, options))
    }

    /// The least limits with which a device can hold this cache: WebGPU's defaults, raised where the configuration needs it.
    ///
    /// # Errors
    /// An invalid configuration.
    pub fn required_limits(config: &CacheConfig) -> Result<wgpu::Limits, Error> {
        let mut limits = wgpu::Limits::default();
        loop {
            match Geometry::new(config, limits.max_storage_buffer_binding_size) {
                Err(Error::LimitTooLow { needed, available, .. })
                    if needed > available && available == limits.max_storage_buffer_binding_size =>
                {
                    limits.max_storage_buffer_binding_size = needed;
                    limits.max_buffer_size = limits.max_buffer_size.max(needed);
                }
                Err(error) => return Err(error),
                Ok(g) => {
                    let plan = g.plan_bytes().max(g.promised_plan_bytes);
                    limits.max_storage_buffer_binding_size = limits.max_storage_buffer_binding_size.max(plan);
                    limits.max_buffer_size = limits.max_buffer_size.max(plan);
                    return Ok(limits);
                }
            }
        }
    }

    /// Features that the library uses if the device has them; none is needed. A host that wants the faster kernels requests those of them that
    /// its adapter has.
    pub fn optional_features() -> wgpu::Features {
        Variant::ALL.into_iter().fold(wgpu::Features::empty(), |all, variant| all | variant.features())
    }

    /// The attention kernels that the cache runs.
    pub fn variant(&self) -> Variant {
        self.pipelines.variant()
    }

    async fn allocate(
        device: &wgpu::Device,
        queue: &wgpu::Queue,
        config: &CacheConfig,
        options: &KvCacheOptions<'_>,
    ) -> Result<KvCache, Error> {
        let limits = device.limits();
        let (binding, buffer_size) = (limits.max_storage_buffer_binding_size, limits.max_buffer_size);
        let g = Geometry::new(config, binding.min(buffer_size)).map_err(|error| match error {
            Error::LimitTooLow {
                limit: "max_storage_buffer_binding_size",
                available,
                needed,
                what,
                instead,
            } if buffer_size < binding => {
                Error::LimitTooLow { limit: "max_buffer_size", available, needed, what, instead }
            }
            other => other,
        })?;
        check_limits(&g, &limits)?;
        let variant = Variant::choose(options.variant, device, queue, &g).await?;

        use wgpu::BufferUsages as Usage;
        let storage = Usage::STORAGE | Usage::COPY_SRC | Usage::COPY_DST;
        let plan = buffer(device, "kivi plan", g.plan_bytes(), storage | Usage::UNIFORM).await?;
        let staging = buffer(device, "kivi staging", g.staging_bytes(), storage).await?;
        let scratch = buffer(device, "kivi scratch", g.scratch_bytes(), storage).await?;
        let mut pipelines = Pipelines::new(device, variant);
        let shared = scoped(device, || Shared::new(device, &pipelines.cache, plan, staging, scratch))?;
        let mut layers = Vec::with_capacity(g.layers as usize);
        for _ in 0..g.layers {
            let ring = buffer(device, "kivi window", g.unpacked_bytes(), storage).await?;
            let mut slabs = Vec::with_capacity(g.slabs() as usize);
            for slab in 0..g.slabs() {
                slabs.push(Some(buffer(device, "kivi slab", g.slab_bytes(slab), storage).await?));
            }
            let layer = || LayerBuffers::new(device, &pipelines.cache, &shared, ring, slabs);
            layers.push(scoped(device, layer)?);
        }
        if options.warm_up {
            for pass in Pass::all(&g) {
                pipelines.ensure(device, &g, pass, options.pipeline_cache)?;
            }
        }
        log::info!(
            "KV cache of {} layers on {}: {:.2} bits per packed element, {} pages of 256 tokens in {} slabs per layer, {} bytes, {variant:?} kernels",
            g.layers,
            device.adapter_info().name,
            g.layout.format_bits(),
            g.pages(),
            g.slabs(),
            MemoryUsage::new(&g, crate::plan::Usage::default()).total(),
        );
        Ok(KvCache {
            uploads: Uploads::new(device, g.plan_bytes())?,
            device: device.clone(),
            queue: queue.clone(),
            planner: Planner::new(g),
            pipelines,
            pipeline_cache: options.pipeline_cache.cloned(),
            layers,
            shared,
            failing: Default::default(),
            identity: Arc::new(()),
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

    /// The device that the cache lives on.
    pub fn device(&self) -> &wgpu::Device {
        &self.device
    }

    /// Bytes of all GPU buffers of the cache, by what they hold.
    pub fn memory(&self) -> MemoryUsage {
        let mut memory = MemoryUsage::new(self.geometry(), self.planner.usage());
        // They do not shrink with the pool, and there are more uploads while many steps are on their way.
        memory.scratch = self.shared.scratch.size();
        memory.plan = self.shared.plan.size() + self.uploads.bytes();
        memory
    }

    /// Adds an empty sequence.
    ///
    /// # Errors
    /// [`Error::TooManySequences`].
    pub fn create_sequence(&mut self) -> Result<SequenceId, Error> {
        self.planner.create_sequence()
    }

    /// Tokens of a sequence.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn tokens(&self, sequence: SequenceId) -> Result<u32, Error> {
        self.planner.tokens(sequence)
    }

    /// The sequences of the cache.
    pub fn sequences(&self) -> impl Iterator<Item = SequenceId> {
        self.planner.sequences()
    }

    /// Checks and binds a layer's tensors. Do this once per set of buffers, not per step.
    ///
    /// # Errors
    /// What is wrong with a buffer: [`Error::BufferUsage`], [`Error::BufferTooSmall`], [`Error::Stride`], [`Error::Overlap`], [`Error::BindingIncomplete`].
    pub fn bind(&self, io: &LayerIo<'_>) -> Result<LayerBinding, Error> {
        LayerBinding::new(self, io)
    }

    /// Starts a step: validates it and records the upload of its plan into `encoder`. Record the layers with [`Step::layer`], then call
    /// [`Step::finish`]; a step that is dropped instead changes nothing. Encoders must be submitted in the order recorded.
    ///
    /// No buffer is created, unless the pool must grow, or the upload buffers of three operations before are still on their way (those of an encoder that is
    /// thrown away for ever).
    ///
    /// # Errors
    /// What is wrong with the request, see [`Planner::plan_step`]; [`Error::OutOfMemory`] for a new slab or the upload, [`Error::Device`] if a pipeline cannot be built.
    pub fn begin_step<'a>(
        &'a mut self,
        encoder: &mut wgpu::CommandEncoder,
        steps: &[SequenceStep],
    ) -> Result<Step<'a>, Error> {
        let planned = self.with_room(|planner| planner.plan_step(steps))?;
        let work = Work::new(self.planner.geometry(), self.variant(), &planned.plan);
        self.prepare(encoder, &work)?;
        Ok(Step::new(self, planned, work))
    }

    /// Undoes the latest operation, of which no command buffer may be submitted any more; up to `max_undo` of them, newest first.
    ///
    /// To discard an operation whose encoder was submitted is the caller's error: tokens of the window may have been overwritten. The same holds
    /// for an operation after which a step was begun, dropped, and its encoder submitted all the same: that step may have used what the
    /// operation had freed.
    ///
    /// # Errors
    /// [`Error::NotLatest`], [`Error::TooOld`].
    pub fn discard(&mut self, operation: Operation) -> Result<(), Error> {
        self.planner.discard(operation)
    }

    pub(super) fn ensure(&mut self, pass: Pass) -> Result<(), Error> {
        let g = self.planner.geometry();
        self.pipelines.ensure(&self.device, g, pass, self.pipeline_cache.as_ref())
    }

    /// Builds what `work` needs and records the upload of its words.
    pub(super) fn prepare(&mut self, encoder: &mut wgpu::CommandEncoder, work: &Work) -> Result<(), Error> {
        for layer in &mut self.layers {
            layer.bound_across();
        }
        for dispatch in work.dispatches() {
            self.ensure(dispatch.pass)?;
            if dispatch.pass == Pass::CopyBlocksAcross {
                let (layouts, from, to) = (&self.pipelines.cache, dispatch.source, dispatch.slab);
                scoped(&self.device, || {
                    for layer in &mut self.layers {
                        layer.ensure_across(&self.device, layouts, &self.shared, from, to);
                    }
                })?;
            }
        }
        let bytes: &[u8] = bytemuck::cast_slice(&work.words);
        if bytes.len() as u64 > self.shared.plan.size() {
            debug_assert!(false, "{} bytes of plan, {} at most", bytes.len(), self.shared.plan.size());
            return Err(Error::Device(format!("a plan of {} bytes is longer than it can be", bytes.len())));
        }
        self.uploads.record(&self.device, encoder, &self.shared.plan, bytes)
    }

    pub(super) fn identity(&self) -> Arc<()> {
        self.identity.clone()
    }

    pub(super) fn host_layouts(&self) -> &HostLayouts {
        &self.pipelines.host
    }

    /// Every buffer of the cache, for tests that fill them with garbage and count them.
    #[doc(hidden)]
    pub fn buffers(&self) -> Vec<&wgpu::Buffer> {
        let slabs = self.layers.iter().flat_map(|l| l.slabs.iter().flatten().map(|slab| &slab.buffer));
        let rings = self.layers.iter().map(|l| &l.ring);
        slabs.chain(rings).chain([&self.shared.plan, &self.shared.staging, &self.shared.scratch]).collect()
    }
}

pub(super) fn check_limits(g: &Geometry, limits: &wgpu::Limits) -> Result<(), Error> {
    let need = |limit, available: u64, needed: u64, what, instead| {
        if available >= needed {
            Ok(())
        } else {
            Err(Error::LimitTooLow { limit, available, needed, what, instead })
        }
    };
    let other = "use another device";
    let what = "the attention kernels";
    let buffers = u64::from(limits.max_storage_buffers_per_shader_stage);
    need("max_storage_buffers_per_shader_stage", buffers, 8, what, other)?;
    let memory = u64::from(limits.max_compute_workgroup_storage_size);
    let least = u64::from(workgroup_bytes(g, Variant::Portable));
    need(
        "max_compute_workgroup_storage_size",
        memory,
        least,
        what,
        "use a smaller head_dim or larger groups",
    )?;
    let invocations = u64::from(limits.max_compute_invocations_per_workgroup);
    need("max_compute_invocations_per_workgroup", invocations, 256, what, other)?;
    let width = u64::from(limits.max_compute_workgroup_size_x);
    need("max_compute_workgroup_size_x", width, 256, what, other)?;
    let groups = u64::from(limits.max_compute_workgroups_per_dimension);
    need("max_compute_workgroups_per_dimension", groups, MAX_GROUPS.into(), "long work lists", other)?;
    let most = g.plan_bytes().max(g.promised_plan_bytes);
    let instead = "lower max_sequences, max_batch_tokens or capacity";
    need(
        "max_storage_buffer_binding_size",
        limits.max_storage_buffer_binding_size,
        most,
        "a step's plan",
        instead,
    )
}
