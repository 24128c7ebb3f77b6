//! What is rotated before another kernel reads it.

use super::source::pieces;
use super::{Bindings, Context, GridY, Kernel};
use crate::format::Tensor;

/// Rows that are about to be packed: a workgroup takes a row.
pub(super) fn rows(c: &Context<'_>, tensor: Tensor) -> Kernel {
    let layout = &c.shape.layout;
    let pieces = pieces!["lib/tokens.wgsl", "lib/rotation.wgsl", "rotate_rows.wgsl"];
    let mut kernel = Kernel::new(c, "rotate_rows", "src/format/rotation.rs", Bindings::Pack, pieces);
    kernel.constants.u32("ROTATED_TENSOR", u32::from(tensor == Tensor::Values));
    kernel.workgroup_bytes = 4 * layout.head_dim;
    // A row of each of a block's tokens.
    kernel.grid.per_record = layout.group;
    kernel.grid.y = GridY::Fixed(layout.kv_heads);
    kernel
}

/// Queries of a layer whose keys are rotated.
pub(super) fn queries(c: &Context<'_>) -> Kernel {
    let layout = &c.shape.layout;
    let pieces = pieces!["lib/rotation.wgsl", "rotate_queries.wgsl"];
    let mut kernel = Kernel::new(c, "rotate_queries", "src/format/rotation.rs", Bindings::Rotate, pieces);
    kernel.workgroup_bytes = 4 * layout.head_dim;
    kernel.grid.per_record = c.shape.heads_per_kv;
    kernel.grid.y = GridY::Fixed(layout.kv_heads);
    kernel
}
