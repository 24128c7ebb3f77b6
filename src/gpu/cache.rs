//! The cache: a state machine, and what it has on a device.

use super::binding::LayerBinding;
use super::executor::Gpu;
use super::io::LayerIo;
use super::kernels::{Kernels, Progress, Variant, check_limits};
use super::memory::{Allowance, ClassMemory};
use super::options::KvCacheOptions;
use super::self_test;
use crate::config::CacheConfig;
use crate::error::Error;
use crate::format::PAGE_TOKENS;
use crate::ids::{CacheId, SequenceId};
use crate::lifecycle::Lifecycle;
use crate::memory::{ClassSizes, MemoryUsage, sizes};
use crate::plan::{Operation, Planner, Request};
use crate::shape::{CacheShape, Shape};
use crate::snapshot::Snapshot;
use crate::state::LayerState;
use std::sync::Arc;

/// A quantized key/value cache on a host's wgpu device. See the [crate docs](crate) for an example.
///
/// It never submits and never blocks, except where a name says so and for the self-test at construction. It
/// installs no callback on the device. Ids of sequences, operations and bindings belong to the cache that
/// gave them; another refuses them.
#[derive(Debug)]
pub struct KvCache {
    pub(super) lifecycle: Lifecycle<Gpu>,
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
    /// [`SelfTest::Words`](crate::SelfTest::Words) leaves attention out.
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
    /// As [`Self::new`], [`Error::VariantUnavailable`], and [`Error::ForeignKernels`]. The variant that the
    /// options name is never replaced.
    pub async fn with_options(
        device: &wgpu::Device,
        queue: &wgpu::Queue,
        config: &CacheConfig,
        options: &KvCacheOptions<'_>,
    ) -> Result<KvCache, Error> {
        let shape = Arc::new(CacheShape::new(config)?);
        let sizes = sizes_on(&shape, config, &device.limits())?;
        let kernels = match options.kernels {
            Some(kernels) if kernels.device() != device => return Err(Error::ForeignKernels),
            Some(kernels) => kernels.clone(),
            None => Kernels::new(device),
        };
        let pools = sizes.iter().map(|sizes| sizes.pool.clone()).collect();
        let mut allowance = Allowance(options.memory_limit);
        let mut gpu = Gpu {
            queue: queue.clone(),
            kernels: kernels.clone(),
            shape: shape.clone(),
            classes: Vec::with_capacity(sizes.len()),
            memory_limit: options.memory_limit,
        };
        for (class, (s, sizes)) in shape.classes.iter().zip(sizes).enumerate() {
            let variant = Variant::choose(options.variant, device, queue, s, &sizes.tiles).await?;
            let memory =
                ClassMemory::allocate(&kernels, shape.clone(), class, sizes, variant, &mut allowance);
            gpu.classes.push(memory.await?);
        }
        let id = CacheId::unique();
        for class in 0..gpu.classes.len() {
            self_test::try_out(&mut gpu, id, class, options).await?;
        }
        Ok(KvCache { lifecycle: Lifecycle::new(Planner::with_id(id, shape, pools), gpu), id })
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

    /// Whether a device with these limits can hold this cache, before anything is made.
    ///
    /// # Errors
    /// An invalid configuration; [`Error::LimitTooLow`].
    pub fn check(config: &CacheConfig, limits: &wgpu::Limits) -> Result<(), Error> {
        sizes_on(&CacheShape::new(config)?, config, limits).map(drop)
    }

    /// The least limits with which a device can hold this cache: WebGPU's defaults, raised where the
    /// configuration needs it.
    ///
    /// # Errors
    /// An invalid configuration.
    pub fn required_limits(config: &CacheConfig) -> Result<wgpu::Limits, Error> {
        let shape = CacheShape::new(config)?;
        let mut limits = wgpu::Limits::default();
        loop {
            match sizes(&shape, config, limits.max_storage_buffer_binding_size) {
                Err(Error::LimitTooLow { needed, available, .. })
                    if needed > available && available == limits.max_storage_buffer_binding_size =>
                {
                    limits.max_storage_buffer_binding_size = needed;
                    limits.max_buffer_size = limits.max_buffer_size.max(needed);
                }
                Err(error) => return Err(error),
                Ok(classes) => {
                    let plan = classes.iter().map(ClassSizes::longest_plan).max().unwrap_or(0);
                    limits.max_storage_buffer_binding_size = limits.max_storage_buffer_binding_size.max(plan);
                    limits.max_buffer_size = limits.max_buffer_size.max(plan);
                    return Ok(limits);
                }
            }
        }
    }

    /// Features that the library uses if the device has them; none is needed. A host that wants the faster
    /// kernels requests those of them that its adapter has.
    pub fn optional_features() -> wgpu::Features {
        Variant::ALL.iter().fold(wgpu::Features::empty(), |all, variant| all | variant.features())
    }

    /// Builds every kernel that the cache can run and that has not been built, on native from several
    /// threads. Steps build what they need by themselves; this moves the time that it takes to where a host
    /// can show how far it is.
    ///
    /// `progress` is called after each kernel.
    ///
    /// # Errors
    /// [`Error::Device`] if a kernel cannot be built.
    pub fn warm_up(&mut self, progress: impl Fn(Progress) + Sync) -> Result<(), Error> {
        let gpu = self.lifecycle.executor();
        let missing: Vec<_> = gpu.classes.iter().flat_map(|class| class.kernels.missing()).cloned().collect();
        gpu.kernels.build_all(&missing, &progress)
    }

    /// The kernels of the cache, to share with others on the device.
    pub fn kernels(&self) -> &Kernels {
        &self.lifecycle.executor().kernels
    }

    /// The attention kernels that the cache runs in the first layer and those with the same format.
    pub fn variant(&self) -> Variant {
        self.lifecycle.executor().classes[0].kernels.variant()
    }

    /// The attention kernels that the cache runs in a layer.
    ///
    /// # Errors
    /// [`Error::LayerOutOfRange`].
    pub fn variant_of(&self, layer: u32) -> Result<Variant, Error> {
        let (class, _) = self.shape().place(layer)?;
        Ok(self.lifecycle.executor().classes[class].kernels.variant())
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

    /// The sequences and their places, for tests.
    #[doc(hidden)]
    pub fn planner(&self) -> &Planner {
        self.lifecycle.planner()
    }

    /// The device that the cache lives on.
    pub fn device(&self) -> &wgpu::Device {
        self.lifecycle.executor().device()
    }

    /// Bytes of all GPU buffers of the cache, by what they hold.
    pub fn memory(&self) -> MemoryUsage {
        let mut memory = MemoryUsage::default();
        let classes = &self.lifecycle.executor().classes;
        for (number, class) in classes.iter().enumerate() {
            let mut budget = class.sizes.budget;
            budget.pool = self.planner().pool_size(number);
            memory.add(class.shape(), &budget, self.planner().usage(number));
        }
        // They do not shrink with the pool, and there are more uploads while many steps are on their way.
        memory.scratch = classes.iter().map(|class| class.shared.scratch.size()).sum();
        memory.plan = classes.iter().map(|class| class.shared.plan.size() + class.uploads.bytes()).sum();
        memory
    }

    /// Sets the bytes that the cache's GPU buffers may take; `None`: as many as the device has. What is
    /// allocated stays.
    pub fn set_memory_limit(&mut self, bytes: Option<u64>) {
        self.lifecycle.executor_mut().memory_limit = bytes;
    }

    /// Makes room for `tokens` packed tokens besides those that the cache holds, and for a page of each
    /// sequence that is not full, so that no step up to there allocates.
    ///
    /// # Errors
    /// [`Error::CapacityExceeded`] if `max_capacity` forbids it, [`Error::OutOfMemory`],
    /// [`Error::LimitTooLow`]. A class of layers that has grown before another fails stays so.
    pub fn reserve(&mut self, tokens: u32) -> Result<(), Error> {
        for class in 0..self.shape().classes.len() {
            let s = &self.shape().classes[class];
            let mut pages = tokens.div_ceil(PAGE_TOKENS) + s.max_sequences;
            if s.history_limit.is_some() {
                // However many tokens there are, most of them will be gone.
                pages = pages.min(self.planner().available_pages(class));
            }
            self.lifecycle.reserve(class, pages)?;
        }
        Ok(())
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

    /// Checks and binds a layer's tensors. Do this once per set of buffers, not per step.
    ///
    /// # Errors
    /// What is wrong with a buffer: [`Error::BufferUsage`], [`Error::BufferTooSmall`], [`Error::Stride`],
    /// [`Error::Overlap`], [`Error::BindingIncomplete`].
    pub fn bind(&self, io: &LayerIo<'_>) -> Result<LayerBinding, Error> {
        LayerBinding::new(self.lifecycle.executor(), self.id, io)
    }

    /// Undoes the latest operation, of which no command buffer may be submitted any more; up to `max_undo` of
    /// them, newest first.
    ///
    /// To discard an operation whose encoder was submitted is the caller's error: tokens of the window may
    /// have been overwritten. The same holds for an operation after which a step was begun, dropped, and its
    /// encoder submitted all the same: that step may have used what the operation had freed.
    ///
    /// # Errors
    /// [`Error::NotLatest`], [`Error::TooOld`], [`Error::ForeignOperation`].
    pub fn discard(&mut self, operation: Operation) -> Result<(), Error> {
        self.lifecycle.discard(operation)
    }

    /// Removes a sequence; what no other sequence shares is free from the next operation on.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::ForeignSequence`].
    pub fn remove_sequence(&mut self, sequence: SequenceId) -> Result<Operation, Error> {
        self.lifecycle.remove_sequence(sequence)
    }

    /// Cuts a sequence to its first `tokens` tokens.
    ///
    /// Packed blocks that remain whole are not touched. Of a block that is cut, the tokens that remain return
    /// to the window, dequantized, and are packed again when they are old enough. Going back over tokens of
    /// the last step, up to `residual_window` of them, cuts no block; then, as soon as the length is again
    /// the largest it has been, the state is as if the tokens cut had never been. What the GPU must do is
    /// recorded into `encoder`.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::ForeignSequence`]; [`Error::TruncateBeyondEnd`] if the sequence
    /// is shorter; [`Error::TruncateIntoEvicted`] where tokens are gone; [`Error::OutOfMemory`] for the
    /// upload. Nothing has changed then.
    pub fn truncate(
        &mut self,
        encoder: &mut wgpu::CommandEncoder,
        sequence: SequenceId,
        tokens: u32,
    ) -> Result<Operation, Error> {
        Ok(self.lifecycle.operate(encoder, Request::Truncate(sequence, tokens))?.1)
    }

    /// Adds a sequence with the content of another.
    ///
    /// They share every full page of packed tokens; sinks, window and a partly filled last page are copied,
    /// by work that is recorded into `encoder`. What is appended to one is never seen by the other.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::ForeignSequence`], [`Error::TooManySequences`];
    /// [`Error::CapacityExceeded`] or [`Error::OutOfMemory`] for the copied page or the upload. Nothing has
    /// changed then.
    pub fn fork(
        &mut self,
        encoder: &mut wgpu::CommandEncoder,
        sequence: SequenceId,
    ) -> Result<(SequenceId, Operation), Error> {
        self.lifecycle.fork(encoder, sequence)
    }

    /// Gives each of `sequences` the content that `sequences[parents[i]]` had: one step of a beam search.
    ///
    /// A sequence that is a parent once costs nothing, each further use of it as much as [`Self::fork`]. What
    /// is nobody's parent is dropped.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::ForeignSequence`], [`Error::DuplicateSequence`];
    /// [`Error::Parents`] unless there is one index per sequence; [`Error::CapacityExceeded`] or
    /// [`Error::OutOfMemory`] for copies. Nothing has changed then.
    pub fn reorder(
        &mut self,
        encoder: &mut wgpu::CommandEncoder,
        sequences: &[SequenceId],
        parents: &[usize],
    ) -> Result<Operation, Error> {
        Ok(self.lifecycle.operate(encoder, Request::Reorder(sequences, parents))?.1)
    }

    /// Gives the memory of every slab that holds no token back to the device. The pool grows again when it
    /// must.
    ///
    /// Older operations that could be undone only with pages of those slabs no longer can be
    /// ([`Error::TooOld`]); discarding the shrink itself brings no slab back, and nothing needs one.
    pub fn shrink_to_fit(&mut self) -> Operation {
        self.lifecycle.shrink_to_fit()
    }

    /// Adds a sequence with the content of a snapshot, by copies that are recorded into `encoder`. Upload
    /// buffers with all of the content exist until it has been executed.
    ///
    /// # Errors
    /// [`Error::SnapshotMismatch`] if it was saved with another configuration; [`Error::TooManySequences`],
    /// [`Error::CapacityExceeded`], [`Error::OutOfMemory`]. Nothing has changed then.
    pub fn load(
        &mut self,
        encoder: &mut wgpu::CommandEncoder,
        snapshot: &Snapshot,
    ) -> Result<(SequenceId, Operation), Error> {
        self.lifecycle.load(encoder, snapshot)
    }

    /// What every layer holds of a sequence. Submits copies and waits for them; work submitted before is
    /// seen.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::ForeignSequence`]; [`Error::OutOfMemory`] for the buffer that is
    /// read back; [`Error::Device`] if the device is lost.
    pub async fn submit_and_save(&self, sequence: SequenceId) -> Result<Snapshot, Error> {
        self.lifecycle.save(sequence).await
    }

    /// As [`Self::submit_and_save`], blocking.
    ///
    /// # Errors
    /// As [`Self::submit_and_save`].
    #[cfg(not(target_arch = "wasm32"))]
    pub fn submit_and_save_blocking(&self, sequence: SequenceId) -> Result<Snapshot, Error> {
        pollster::block_on(self.submit_and_save(sequence))
    }

    /// What layer `layer` holds of a sequence. Submits a copy and waits for it; work submitted before is
    /// seen.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::ForeignSequence`], [`Error::LayerOutOfRange`], [`Error::Device`]
    /// if the device is lost.
    pub async fn submit_and_read_state(&self, layer: u32, sequence: SequenceId) -> Result<LayerState, Error> {
        self.lifecycle.state(layer, sequence).await
    }

    /// As [`Self::submit_and_read_state`], blocking.
    ///
    /// # Errors
    /// As [`Self::submit_and_read_state`].
    #[cfg(not(target_arch = "wasm32"))]
    pub fn submit_and_read_state_blocking(
        &self,
        layer: u32,
        sequence: SequenceId,
    ) -> Result<LayerState, Error> {
        pollster::block_on(self.submit_and_read_state(layer, sequence))
    }

    /// What its ids carry, for tests that give them to an oracle.
    #[doc(hidden)]
    pub fn id(&self) -> CacheId {
        self.id
    }

    /// Every buffer of the cache, for tests that fill them with garbage and count them.
    #[doc(hidden)]
    pub fn buffers(&self) -> Vec<&wgpu::Buffer> {
        self.lifecycle.executor().buffers().collect()
    }
}

/// The sizes of a configuration's classes on a device.
fn sizes_on(
    shape: &CacheShape,
    config: &CacheConfig,
    limits: &wgpu::Limits,
) -> Result<Vec<ClassSizes>, Error> {
    let (binding, buffer_size) = (limits.max_storage_buffer_binding_size, limits.max_buffer_size);
    let sizes = sizes(shape, config, binding.min(buffer_size)).map_err(|error| match error {
        Error::LimitTooLow { limit: "max_storage_buffer_binding_size", available, needed, what, instead }
            if buffer_size < binding =>
        {
            Error::LimitTooLow { limit: "max_buffer_size", available, needed, what, instead }
        }
        other => other,
    })?;
    for (s, sizes) in shape.classes.iter().zip(&sizes) {
        check_limits(s, &sizes.tiles, sizes.longest_plan(), limits)?;
    }
    Ok(sizes)
}
