//! Keys of a block: quantized per channel, over the block's tokens, or kept in 16 bits.

use super::{Tensor, Tokens};
use crate::format::{code, enter};
use crate::geometry::Geometry;
use crate::plan::Slot;

/// Packs the keys of one head: `tokens` are the block's slots, `block` the words of the head in the block.
pub fn pack_keys(g: &Geometry, tokens: Tokens<'_>, slots: &[Slot], head: u32, block: &mut [u32]) {
    let layout = &g.layout;
    for word in &mut block[..layout.key_param(0) as usize] {
        *word = 0;
    }
    if !layout.key_bits.is_quantized() {
        for (&slot, token) in slots.iter().zip(0..) {
            for channel in 0..layout.head_dim {
                let x = tokens.get(g, Tensor::Keys, slot, head, channel);
                let word = layout.key_code(channel / 2, token) as usize;
                block[word] |= enter(x, g.sixteen_bit_format()) << (16 * (channel % 2));
            }
        }
        return;
    }
    for channel in 0..layout.head_dim {
        let group: Vec<f32> =
            slots.iter().map(|&slot| tokens.get(g, Tensor::Keys, slot, head, channel)).collect();
        let param = g.keys.fit(&group);
        block[layout.key_param(channel) as usize] = param.to_word();
        for (token, &x) in group.iter().enumerate() {
            let code = code(layout.key_bits, param, x);
            for part in layout.key_bits.parts(layout.head_dim, channel) {
                let bits = (code >> part.code_shift) & ((1 << part.width) - 1);
                block[layout.key_code(part.word, token as u32) as usize] |= bits << part.shift;
            }
        }
    }
}
