//! Packed tokens return to the window: dequantized, then through the entry function.

use super::attend_packed::read;
use super::{Tensor, Unpacked, put};
use crate::format::{dequantize, unrotate, widen};
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
                if layout.tensor(tensor).format.rotated {
                    unrotate(&mut values);
                }
                for (channel, x) in values.into_iter().enumerate() {
                    put(g.window_format, &mut ring.words[row..], channel, x);
                }
            }
        }
    }
}

/// The dequantized value of one element of a head's part of a block, rounded to f32 once, as it was packed: it may be rotated.
pub fn element(g: &Geometry, tensor: Tensor, words: &[u32], token: u32, channel: u32) -> f32 {
    match read(&g.layout.tensor(tensor), words, token, channel) {
        (code, Some(param)) => dequantize(param, code),
        (bits, None) => widen(bits, g.sixteen_bit_format()),
    }
}
