//! Packed tokens return to the window: dequantized, then through the entry function.

use super::{Tensor, Unpacked, put};
use crate::format::unrotate;
use crate::plan::TokenUnpack;
use crate::shape::Shape;

/// Writes the tokens of a slab's blocks to their slots.
pub fn unpack(s: &Shape, tokens: &[TokenUnpack], slab: &[u32], ring: &mut Unpacked) {
    let (layout, sixteen_bit) = (&s.layout, s.sixteen_bit_format());
    for item in tokens {
        let block = &slab[(item.block * layout.block_words()) as usize..][..layout.block_words() as usize];
        for (words, head) in block.chunks(layout.head_words() as usize).zip(0..) {
            for tensor in [Tensor::Keys, Tensor::Values] {
                let row = ring.row(s, tensor, item.slot.index(), head);
                let channels = 0..layout.head_dim;
                let mut values: Vec<f32> = channels
                    .map(|channel| layout.tensor(tensor).element(words, item.token, channel, sixteen_bit))
                    .collect();
                if layout.tensor(tensor).format.rotated {
                    unrotate(&mut values);
                }
                for (channel, x) in values.into_iter().enumerate() {
                    put(s.window_format, &mut ring.words[row..], channel, x);
                }
            }
        }
    }
}
