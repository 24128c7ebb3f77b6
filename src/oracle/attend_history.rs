//! Attention over one packed page.

use super::{Partial, Row};
use crate::format::{Bits, Param, f16_to_f32, unrotate_exactly, widen};
use crate::geometry::Geometry;
use crate::plan::AttendItem;

/// Attends `rows` of one KV head to one page: `page` are the page's words.
pub fn attend_history(
    g: &Geometry,
    page: &[u32],
    item: &AttendItem,
    head: u32,
    rows: &[Row],
) -> Vec<Partial> {
    let layout = &g.layout;
    let mut keys = Vec::new();
    let mut values = Vec::new();
    for t in 0..item.tokens {
        let (block, token) = (t / layout.group, t % layout.group);
        let first = (block * layout.block_words() + head * layout.head_words()) as usize;
        let words = &page[first..first + layout.head_words() as usize];
        for channel in 0..layout.head_dim {
            let key = read_code(layout.key_bits, layout.head_dim, channel, |word| {
                words[layout.key_code(word, token) as usize]
            });
            keys.push(if layout.key_bits.is_quantized() {
                dequantize(words[layout.key_param(channel) as usize], key)
            } else {
                f64::from(widen(key, g.sixteen_bit_format()))
            });
            let value = read_code(layout.value_bits, layout.head_dim, channel, |word| {
                words[layout.value_code(token, word) as usize]
            });
            values.push(if layout.value_bits.is_quantized() {
                let group = channel / layout.value_group;
                dequantize(words[layout.value_param(token, group) as usize], value)
            } else {
                f64::from(widen(value, g.sixteen_bit_format()))
            });
        }
    }
    let mut partials: Vec<Partial> =
        rows.iter().map(|row| Partial::over(g, item, row, &keys, &values)).collect();
    if g.values.rotated {
        // The shaders do it where partial results are joined; in f64 it makes no difference.
        partials.iter_mut().for_each(|partial| unrotate_exactly(&mut partial.out));
    }
    partials
}

/// The code (or 16-bit element) of `channel` in a row whose words `word` gives.
pub(super) fn read_code(bits: Bits, head_dim: u32, channel: u32, word: impl Fn(u32) -> u32) -> u32 {
    bits.parts(head_dim, channel)
        .map(|part| ((word(part.word) >> part.shift) & ((1 << part.width) - 1)) << part.code_shift)
        .sum()
}

/// `code·scale + min`, exact in f64.
fn dequantize(param: u32, code: u32) -> f64 {
    let param = Param::from_word(param);
    f64::from(code) * f64::from(f16_to_f32(param.scale)) + f64::from(f16_to_f32(param.min))
}
