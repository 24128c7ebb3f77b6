//! Attention over unpacked tokens: sinks, residual window, and the step's own new tokens.

use super::{Partial, Row, Tensor, Tokens};
use crate::geometry::Geometry;
use crate::plan::{AttendItem, Slot};

/// Attends `rows` of one KV head to the tokens in `slots`.
pub fn attend_unpacked(
    g: &Geometry,
    tokens: Tokens<'_>,
    slots: &[Slot],
    item: &AttendItem,
    head: u32,
    rows: &[Row],
) -> Vec<Partial> {
    let read = |tensor| -> Vec<f64> {
        let element = |slot, channel| f64::from(tokens.get(g, tensor, slot, head, channel));
        slots.iter().flat_map(|&slot| (0..g.layout.head_dim).map(move |c| element(slot, c))).collect()
    };
    let (keys, values) = (read(Tensor::Keys), read(Tensor::Values));
    rows.iter().map(|row| Partial::over(g, item, row, &keys, &values)).collect()
}
