//! Attention over unpacked tokens: sinks, residual window, and the step's own new tokens.

use super::{Partial, Row, Tensor, Tokens};
use crate::plan::{Extent, Slot};
use crate::shape::Shape;

/// Attends `rows` of one KV head to the tokens in `slots`.
pub fn attend_unpacked(
    s: &Shape,
    tokens: Tokens<'_>,
    slots: &[Slot],
    extent: &Extent,
    head: u32,
    rows: &[Row],
) -> Vec<Partial> {
    let read = |tensor| -> Vec<f64> {
        let element = |slot, channel| f64::from(tokens.get(s, tensor, slot, head, channel));
        slots.iter().flat_map(|&slot| (0..s.layout.head_dim).map(move |c| element(slot, c))).collect()
    };
    let (keys, values) = (read(Tensor::Keys), read(Tensor::Values));
    rows.iter().map(|row| Partial::over(s, extent, row, &keys, &values)).collect()
}
