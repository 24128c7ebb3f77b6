//! The cache: its classes of layers as one.

use super::binding::LayerBinding;
use super::class::Class;
use super::io::LayerIo;
use super::kernels::{HostLayouts, Kernels, Progress, Variant, check_limits};
use super::self_test::{self, SelfTest, Wrong};
use super::step::{Part, Step};
use super::work::Work;
use crate::config::CacheConfig;
use crate::error::Error;
use crate::geometry::Geometry;
use crate::memory::MemoryUsage;
use crate::plan::{CacheId, Operation, Planner, SequenceId, SequenceStep, all_or_none, the_same};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Choices that concern the device and not the content of the cache.
#[derive(Debug, Clone, Copy, Default)]
#[non_exhaustive]
pub struct KvCacheOptions<'a> {
    /// Kernels of the device that are shared with other caches; `None`: some of its own.
    pub kernels: Option<&'a Kernels>,
    /// The attention kernels to run; `None`: what suits the device, see [`KvCache::variant`].
    pub variant: Option<Variant>,
    /// What is tried out on the device at construction. Default: everything.
    pub self_test: SelfTest,
}

impl<'a> KvCacheOptions<'a> {
    /// Shares kernels with other caches on the device.
    #[must_use]
    pub fn with_kernels(mut self, kernels: &'a Kernels) -> Self {
        self.kernels = Some(kernels);
        self
    }

    /// Runs this variant of the attention kernels.
    #[must_use]
    pub fn with_variant(mut self, variant: Variant) -> Self {
        self.variant = Some(variant);
        self
    }

    /// Tries out so much at construction.
    #[must_use]
    pub fn with_self_test(mut self, self_test: SelfTest) -> Self {
        self.self_test = self_test;
        self
    }
}

/// A quantized key/value cache on a host's wgpu device. See the [crate docs](crate) for an example.
///
/// It never submits and never blocks, except where a name says so and for the self-test at construction. It installs no callback on the device.
/// Ids of sequences, operations and bindings belong to the cache that gave them; another refuses them.
#[derive(Debug)]
pub struct KvCache {
    pub(super) device: wgpu::Device,
    pub(super) queue: wgpu::Queue,
    /// Classes of layers, that of the first layer first.
    pub(super) classes: Vec<Class>,
    /// Of each layer: its class, and its index there.
    places: Vec<(usize, usize)>,
    kernels: Kernels,
    /// As [`Class::failing`], of all classes.
    failing: Arc<(AtomicU64, AtomicU64)>,
    id: CacheId,
}

impl KvCache {
    /// An empty cache on the host's device.
    ///
    /// Allocates what `capacity` tokens need; a pool that is full grows by slabs. The kernels are tried out,
    /// for which small command buffers are submitted to `queue`: they pack a few adversarial groups, and
    /// every attention kernel that the configuration can run attends. If one computes wrongly, the portable
    /// kernels replace its variant in all layers of the format, which is logged as a warning with the
    /// kernel's name ([`Self::variant_of`] names what runs); if portable ones do, the device is refused.
    /// [`SelfTest::Words`] leaves attention out.
    ///
    /// # Errors
    /// An invalid configuration, a device limit that is too low, [`Error::OutOfMemory`],
    /// [`Error::Arithmetic`], [`Error::WrongAttention`], [`Error::Device`] if a kernel cannot be built.
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
    /// As [`Self::new`], and [`Error::VariantUnavailable`]. The variant that the options name is never
    /// replaced.
    pub async fn with_options(
        device: &wgpu::Device,
        queue: &wgpu::Queue,
        config: &CacheConfig,
        options: &KvCacheOptions<'_>,
    ) -> Result<KvCache, Error> {
        let geometries = geometries(config, &device.limits())?;
        geometries.iter().try_for_each(|g| check_limits(g, &device.limits()))?;
        let kernels = match options.kernels {
            Some(kernels) if kernels.device() != device => return Err(Error::ForeignKernels),
            Some(kernels) => kernels.clone(),
            None => Kernels::new(device),
        };
        let mut cache = Self::of_classes(device, queue, geometries, &kernels, options).await?;
        for class in 0..cache.classes.len() {
            let g = cache.classes[class].geometry();
            if g.pages() == 0 {
                // A pool that begins empty: another cache of the kind stands in, and its kernels are taken
                // over.
                let smallest = vec![g.smallest()?];
                let mut filled = Self::of_classes(device, queue, smallest, &kernels, options).await?;
                filled.try_out(0, options).await?;
                std::mem::swap(&mut cache.classes[class].kernels, &mut filled.classes[0].kernels);
            } else {
                cache.try_out(class, options).await?;
            }
        }
        Ok(cache)
    }

