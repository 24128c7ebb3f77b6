//! Packed tokens return to the window.

use super::source::pieces;
use super::{Bindings, Context, GridY, Kernel};
use crate::format::Tensor;

const TWIN: &str = "src/oracle/unpack.rs";

/// What is not rotated. An invocation writes one word.
pub(super) fn plain(c: &Context<'_>) -> Kernel {
    let pieces =
        pieces!["lib/quantizer.wgsl", "lib/code_bit.wgsl", "lib/elements_packed.wgsl", "unpack.wgsl"];
    let mut kernel = Kernel::new(c, "unpack", TWIN, Bindings::Across, pieces);
    let rotated = c.shape.layout.keys.rotated || c.shape.layout.values.rotated;
    let tensors = if rotated { 1 } else { 2 };
    kernel.grid.y = GridY::Fixed((tensors * c.shape.token_words()).div_ceil(64));
    kernel
}

/// Keys or values that are rotated: a workgroup takes a row.
pub(super) fn rotated(c: &Context<'_>, tensor: Tensor) -> Kernel {
    let pieces = pieces![
        "lib/quantizer.wgsl",
        "lib/code_bit.wgsl",
        "lib/elements_packed.wgsl",
        "lib/rotation.wgsl",
        "unpack_rotated.wgsl"
    ];
    let mut kernel = Kernel::new(c, "unpack_rotated", TWIN, Bindings::Across, pieces);
    kernel.constants.u32("ROTATED_TENSOR", u32::from(tensor == Tensor::Values));
    kernel.workgroup_bytes = 4 * c.shape.layout.head_dim;
    kernel.grid.y = GridY::Fixed(c.shape.layout.kv_heads);
    kernel
}
