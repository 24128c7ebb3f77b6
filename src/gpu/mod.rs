//! The cache on a GPU: carries out plans with wgpu.
//!
//! Rooms, from the ground up: `params` and `device` know buffers, `kernels` what runs, `memory` what a format
//! class has on a device, `work` and the executor how a plan is recorded; the cache, its steps and its
//! bindings are on top.

mod binding;
mod cache;
mod device;
mod executor;
mod io;
mod kernels;
mod memory;
mod options;
mod params;
mod self_test;
mod step;
mod work;

pub use binding::LayerBinding;
pub use cache::KvCache;
pub use io::{LayerIo, TensorView};
pub use kernels::{Kernels, Progress, Variant};
pub use options::{KvCacheOptions, SelfTest};
pub use step::{Step, Target};

/// For tests and tools of this repository.
pub mod internals {
    pub use super::kernels::{CatalogEntry, Pass, Reads, ShaderSource, catalog};
    pub use super::params::{IoParams, PassParams, ViewParams};
}