    /// Tests the kernels of a class of layers, and replaces those that attend wrongly or cannot be built if
    /// the host has not chosen them.
    pub(super) async fn try_out(&mut self, class: usize, options: &KvCacheOptions<'_>) -> Result<(), Error> {
        self_test::words(self, class).await?;
        if options.self_test == SelfTest::Words {
            return Ok(());
        }
        loop {
            let variant = self.classes[class].kernels.variant();
            let replaceable = variant != Variant::Portable && options.variant.is_none();
            let Wrong { kernel, detail } = match self_test::attention(self, class).await {
                Ok(None) => return Ok(()),
                Ok(Some(wrong)) => wrong,
                Err(Error::Device(detail)) if replaceable => {
                    Wrong { kernel: format!("those of {variant:?}"), detail }
                }
                Err(error) => return Err(error),
            };
            let adapter = self.adapter();
            if !replaceable {
                return Err(Error::WrongAttention { adapter, kernel, detail });
            }
            log::warn!("{adapter}: portable kernels replace {kernel}, which attends wrongly: {detail}");
            self.classes[class].run_variant(Variant::Portable);
        }
    }

    /// The adapter and its driver, for messages.
    pub(super) fn adapter(&self) -> String {
        let wgpu::AdapterInfo { name, driver, driver_info, backend, .. } = self.device.adapter_info();
        // Browsers do not say.
        match name.is_empty() {
            true => format!("this {backend:?} adapter"),
            false => format!("{name} ({driver} {driver_info})"),
        }
    }

