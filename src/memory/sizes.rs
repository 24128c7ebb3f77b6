//! The sizes of a cache on a device that has WebGPU's kind of limits.

// Without a GPU, only the sum of all bytes is asked for.
#![cfg_attr(not(feature = "wgpu"), allow(dead_code))]

use crate::config::CacheConfig;
use crate::error::Error;
use crate::plan::{PoolLimits, PoolSize};
use crate::schedule::{Bounds, Budget, TileLimits, Tiles};
use crate::shape::{CacheShape, Shape};

/// The binding size that WebGPU guarantees.
pub(crate) const DEFAULT_MAX_BINDING: u64 = 128 << 20;

/// Largest buffer whose bytes shaders can index on every backend.
const MAX_SHADER_BYTES: u64 = i32::MAX as u64 & !15;

/// Bytes of a pass's parameters in a plan buffer: the largest uniform offset alignment that WebGPU allows a
/// device.
pub(crate) const PASS_BYTES: u32 = 256;

/// Upload buffers that a class of a cache always has.
pub(crate) const UPLOADS: u64 = 3;

/// The sizes of a class of layers.
#[derive(Debug, Clone)]
pub(crate) struct ClassSizes {
    pub(crate) tiles: Tiles,
    pub(crate) pool: PoolLimits,
    /// What steps need while the pool is as it begins.
    pub(crate) budget: Budget,
    /// The largest binding, in bytes.
    max_binding: u64,
    /// Bytes of the longest plan at the size that the configuration promises.
    pub(crate) promised_plan_bytes: u64,
}

/// Of each class of a cache.
///
/// # Errors
/// [`Error::LimitTooLow`].
pub(crate) fn sizes(
    shape: &CacheShape,
    config: &CacheConfig,
    max_binding: u64,
) -> Result<Vec<ClassSizes>, Error> {
    shape.classes.iter().map(|s| ClassSizes::new(s, config, max_binding)).collect()
}

impl ClassSizes {
    fn new(s: &Shape, config: &CacheConfig, max_binding: u64) -> Result<ClassSizes, Error> {
        let max_binding = max_binding.min(MAX_SHADER_BYTES);
        let pool = PoolLimits::new(s, config, max_binding)?;
        for (what, bytes) in [
            ("the sink slots and rings of one layer", s.unpacked_bytes()),
            ("the staging buffer", s.staging_bytes()),
            ("rotated queries and keys", s.rotated_bytes()),
        ] {
            if bytes > max_binding {
                return Err(Error::LimitTooLow {
                    limit: "max_storage_buffer_binding_size",
                    available: max_binding,
                    needed: bytes,
                    what,
                    instead: "lower max_sequences, max_step, max_batch_tokens, sink_tokens or residual_window",
                });
            }
        }
        let tiles = Tiles::new(s, &TileLimits::WGSL);
        let budget = |pool| Bounds { shape: s, tiles: &tiles, pool }.budget(max_binding, PASS_BYTES);
        // What cannot work when the pool is as large as it may get is refused now.
        let promised_plan_bytes = match config.max_capacity {
            Some(_) => budget(pool.largest())?.plan_bytes,
            None => 0,
        };
        let budget = budget(pool.size())?;
        Ok(ClassSizes { tiles, pool, budget, max_binding, promised_plan_bytes })
    }

    /// What steps need when the pool is so large. Plans are made for a power of two of shared pages, so that
    /// not every fork asks again, and no fewer than before.
    ///
    /// # Errors
    /// [`Error::LimitTooLow`].
    pub(crate) fn budget_for(&self, s: &Shape, pool: PoolSize) -> Result<Budget, Error> {
        let known = self.budget.pool.shared;
        let shared = if pool.shared > known { pool.shared.next_power_of_two() } else { known };
        let pool = PoolSize { shared, ..pool };
        Bounds { shape: s, tiles: &self.tiles, pool }.budget(self.max_binding, PASS_BYTES)
    }

    /// The same with a pool of one page.
    ///
    /// # Errors
    /// [`Error::LimitTooLow`].
    pub(crate) fn smallest(&self, s: &Shape) -> Result<ClassSizes, Error> {
        let pool = PoolLimits { pages: 1, ..self.pool.clone() };
        let budget = self.budget_for(s, pool.size())?;
        Ok(ClassSizes { pool, budget, ..self.clone() })
    }

    /// Bytes of the longest plan that is known to be needed.
    pub(crate) fn longest_plan(&self) -> u64 {
        self.budget.plan_bytes.max(self.promised_plan_bytes)
    }
}
