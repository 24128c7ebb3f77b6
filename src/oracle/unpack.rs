//! Packed tokens return to the window: dequantized, then through the entry function.

use super::attend_history::read_code;
use super::{Tensor, Unpacked, put};
use crate::format::{BlockLayout, Param, dequantize, unrotate, widen};
use crate::geometry::Geometry;
use crate::plan::TokenUnpack;

/// Writes the tokens of a slab's blocks to their slots.
pub fn unpack(g: &Geometry, tokens: &[TokenUnpack], slab: &[u32], ring: &mut Unpacked) {
    let layout = &g.layout;
    for item in tokens {
        let block = &slab[(item.block * layout.block_words()) as usize..][..layout.block_words() as usize];
        for (words, head) in block.chunks(layout.head_words() as usize).zip(0..) {
            for tensor in [Tensor::Keys, Tensor::Values] {
                let row = ring.row(g, tensor, item.slot.index(), head);
                let channels = 0..layout.head_dim;
                let mut values: Vec<f32> =
                    channels.map(|channel| element(g, tensor, words, item.token, channel)).collect();
                if tensor == Tensor::Values && g.values.rotated {
                    unrotate(&mut values);
                }
                for (channel, x) in values.into_iter().enumerate() {
                    put(g.window_format, &mut ring.words[row..], channel, x);
                }
            }
        }
    }
}

/// The dequantized value of one element of a head's part of a block, rounded to f32 once, as it was packed: values may be rotated.
pub fn element(g: &Geometry, tensor: Tensor, words: &[u32], token: u32, channel: u32) -> f32 {
    let layout = &g.layout;
    let (bits, place, param): (_, fn(&BlockLayout, u32, u32) -> u32, _) = match tensor {
        Tensor::Keys => {
            (layout.key_bits, |l, token, word| l.key_code(word, token), layout.key_param(channel))
        }
        Tensor::Values => (
            layout.value_bits,
            |l, token, word| l.value_code(token, word),
            layout.value_param(token, channel / layout.value_group),
        ),
    };
    let code = read_code(bits, layout.head_dim, channel, |word| words[place(layout, token, word) as usize]);
    if !bits.is_quantized() {
        return widen(code, g.sixteen_bit_format());
    }
    dequantize(Param::from_word(words[param as usize]), code)
}