    /// Of classes that the device has limits for, and that have not been tested yet.
    async fn of_classes(
        device: &wgpu::Device,
        queue: &wgpu::Queue,
        geometries: Vec<Geometry>,
        kernels: &Kernels,
        options: &KvCacheOptions<'_>,
    ) -> Result<KvCache, Error> {
        let places = Geometry::places(&geometries);
        let failing = Arc::<(AtomicU64, AtomicU64)>::default();
        let id = CacheId::unique();
        let mut classes = Vec::with_capacity(geometries.len());
        for g in geometries {
            let mut class = Class::allocate(device, queue, (id, g), kernels, options).await?;
            class.failing = failing.clone();
            classes.push(class);
        }
        let (device, queue, kernels) = (device.clone(), queue.clone(), kernels.clone());
        Ok(KvCache { device, queue, classes, places, kernels, failing, id })
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
            match Geometry::all(config, limits.max_storage_buffer_binding_size) {
                Err(Error::LimitTooLow { needed, available, .. })
                    if needed > available && available == limits.max_storage_buffer_binding_size =>
                {
                    limits.max_storage_buffer_binding_size = needed;
                    limits.max_buffer_size = limits.max_buffer_size.max(needed);
                }
                Err(error) => return Err(error),
                Ok(classes) => {
                    let plan = classes.iter().map(|g| g.plan_bytes().max(g.promised_plan_bytes)).max();
                    let plan = plan.unwrap_or(0);
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
        Variant::ALL.iter().fold(wgpu::Features::empty(), |all, variant| all | variant.features())
    }

    /// Builds every kernel that the cache can run and that has not been built, on native from several threads. Steps
    /// build what they need by themselves; this moves the time that it takes to where a host can show how far it is.
    ///
    /// `progress` is called after each kernel.
    ///
    /// # Errors
    /// [`Error::Device`] if a kernel cannot be built.
    pub fn warm_up(&mut self, progress: impl Fn(Progress) + Sync) -> Result<(), Error> {
        let missing: Vec<_> =
            self.classes.iter().flat_map(|class| class.kernels.missing()).cloned().collect();
        self.kernels.build_all(&missing, &progress)
    }

    /// The kernels of the cache, to share with others on the device.
    pub fn kernels(&self) -> &Kernels {
        &self.kernels
    }

    /// The attention kernels that the cache runs in the first layer and those with the same format.
    pub fn variant(&self) -> Variant {
        self.classes[0].kernels.variant()
    }

    /// The attention kernels that the cache runs in a layer.
    ///
    /// # Errors
    /// [`Error::LayerOutOfRange`].
    pub fn variant_of(&self, layer: u32) -> Result<Variant, Error> {
        let (class, _) = self.place(layer)?;
        Ok(self.classes[class].kernels.variant())
    }

    /// Layers of the model.
    pub fn layers(&self) -> u32 {
        self.places.len() as u32
    }

    /// The derived sizes of the first layer's class.
    pub fn geometry(&self) -> &Geometry {
        self.classes[0].geometry()
    }

    /// The derived sizes of a layer's class.
    ///
    /// # Errors
    /// [`Error::LayerOutOfRange`].
    pub fn geometry_of(&self, layer: u32) -> Result<&Geometry, Error> {
        let (class, _) = self.place(layer)?;
        Ok(self.classes[class].geometry())
    }

    pub(super) fn geometries(&self) -> Vec<&Geometry> {
        self.classes.iter().map(Class::geometry).collect()
    }

    /// The sequences and their places in the first layer's class.
    pub fn planner(&self) -> &Planner {
        &self.classes[0].planner
    }

    /// The class of a layer and its index there.
    pub(super) fn place(&self, layer: u32) -> Result<(usize, usize), Error> {
        let error = Error::LayerOutOfRange { got: layer, layers: self.layers() };
        self.places.get(layer as usize).copied().ok_or(error)
    }

    /// The device that the cache lives on.
    pub fn device(&self) -> &wgpu::Device {
        &self.device
    }

    /// Bytes of all GPU buffers of the cache, by what they hold.
    pub fn memory(&self) -> MemoryUsage {
        let usage = |class: &Class| class.planner.usage();
        let mut memory = MemoryUsage::new(self.classes.iter().map(|class| (class.geometry(), usage(class))));
        // They do not shrink with the pool, and there are more uploads while many steps are on their way.
        memory.scratch = self.classes.iter().map(|class| class.shared.scratch.size()).sum();
        memory.plan = self.classes.iter().map(|class| class.shared.plan.size() + class.uploads.bytes()).sum();
        memory
    }

    /// Adds an empty sequence.
    ///
    /// # Errors
    /// [`Error::TooManySequences`].
    pub fn create_sequence(&mut self) -> Result<SequenceId, Error> {
        Ok(the_same(all_or_none(&mut self.classes, |class| class.planner.create_sequence(), |_, _| {})?))
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
        let begin = |class: &mut Class| {
            let planned = class.with_room(|planner| planner.plan_step(steps))?;
            let work = Work::new(class.geometry(), &class.kernels, &planned.plan);
            class.prepare(encoder, &work)?;
            Ok(Part { planned, work, staged: None })
        };
        let parts = all_or_none(&mut self.classes, begin, |_, _| {})?;
        Ok(Step::new(self, parts))
    }

    /// Undoes the latest operation, of which no command buffer may be submitted any more; up to `max_undo` of them, newest first.
    ///
    /// To discard an operation whose encoder was submitted is the caller's error: tokens of the window may have been overwritten. The same holds
    /// for an operation after which a step was begun, dropped, and its encoder submitted all the same: that step may have used what the
    /// operation had freed.
    ///
    /// # Errors
    /// [`Error::NotLatest`], [`Error::TooOld`], [`Error::ForeignOperation`].
    pub fn discard(&mut self, operation: Operation) -> Result<(), Error> {
        self.classes.iter().try_for_each(|class| class.planner.check_discard(operation))?;
        self.classes.iter_mut().try_for_each(|class| class.planner.discard(operation))
    }

    /// What its ids carry, for tests that give them to an oracle.
    #[doc(hidden)]
    pub fn id(&self) -> CacheId {
        self.id
    }

    pub(super) fn host_layouts(&self) -> &HostLayouts {
        &self.kernels.layouts().host
    }

    /// A buffer that can be bound where a pass that reads and writes no unpacked tokens needs something to write.
    pub(super) fn spare(&self) -> &wgpu::Buffer {
        &self.classes[0].shared.staging
    }

    /// Every buffer of the cache, for tests that fill them with garbage and count them.
    #[doc(hidden)]
    pub fn buffers(&self) -> Vec<&wgpu::Buffer> {
        self.classes.iter().flat_map(Class::buffers).collect()
    }

    /// Makes `failures` allocations of the pool fail after the next `after`, for tests of what happens then.
    #[doc(hidden)]
    pub fn fail_allocations(&mut self, after: u64, failures: u64) {
        self.failing.0.store(after, Relaxed);
        self.failing.1.store(failures, Relaxed);
    }
}

/// The geometries of a configuration's classes on a device.
fn geometries(config: &CacheConfig, limits: &wgpu::Limits) -> Result<Vec<Geometry>, Error> {
    let (binding, buffer_size) = (limits.max_storage_buffer_binding_size, limits.max_buffer_size);
    Geometry::all(config, binding.min(buffer_size)).map_err(|error| match error {
        Error::LimitTooLow { limit: "max_storage_buffer_binding_size", available, needed, what, instead }
            if buffer_size < binding =>
        {
            Error::LimitTooLow { limit: "max_buffer_size", available, needed, what, instead }
        }
        other => other,
    })
}
