//! What a cache takes of a device's memory.

use crate::config::CacheConfig;
use crate::error::Error;
use crate::geometry::{DEFAULT_MAX_BINDING, Geometry};
use crate::plan::{SequenceLengths, Usage};

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
/// Not counted: 96 bytes per [`LayerBinding`](crate::LayerBinding) and per class of layers that rotates something apart, and what `load` and the `submit_and_…` calls need for as long as they run.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MemoryUsage {
    /// Each layer's own buffers.
    pub layers: Vec<LayerMemory>,
    /// Unpacked tokens of steps longer than a ring; shared by all layers of a class.
    pub staging: u64,
    /// Queries and rows that are rotated before a kernel reads them; shared by all layers of a class, and 0 where none does so.
    pub rotated: u64,
    /// Partial results of attention; shared by all layers of a class.
    pub scratch: u64,
    /// The plan of the current operation, and the upload buffers of those on their way.
    pub plan: u64,
}

impl MemoryUsage {
    /// Of a cache of classes of layers, each in use to some degree.
    pub(crate) fn new<'a>(classes: impl IntoIterator<Item = (&'a Geometry, Usage)>) -> MemoryUsage {
        let mut memory = MemoryUsage::default();
        for (g, usage) in classes {
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
            for &id in &g.layer_ids {
                let id = id as usize;
                memory.layers.resize(memory.layers.len().max(id + 1), LayerMemory::default());
                memory.layers[id] = layer;
            }
            memory.staging += g.staging_bytes();
            memory.rotated += g.rotated_bytes();
            memory.scratch += g.scratch_bytes();
            memory.plan += g.plan_bytes() + g.upload_bytes();
        }
        memory
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
    /// What [`KvCache::memory`](crate::KvCache::memory) will say of a cache of this configuration that holds one sequence of `tokens` tokens. If these are more than
    /// [`Self::capacity`], of one that was made for them: a pool that grows there step by step may end up with half as many pages again. It is exact for a device
    /// with WebGPU's default limits; one with larger bindings may need fewer slabs, and shorter plans.
    ///
    /// # Errors
    /// As [`Geometry::new`]; [`Error::Unsupported`] for more tokens than `max_capacity`.
    pub fn bytes_for(&self, tokens: u32) -> Result<MemoryUsage, Error> {
        let config = self.clone().with_capacity(self.capacity.max(tokens));
        let classes = match Geometry::all(&config, DEFAULT_MAX_BINDING) {
            Err(Error::LimitTooLow { .. }) => Geometry::all(&config, u64::MAX)?,
            other => other?,
        };
        let usage = |g: &Geometry| {
            let lengths = SequenceLengths::of(g, tokens);
            Usage {
                blocks: (lengths.blocks - lengths.evicted).into(),
                window_tokens: lengths.window(g).into(),
                sink_tokens: lengths.sinks(g).into(),
            }
        };
        Ok(MemoryUsage::new(classes.iter().map(|g| (g, usage(g)))))
    }
}
