//! The memory calculator.

use super::LayerMemory;
use crate::config::CacheConfig;
use crate::error::Error;
use crate::format::BlockLayout;
use crate::shape::CacheShape;

/// Memory of a cache that holds `tokens` tokens of one sequence, in bytes for all layers.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct CacheBytes {
    /// Tokens in the cache.
    pub tokens: u64,
    /// The same tokens in 16 bits per element.
    pub sixteen_bit: u64,
    /// Codes only, as if every token were packed: the figure often quoted, which leaves out parameters,
    /// window and padding.
    pub codes_only: u64,
    /// Packed blocks: codes, parameters and padding.
    pub packed: u64,
    /// Unpacked tokens: sinks and residual window.
    pub unpacked: u64,
    /// What is allocated but holds no token: the rest of the last page, free ring slots, staging, attention
    /// scratch, the plan.
    pub slack: u64,
    /// Codes, parameters and padding per packed element, in bits; the mean of all layers.
    pub format_bits: f64,
}

impl CacheBytes {
    /// What the tokens occupy: packed blocks and unpacked tokens.
    pub fn content(&self) -> u64 {
        self.packed + self.unpacked
    }

    /// All bytes of cache buffers that a GPU cache with exactly this capacity allocates.
    pub fn allocated(&self) -> u64 {
        self.content() + self.slack
    }

    /// Allocated bits per cached element.
    pub fn resident_bits(&self) -> f64 {
        16.0 * self.allocated() as f64 / self.sixteen_bit as f64
    }

    /// How many times smaller than 16 bits per element, everything counted.
    pub fn ratio(&self) -> f64 {
        self.sixteen_bit as f64 / self.allocated() as f64
    }
}

/// What `tokens` tokens of one sequence cost under `config` (its capacity is replaced by `tokens`).
///
/// # Errors
/// As [`CacheConfig::bytes_for`].
pub fn cache_bytes(config: &CacheConfig, tokens: u32) -> Result<CacheBytes, Error> {
    let config = CacheConfig { max_capacity: None, ..config.clone() };
    let config = config.with_capacity(tokens).with_max_sequences(1);
    let shape = CacheShape::new(&config)?;
    let memory = config.bytes_for(tokens)?;
    let LayerMemory { codes, parameters, window, sinks, .. } = memory.all_layers();
    let elements_per_layer = 2 * u64::from(config.kv_heads) * u64::from(config.head_dim) * u64::from(tokens);
    let elements = elements_per_layer * u64::from(config.layers);
    let (packed, unpacked) = (codes + parameters, window + sinks);
    // Means over the layers.
    let mean = |bits: fn(&BlockLayout) -> f64| {
        let sum: f64 = shape.classes.iter().map(|s| s.layers.len() as f64 * bits(&s.layout)).sum();
        sum / f64::from(config.layers)
    };
    Ok(CacheBytes {
        tokens: u64::from(tokens),
        sixteen_bit: 2 * elements,
        codes_only: (elements as f64 * mean(BlockLayout::code_bits) / 8.0) as u64,
        packed,
        unpacked,
        slack: memory.total() - packed - unpacked,
        format_bits: mean(BlockLayout::format_bits),
    })
}
