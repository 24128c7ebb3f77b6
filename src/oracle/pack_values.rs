//! Values of a block: quantized per token, over groups of channels, or kept in 16 bits.

use super::{Tensor, Tokens};
use crate::format::{code, enter, rotate};
use crate::geometry::Geometry;
use crate::plan::Slot;

/// Packs the values of one head: `slots` are the block's tokens, `block` the words of the head in the block.
pub fn pack_values(g: &Geometry, tokens: Tokens<'_>, slots: &[Slot], head: u32, block: &mut [u32]) {
    let layout = &g.layout;
    for (token, &slot) in slots.iter().enumerate() {
        let token = token as u32;
        let mut row: Vec<f32> =
            (0..layout.head_dim).map(|c| tokens.get(g, Tensor::Values, slot, head, c)).collect();
        if g.values.rotated {
            rotate(&mut row);
        }
        for word in 0..layout.value_row_words() {
            block[layout.value_code(token, word) as usize] = 0;
        }
        if !layout.value_bits.is_quantized() {
            for channel in 0..layout.head_dim {
                let word = layout.value_code(token, channel / 2) as usize;
                block[word] |= enter(row[channel as usize], g.sixteen_bit_format()) << (16 * (channel % 2));
            }
        }
        for group in 0..layout.value_groups() {
            let first = group * layout.value_group;
            let channels = first..layout.head_dim.min(first + layout.value_group);
            let values = &row[channels.start as usize..channels.end as usize];
            let param = g.values.fit(values);
            block[layout.value_param(token, group) as usize] = param.to_word();
            for (channel, &x) in channels.zip(values) {
                let code = code(layout.value_bits, param, x);
                for part in layout.value_bits.parts(layout.head_dim, channel) {
                    let bits = (code >> part.code_shift) & ((1 << part.width) - 1);
                    block[layout.value_code(token, part.word) as usize] |= bits << part.shift;
                }
            }
        }
    }
}
