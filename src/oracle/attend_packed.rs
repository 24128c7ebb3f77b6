//! Attention over one packed page.

use super::{Partial, Row, Tensor};
use crate::format::{Param, TensorLayout, unrotate_exactly, widen};
use crate::geometry::Geometry;
use crate::plan::AttendItem;

/// Attends `rows` of one KV head to one page: `page` are the page's words.
pub fn attend_packed(g: &Geometry, page: &[u32], item: &AttendItem, head: u32, rows: &[Row]) -> Vec<Partial> {
    let layout = &g.layout;
    let [keys, values] = [Tensor::Keys, Tensor::Values].map(|tensor| {
        let tensor = layout.tensor(tensor);
        let mut elements = Vec::new();
        for t in 0..item.tokens {
            let (block, token) = (t / layout.group, t % layout.group);
            let first = (block * layout.block_words() + head * layout.head_words()) as usize;
            let words = &page[first..first + layout.head_words() as usize];
            let element = |channel| match read(&tensor, words, token, channel) {
                // Exact in f64.
                (code, Some(param)) => f64::from(code) * f64::from(param.scale()) + f64::from(param.min()),
                (bits, None) => f64::from(widen(bits, g.sixteen_bit_format())),
            };
            let first = elements.len();
            elements.extend((0..layout.head_dim).map(element));
            if tensor.tensor == Tensor::Keys && tensor.format.rotated {
                // The shaders rotate the queries; in f64 it makes no difference.
                unrotate_exactly(&mut elements[first..]);
            }
        }
        elements
    });
    let mut partials: Vec<Partial> =
        rows.iter().map(|row| Partial::over(g, item, row, &keys, &values)).collect();
    if layout.values.rotated {
        // The shaders do it where partial results are joined.
        partials.iter_mut().for_each(|partial| unrotate_exactly(&mut partial.out));
    }
    partials
}

/// The code of an element in a head's part of a block and its parameter, or its 16 bits.
pub(super) fn read(layout: &TensorLayout, words: &[u32], token: u32, channel: u32) -> (u32, Option<Param>) {
    let bits = layout.format.bits;
    let part = |part: crate::format::CodePart| {
        let word = words[layout.code(token, part.word) as usize];
        ((word >> part.shift) & ((1 << part.width) - 1)) << part.code_shift
    };
    let code = bits.parts(layout.head_dim, channel).map(part).sum();
    let param = bits.is_quantized().then(|| {
        let (word, shift) = layout.param(layout.group_of(token, channel));
        layout.format.param(words[word as usize] >> shift)
    });
    (code, param)
}
