//! The cache on a GPU: carries out step plans with wgpu.

mod binding;
mod buffers;
mod cache;
mod class;
mod growth;
mod io;
mod kernels;
mod layers;
mod operations;
mod read;
mod self_test;
mod snapshot;
mod step;
mod upload;
mod work;

pub use binding::LayerBinding;
pub use cache::{KvCache, KvCacheOptions};
pub use io::{IoParams, LayerIo, TensorView, ViewParams};
pub use kernels::{CatalogEntry, Kernels, Pass, Progress, ShaderSource, Variant, catalog};
pub use self_test::SelfTest;
pub use step::{Step, Target};
pub use work::PassParams;
