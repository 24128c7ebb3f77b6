//! A transformer's key/value cache in 2 to 8 bits on any GPU that [wgpu](https://wgpu.rs) reaches, with
//! attention computed straight from the packed form.
//!
//! The method is KIVI (Liu et al., 2024): keys are quantized **per channel** over groups of tokens, values
//! **per token** over groups of channels, and the newest tokens stay in 16 bits in a **residual window**.
//! Nothing is trained; an inference engine brings its own device, its own buffers of queries, keys and
//! values, and its own command encoder.
//!
//! ```
//! use kivi_wgpu::{Bits, CacheConfig, Dtype, KvCache, LayerIo, SequenceStep, TensorView, wgpu};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle_from_env());
//! # let adapter = pollster::block_on(instance.request_adapter(&Default::default()))?;
//! # let (device, queue) = pollster::block_on(adapter.request_device(&Default::default()))?;
//! # let tensor = |heads: u64| device.create_buffer(&wgpu::BufferDescriptor {
//! #     label: None, size: heads * 128 * 4, usage: wgpu::BufferUsages::STORAGE, mapped_at_creation: false
//! });
//! # let (k, v, q, out) = (tensor(8), tensor(8), tensor(32), tensor(32));
//! // A model of 2 layers, 32 query heads, 8 KV heads, head_dim 128.
//! let config = CacheConfig::new(2, 32, 8, 128).with_bits(Bits::Two, Bits::Two).with_capacity(4096);
//! let mut cache = KvCache::new_blocking(&device, &queue, &config)?;
//! let sequence = cache.create_sequence()?;
//!
//! // The host's own buffers, `[token][head][head_dim]`: checked and bound once.
//! let view = |buffer| TensorView::new(buffer, Dtype::F32);
//! let io = cache.bind(&LayerIo::new(view(&k), view(&v), view(&q), view(&out)))?;
//!
//! // One token: one encoder, one step through all layers.
//! let mut encoder = device.create_command_encoder(&Default::default());
//! let mut step = cache.begin_step(&mut encoder, &[SequenceStep::decode(sequence)])?;
//! for layer in 0..2 {
//!     // ... the host's kernels write k, v and q of this layer ...
//!     step.layer(&mut encoder, layer, &io)?; // append, attend, pack
//!     // ... the host's kernels go on from out ...
//! }
//! step.finish()?;
//! queue.submit([encoder.finish()]);
//! assert_eq!(cache.tokens(sequence)?, 1);
//! # Ok(())
//! # }
//! ```
//!
//! # What is where
//!
//! - [`CacheConfig`]: what a user chooses; [`Preset`], [`LayerFormat`] and [`TensorFormat`]: how keys and
//!   values are packed, of all layers or of each. [`Shape`]: every size that follows.
//! - [`Snapshot`]: a sequence outside any cache, and its file.
//! - [`KvCache`], [`Step`], [`LayerIo`]: the cache on a GPU (feature `wgpu`, on by default). [`Variant`]:
//!   which attention kernels it runs.
//! - [`mod@format`]: the block format and the bit-exact quantizer. [`cache_bytes`]: the memory calculator.
//! - [`oracle`]: the same cache on the CPU, readable rather than fast.
//!
//! # Features
//!
//! - `wgpu` (default): the GPU executor. `wgpu` 30 is re-exported as [`wgpu`].
//! - `backends` (default): wgpu's Vulkan, Metal, DX12 and WebGPU backends. A host that chooses its own turns
//!   this off.

#![deny(missing_docs)]
#![forbid(unsafe_code)]

mod config;
mod error;
pub mod format;
#[cfg(feature = "wgpu")]
mod gpu;
mod ids;
mod lifecycle;
mod memory;
pub mod oracle;
mod plan;
mod preset;
mod schedule;
mod shape;
mod snapshot;
mod state;

pub use config::{CacheConfig, LayerAttention, LayerFormat};
pub use error::Error;
pub use format::{Axis, Bits, Dtype, TensorFormat, ZeroPoint};
pub use ids::{CacheId, SequenceId};
pub use memory::{CacheBytes, LayerMemory, MemoryUsage, cache_bytes};
pub use plan::{Operation, SequenceLengths, SequenceStep};
pub use preset::Preset;
pub use shape::{CacheShape, Shape};
pub use snapshot::{SNAPSHOT_VERSION, Snapshot};
pub use state::{LayerState, UnpackedTokens};

#[cfg(feature = "wgpu")]
pub use gpu::{
    Kernels, KvCache, KvCacheOptions, LayerBinding, LayerIo, Progress, SelfTest, Step, Target, TensorView,
    Variant,
};

#[cfg(feature = "wgpu")]
pub use wgpu;

/// What the tests and tools of this repository reach into. It is no part of the API and changes without
/// notice.
#[doc(hidden)]
pub mod internals {
    #[cfg(feature = "wgpu")]
    pub use crate::gpu::internals as gpu;
    pub use crate::oracle::block_of;
    pub mod lifecycle {
        pub use crate::lifecycle::*;
    }
    pub mod plan {
        pub use crate::plan::*;
    }
    pub mod schedule {
        pub use crate::schedule::*;
    }
}

/// The README's snippet is compiled as a doctest.
#[cfg(all(doctest, feature = "wgpu"))]
#[doc = include_str!("../README.md")]
mod readme {}
