//! Attention of decode steps: a workgroup takes a tile of rows and a run of splits, and extends a partial
//! result per row.

use super::source::pieces;
use super::{Bindings, Context, Kernel, previous_power_of_two};
use crate::format::{Axis, PAGE_TOKENS, Tensor, TensorLayout};

/// Packed pages by lines of codes, unless a group's axis is for comparison only; and unpacked tokens.
pub(super) fn decode(c: &Context<'_>, rows: u32) -> Kernel {
    let axes = [Tensor::Keys, Tensor::Values].map(|tensor| c.shape.layout.tensor(tensor).axis);
    let kernel = Kernel::new(c, "decode", "src/oracle/attend.rs", Bindings::Attend, []).with(pieces![
        "lib/rows.wgsl",
        "lib/packed.wgsl",
        "lib/slots.wgsl",
        "lib/products.wgsl",
        "lib/decode.wgsl",
        "lib/vectors_unpacked.wgsl",
        "lib/decode_unpacked.wgsl"
    ]);
    let kernel = if axes == [Axis::PerChannel, Axis::PerToken] {
        kernel.with(pieces!["lib/field_mantissa.wgsl", "lib/lines.wgsl", "lib/decode_codes.wgsl"])
    } else {
        kernel.with(pieces!["lib/code_bit.wgsl", "lib/vectors_packed.wgsl", "lib/decode_vectors.wgsl"])
    };
    LineShape::new(c, rows, axes).of(kernel.with(pieces!["decode.wgsl"]), rows)
}

/// How lib/decode.wgsl divides a tile among the invocations of a workgroup.
struct LineShape {
    /// Tokens at a time.
    tokens: u32,
    workgroup: u32,
    /// Invocations that share the tokens of four channels.
    shares: u32,
    /// Invocations whose maxima are joined in the first of two steps.
    reduce_step: u32,
    sh_vecs: u32,
    offsets: u32,
}

impl LineShape {
    /// As many tokens at a time as fit WebGPU's 16 KiB of workgroup memory: the more, the fewer barriers, and
    /// the less often a block's parameters are read.
    fn new(c: &Context<'_>, rows: u32, axes: [Axis; 2]) -> LineShape {
        let layout = &c.shape.layout;
        let (keys, values) = (layout.tensor(Tensor::Keys), layout.tensor(Tensor::Values));
        let key_vecs = 4 * layout.head_dim.div_ceil(16);
        // What the slices of a tile's logits are summed up in is as large as its operands.
        let workgroup = (512 / rows).min(128);
        let row_lanes = workgroup / rows;
        let by_codes = axes == [Axis::PerChannel, Axis::PerToken];
        let of_codes = |tensor: TensorLayout| by_codes && tensor.format.bits.is_quantized();
        let sizes = |tokens: u32| {
            let quads = tokens / 4;
            let blocks = if of_codes(keys) { tokens.div_ceil(layout.group) } else { 0 };
            let groups = if of_codes(values) { values.channel_groups() } else { 0 };
            let operands = (blocks * rows * key_vecs).max(groups * rows * quads);
            let sh_vecs = rows * key_vecs + rows * quads + operands.max(workgroup * rows);
            (sh_vecs, operands.max(2 * workgroup))
        };
        let fits = |tokens: u32| {
            let (sh_vecs, offsets) = sizes(tokens);
            // A softmax lane has up to two quads.
            tokens / 4 <= workgroup.min(2 * row_lanes) && 16 * sh_vecs + 4 * offsets <= 16384
        };
        // The spans of short contexts are shorter than a page.
        let mut tokens = PAGE_TOKENS / 2;
        while tokens > 16 && !fits(tokens) {
            tokens /= 2;
        }
        let (sh_vecs, offsets) = sizes(tokens);
        let shares = previous_power_of_two(workgroup / (layout.head_dim / 4));
        LineShape { tokens, workgroup, shares, reduce_step: row_lanes.min(8), sh_vecs, offsets }
    }

    /// Adds what lib/decode.wgsl reads.
    fn of(&self, mut kernel: Kernel, rows: u32) -> Kernel {
        let k = &mut kernel.constants;
        k.u32("ROWS", rows);
        k.u32("TILE_TOKENS", self.tokens);
        k.u32("WORKGROUP", self.workgroup);
        k.u32("SHARES", self.shares);
        k.u32("REDUCE_STEP", self.reduce_step);
        k.u32("SH_VECS", self.sh_vecs);
        k.u32("OFFSETS", self.offsets);
        kernel.workgroup_bytes = 16 * self.sh_vecs + 4 * self.offsets;
        kernel
    }
}
