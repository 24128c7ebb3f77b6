//! What a cache takes of a device's memory.

use crate::config::CacheConfig;
use crate::error::Error;
use crate::geometry::{DEFAULT_MAX_BINDING, Geometry};
use crate::plan::Usage;

/// Bytes of one layer's buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LayerMemory {
    /// Codes of packed tokens, and unquantized 16-bit blocks. What several sequences share counts once, here and below.
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
/// Not counted: 96 bytes per [`LayerBinding`](crate::LayerBinding), and what `load` and the `submit_and_…` calls need for as long as they run.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MemoryUsage {
    /// Each layer's own buffers.
    pub layers: Vec<LayerMemory>,
    /// Unpacked tokens of steps longer than a ring; shared by all layers.
    pub staging: u64,
    /// Partial results of attention; shared by all layers.
    pub scratch: u64,
    /// The plan of the current operation, and the upload buffers of those on their way.
    pub plan: u64,
}

impl MemoryUsage {
    /// Of a cache of this geometry that is in use to this degree.
    pub(crate) fn new(g: &Geometry, usage: Usage) -> MemoryUsage {
        let layout = &g.layout;
        let heads = u64::from(layout.kv_heads) * 4;
        let token = u64::from(g.token_words()) * 8;
        let slabs: u64 = (0..g.slabs()).map(|slab| g.slab_bytes(slab)).sum();
        let mut layer = LayerMemory {
            codes: usage.blocks * heads * u64::from(layout.code_words()),
            parameters: usage.blocks * heads * u64::from(layout.head_words() - layout.code_words()),
            window: usage.window_tokens * token,
            sinks: usage.sink_tokens * token,
            slack: 0,
        };
        layer.slack = slabs + g.unpacked_bytes() - layer.total();
        MemoryUsage {
            layers: vec![layer; g.layers as usize],
            staging: g.staging_bytes(),
            scratch: g.scratch_bytes(),
            plan: g.plan_bytes() + g.upload_bytes(),
        }
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
        self.all_layers().total() + self.staging + self.scratch + self.plan
    }
}

impl CacheConfig {
    /// What [`KvCache::memory`](crate::KvCache::memory) will say of a cache of this configuration that holds one sequence of `tokens` tokens. If these are more than
    /// [`Self::capacity`], of one that was made for them: a pool that grows there step by step may end up with half as many pages again. It is exact for a device
    /// with WebGPU's default limits; one with larger bindings may need fewer slabs, and shorter plans.
    ///
    /// # Errors
    /// As [`Geometry::new`]; [`Error::Unsupported`] for more tokens than `max_capacity`.
    pub fn bytes_for(&self, tokens: u32) -> Result<MemoryUsage, Error> {
        let config = self.clone().with_capacity(self.capacity.max(tokens));
        let g = match Geometry::new(&config, DEFAULT_MAX_BINDING) {
            Err(Error::LimitTooLow { .. }) => Geometry::new(&config, u64::MAX)?,
            other => other?,
        };
        let after_sinks = tokens.saturating_sub(g.sinks);
        let blocks = after_sinks.saturating_sub(g.window) / g.layout.group;
        let usage = Usage {
            blocks: blocks.into(),
            window_tokens: (after_sinks - blocks * g.layout.group).into(),
            sink_tokens: tokens.min(g.sinks).into(),
        };
        Ok(MemoryUsage::new(&g, usage))
    }
}
