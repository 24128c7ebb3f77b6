//! Keys or values of a block: quantized over groups of tokens or of channels, or kept in 16 bits.

use super::{Tensor, Tokens};
use crate::format::{code, enter, rotate};
use crate::plan::Slot;
use crate::shape::Shape;

/// Packs one head's keys or values: `slots` are the block's tokens, `block` the words of the head in the
/// block.
pub fn pack(s: &Shape, tensor: Tensor, tokens: Tokens<'_>, slots: &[Slot], head: u32, block: &mut [u32]) {
    let layout = s.layout.tensor(tensor);
    let format = layout.format;
    block[layout.first as usize..][..layout.words() as usize].fill(0);
    let rows: Vec<Vec<f32>> = slots
        .iter()
        .map(|&slot| {
            let mut row: Vec<f32> =
                (0..layout.head_dim).map(|channel| tokens.get(s, tensor, slot, head, channel)).collect();
            if format.rotated {
                rotate(&mut row);
            }
            row
        })
        .collect();
    if !format.bits.is_quantized() {
        for (row, token) in rows.iter().zip(0..) {
            for (&x, channel) in row.iter().zip(0..) {
                for part in layout.parts(token, channel) {
                    block[part.word as usize] |= enter(x, s.sixteen_bit_format()) << part.shift;
                }
            }
        }
    }
    for group in 0..layout.params() {
        let element = |(token, channel): (u32, u32)| rows[token as usize][channel as usize];
        let values: Vec<f32> = layout.elements(group).map(element).collect();
        let param = format.fit(&values);
        let (word, shift) = layout.param(group);
        block[word as usize] |= param.word() << shift;
        for (token, channel) in layout.elements(group) {
            let code = code(format.bits, param, element((token, channel)));
            for part in layout.parts(token, channel) {
                let bits = (code >> part.code_shift) & ((1 << part.width) - 1);
                block[part.word as usize] |= bits << part.shift;
            }
        }
    }
}
