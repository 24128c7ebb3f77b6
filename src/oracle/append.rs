//! New tokens enter the cache.

use super::{Tensor, Unpacked, put};
use crate::plan::Plan;
use crate::shape::Shape;

/// Writes every new token of `input` (`[token][kv head][head_dim]`), sanitized and rounded once, to its slot.
pub fn append(
    s: &Shape,
    plan: &Plan,
    tensor: Tensor,
    input: &[f32],
    ring: &mut Unpacked,
    staging: &mut Unpacked,
) {
    let head_dim = s.layout.head_dim as usize;
    let heads = s.layout.kv_heads as usize;
    for write in &plan.writes {
        let buffer = if write.slot.is_staging() { &mut *staging } else { &mut *ring };
        for head in 0..heads {
            let first = (write.row as usize * heads + head) * head_dim;
            let row = buffer.row(s, tensor, write.slot.index(), head as u32);
            for (channel, &x) in input[first..first + head_dim].iter().enumerate() {
                put(s.window_format, &mut buffer.words[row..], channel, x);
            }
        }
    }
}
