//! New tokens enter the cache.

use super::{Tensor, Unpacked, put};
use crate::geometry::Geometry;
use crate::plan::StepPlan;

/// Writes every new token of `input` (`[token][kv head][head_dim]`), sanitized and rounded once, to its slot.
pub fn append(
    g: &Geometry,
    plan: &StepPlan,
    tensor: Tensor,
    input: &[f32],
    ring: &mut Unpacked,
    staging: &mut Unpacked,
) {
    let head_dim = g.layout.head_dim as usize;
    let heads = g.layout.kv_heads as usize;
    for write in &plan.writes {
        let buffer = if write.slot.is_staging() { &mut *staging } else { &mut *ring };
        for head in 0..heads {
            let first = (write.row as usize * heads + head) * head_dim;
            let row = buffer.row(g, tensor, write.slot.index(), head as u32);
            for (channel, &x) in input[first..first + head_dim].iter().enumerate() {
                put(g.window_format, &mut buffer.words[row..], channel, x);
            }
        }
    }
}
