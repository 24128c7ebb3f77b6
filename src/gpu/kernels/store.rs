//! The kernels that a device has built, shared by all caches on it.

use super::{Kernel, Layouts};
use crate::error::Error;
use crate::gpu::device::now_or_never;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// The compiled kernels of a device, which several caches may share: each kernel is built once, when a cache
/// first needs it. A clone is the same store.
///
/// A cache that is given none has one of its own. Building all kernels of a configuration takes seconds on
/// some drivers, so hosts with several caches, or one cache after the other, keep one:
///
/// ```no_run
/// # use kivi_wgpu::{CacheConfig, Error, Kernels, KvCache, KvCacheOptions, wgpu};
/// # fn run(device: &wgpu::Device, queue: &wgpu::Queue, small: &CacheConfig, large: &CacheConfig) ->
/// Result<(), Error> { let kernels = Kernels::new(device); let options =
/// KvCacheOptions::default().with_kernels(&kernels); let one = KvCache::with_options_blocking(device, queue,
/// small, &options)?; let other = KvCache::with_options_blocking(device, queue, large, &options)?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Kernels(Arc<Store>);

#[derive(Debug)]
struct Store {
    device: wgpu::Device,
    pipeline_cache: Option<wgpu::PipelineCache>,
    layouts: Layouts,
    /// By text.
    built: Mutex<HashMap<String, Arc<Entry>>>,
}

/// A kernel that is built or about to be: who comes second waits for the first.
#[derive(Debug, Default)]
struct Entry(Mutex<Option<wgpu::ComputePipeline>>);

/// How far kernels have been built.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Progress {
    /// Kernels that are ready.
    pub ready: usize,
    /// Kernels in all.
    pub all: usize,
}

impl Kernels {
    /// Of a device; nothing is built yet. Caches on other devices refuse it, as far as wgpu can tell them
    /// apart: it takes devices of two instances for equal, and panics when they are mixed.
    pub fn new(device: &wgpu::Device) -> Kernels {
        Kernels::of(device, None)
    }

    /// Of a device, compiled through the host's `cache`.
    pub fn with_pipeline_cache(device: &wgpu::Device, cache: &wgpu::PipelineCache) -> Kernels {
        Kernels::of(device, Some(cache.clone()))
    }

    fn of(device: &wgpu::Device, pipeline_cache: Option<wgpu::PipelineCache>) -> Kernels {
        let (layouts, built) = (Layouts::new(device), Mutex::default());
        Kernels(Arc::new(Store { device: device.clone(), pipeline_cache, layouts, built }))
    }

    /// Kernels that have been built.
    pub fn count(&self) -> usize {
        // A panic elsewhere leaves the map as it is.
        self.0.built.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// The device that they are for.
    pub fn device(&self) -> &wgpu::Device {
        &self.0.device
    }

    pub(crate) fn layouts(&self) -> &Layouts {
        &self.0.layouts
    }

    /// The kernel, which is built if it has not been.
    pub(crate) fn get(&self, kernel: &Kernel) -> Result<wgpu::ComputePipeline, Error> {
        self.get_text(kernel, kernel.source().target_text())
    }

    /// The same with another text, for tests of what happens where a kernel is wrong.
    pub(super) fn get_text(&self, kernel: &Kernel, text: String) -> Result<wgpu::ComputePipeline, Error> {
        let entry = {
            let mut built = self.0.built.lock().unwrap_or_else(PoisonError::into_inner);
            match built.get(&text) {
                Some(entry) => entry.clone(),
                None => built.entry(text.clone()).or_default().clone(),
            }
        };
        let mut pipeline = entry.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pipeline) = &*pipeline {
            return Ok(pipeline.clone());
        }
        let new = self.build(kernel, text)?;
        log::debug!("built {}", kernel.entry_point);
        Ok(pipeline.insert(new).clone())
    }

    /// Builds all of these kernels, on native from several threads; calls `progress` from one of them after
    /// each.
    pub(crate) fn build_all(
        &self,
        kernels: &[Kernel],
        progress: &(dyn Fn(Progress) + Sync),
    ) -> Result<(), Error> {
        let all = kernels.len();
        let ready = Mutex::new(0);
        let build = |kernel: &Kernel| {
            self.get(kernel)?;
            let mut ready = ready.lock().unwrap_or_else(PoisonError::into_inner);
            *ready += 1;
            progress(Progress { ready: *ready, all });
            Ok(())
        };
        if cfg!(target_arch = "wasm32") {
            return kernels.iter().try_for_each(build);
        }
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get()).min(all.max(1));
        let next = Mutex::new(kernels.iter());
        let work = || {
            let take = || next.lock().unwrap_or_else(PoisonError::into_inner).next();
            std::iter::from_fn(take).try_for_each(build)
        };
        std::thread::scope(|scope| {
            let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
            let results = workers.into_iter().map(|worker| {
                worker.join().unwrap_or_else(|_| Err(Error::Device("a callback of progress panicked".into())))
            });
            // All of them, so that none is left behind.
            results.fold(Ok(()), Result::and)
        })
    }

    fn build(&self, kernel: &Kernel, text: String) -> Result<wgpu::ComputePipeline, Error> {
        let device = &self.0.device;
        let scopes =
            [wgpu::ErrorFilter::Internal, wgpu::ErrorFilter::OutOfMemory, wgpu::ErrorFilter::Validation]
                .map(|filter| device.push_error_scope(filter));
        let module = device.create_shader_module(wgpu::ShaderModuleDescriptor {
            label: Some(kernel.entry_point),
            source: wgpu::ShaderSource::Wgsl(text.into()),
        });
        let pipeline = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: Some(kernel.entry_point),
            layout: Some(self.0.layouts.pipeline(kernel.bindings)),
            module: &module,
            entry_point: Some(kernel.entry_point),
            compilation_options: wgpu::PipelineCompilationOptions {
                // Every word of workgroup memory is written before it is read; zeroing is a serial loop on
                // Metal and DX12.
                zero_initialize_workgroup_memory: false,
                ..Default::default()
            },
            cache: self.0.pipeline_cache.as_ref(),
        });
        // The last scope pushed is the first to be popped.
        let errors = scopes.into_iter().rev().filter_map(|scope| now_or_never(scope.pop()).flatten());
        if let Some(error) = errors.last() {
            return Err(Error::Device(format!("{}: {error}", kernel.entry_point)));
        }
        Ok(pipeline)
    }
}
