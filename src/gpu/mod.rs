//! The cache on a GPU: carries out step plans with wgpu.

mod binding;
mod buffers;
mod cache;
mod catalog;
mod class;
mod growth;
mod io;
mod lane_order;
mod layers;
mod operations;
mod pipelines;
mod read;
mod self_test;
mod shaders;
mod shapes;
mod snapshot;
mod step;
mod upload;
mod variant;
mod work;

pub use binding::LayerBinding;
pub use cache::{KvCache, KvCacheOptions};
pub use catalog::{CatalogEntry, catalog};
pub use io::{IoParams, LayerIo, TensorView, ViewParams};
pub use self_test::SelfTest;
pub use shaders::{Pass, ShaderSource};
pub use step::{Step, Target};
pub use variant::Variant;
pub use work::PassParams;
