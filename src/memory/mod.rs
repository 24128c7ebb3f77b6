//! What a cache takes of a device's memory.

mod bytes;
mod sizes;

pub use bytes::{CacheBytes, cache_bytes};
#[cfg(feature = "wgpu")]
pub(crate) use sizes::{ClassSizes, PASS_BYTES};
pub(crate) use sizes::{DEFAULT_MAX_BINDING, UPLOADS, sizes};

use crate::config::CacheConfig;
use crate::error::Error;
use crate::plan::{SequenceLengths, Usage};
use crate::schedule::Budget;
use crate::shape::{CacheShape, Shape};

/// Bytes of one layer's buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct LayerMemory {
    /// Codes of packed tokens, and unquantized 16-bit blocks. What several sequences share counts once, here
    /// and below.
    pub codes: u64,
    /// Scales and minima of packed tokens.
    pub parameters: u64,
    /// Unpacked tokens in residual windows.
    pub window: u64,
    /// Unpacked sink tokens.
    pub sinks: u64,
    /// What is allocated and holds no token: free pages and blocks, free slots of rings and sinks.
    pub slack: u64,
}

impl LayerMemory {
    /// The sum.
    pub fn total(&self) -> u64 {
        self.codes + self.parameters + self.window + self.sinks + self.slack
    }
}

/// Bytes of a cache's GPU buffers, as allocated.
///
/// Not counted: 96 bytes per [`LayerBinding`](crate::LayerBinding) and per class of layers that rotates
/// something apart, and what `load` and the `submit_and_…` calls need for as long as they run.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct MemoryUsage {
    /// Each layer's own buffers.
    pub layers: Vec<LayerMemory>,
    /// Unpacked tokens of steps longer than a ring; shared by all layers of a class.
    pub staging: u64,
    /// Queries and rows that are rotated before a kernel reads them; shared by all layers of a class, and 0
    /// where none does so.
    pub rotated: u64,
    /// Partial results of attention; shared by all layers of a class.
    pub scratch: u64,
    /// The plan of the current operation, and the upload buffers of those on their way.
    pub plan: u64,
}

impl MemoryUsage {
    /// Adds a class of layers that is in use to some degree.
    pub(crate) fn add(&mut self, s: &Shape, budget: &Budget, usage: Usage) {
        let layout = &s.layout;
        let heads = u64::from(layout.kv_heads) * 4;
        let token = u64::from(s.token_words()) * 8;
        let slabs = u64::from(budget.pool.pages) * layout.page_words() * 4;
        let mut layer = LayerMemory {
            codes: usage.blocks * heads * u64::from(layout.code_words()),
            parameters: usage.blocks * heads * u64::from(layout.head_words() - layout.code_words()),
            window: usage.window_tokens * token,
            sinks: usage.sink_tokens * token,
            slack: 0,
        };
        layer.slack = slabs + s.unpacked_bytes() - layer.total();
        for &id in &s.layers {
            let id = id as usize;
            self.layers.resize(self.layers.len().max(id + 1), LayerMemory::default());
            self.layers[id] = layer;
        }
        self.staging += s.staging_bytes();
        self.rotated += s.rotated_bytes();
        self.scratch += budget.scratch_bytes;
        self.plan += (1 + UPLOADS) * budget.plan_bytes;
    }

    /// Of all layers together, by what they hold.
    pub fn all_layers(&self) -> LayerMemory {
        self.layers.iter().fold(LayerMemory::default(), |sum, layer| LayerMemory {
            codes: sum.codes + layer.codes,
            parameters: sum.parameters + layer.parameters,
            window: sum.window + layer.window,
            sinks: sum.sinks + layer.sinks,
            slack: sum.slack + layer.slack,
        })
    }

    /// The sum.
    pub fn total(&self) -> u64 {
        self.all_layers().total() + self.staging + self.rotated + self.scratch + self.plan
    }
}

impl CacheConfig {
    /// What [`KvCache::memory`](crate::KvCache::memory) will say of a cache of this configuration that holds
    /// one sequence of `tokens` tokens. If these are more than [`Self::capacity`], of one that was made for
    /// them: a pool that grows there step by step may end up with half as many pages again. It is exact for a
    /// device with WebGPU's default limits; one with larger bindings may need fewer slabs, and shorter plans.
    ///
    /// # Errors
    /// As [`CacheShape::new`]; [`Error::LimitTooLow`]; [`Error::Unsupported`] for more tokens than
    /// `max_capacity`.
    pub fn bytes_for(&self, tokens: u32) -> Result<MemoryUsage, Error> {
        let config = self.clone().with_capacity(self.capacity.max(tokens));
        let shape = CacheShape::new(&config)?;
        let classes = match sizes(&shape, &config, DEFAULT_MAX_BINDING) {
            Err(Error::LimitTooLow { .. }) => sizes(&shape, &config, u64::MAX)?,
            other => other?,
        };
        let mut memory = MemoryUsage::default();
        for (s, sizes) in shape.classes.iter().zip(&classes) {
            let lengths = SequenceLengths::of(s, tokens);
            let usage = Usage {
                blocks: (lengths.blocks - lengths.evicted).into(),
                window_tokens: lengths.window(s).into(),
                sink_tokens: lengths.sinks(s).into(),
            };
            memory.add(s, &sizes.budget, usage);
        }
        Ok(memory)
    }
}
