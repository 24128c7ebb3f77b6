//! Attention over one packed page.

use super::{Partial, Row, Tensor};
use crate::format::{unrotate_exactly, widen};
use crate::plan::Extent;
use crate::shape::Shape;

/// Attends `rows` of one KV head to one page: `page` are the page's words.
pub fn attend_packed(s: &Shape, page: &[u32], extent: &Extent, head: u32, rows: &[Row]) -> Vec<Partial> {
    let layout = &s.layout;
    let [keys, values] = [Tensor::Keys, Tensor::Values].map(|tensor| {
        let tensor = layout.tensor(tensor);
        let mut elements = Vec::new();
        for t in 0..extent.tokens {
            let (block, token) = (t / layout.group, t % layout.group);
            let first = (block * layout.block_words() + head * layout.head_words()) as usize;
            let words = &page[first..first + layout.head_words() as usize];
            let element = |channel| match tensor.read(words, token, channel) {
                // Exact in f64.
                (code, Some(param)) => f64::from(code) * f64::from(param.scale()) + f64::from(param.min()),
                (bits, None) => f64::from(widen(bits, s.sixteen_bit_format())),
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
        rows.iter().map(|row| Partial::over(s, extent, row, &keys, &values)).collect();
    if layout.values.rotated {
        // The shaders do it where partial results are joined.
        partials.iter_mut().for_each(|partial| unrotate_exactly(&mut partial.out));
    }
    partials
}
