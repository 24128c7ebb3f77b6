//! Whole blocks are packed.

use super::source::pieces;
use super::{Bindings, Context, Kernel, previous_power_of_two};
use crate::format::{
    Axis, CLIP_LEAST_EXPONENT, CLIP_STEP, CLIP_STEPS, Tensor, TensorFormat, TensorLayout, ZeroPoint,
};

/// Invocations of a workgroup.
const WORKGROUP: u32 = 128;

/// Keys or values of blocks. Several workgroups may share a head of a block.
pub(super) fn pack(c: &Context<'_>, tensor: Tensor) -> Kernel {
    let layout = c.shape.layout.tensor(tensor);
    let (format, shape) = (layout.format, PackShape::new(&layout));
    let mut kernel = Kernel::new(c, "pack", "src/oracle/pack.rs", Bindings::Pack, []).with(pieces![
        "lib/quantizer.wgsl",
        "lib/code_bit.wgsl",
        "lib/fit.wgsl"
    ]);
    kernel = if layout.rotates_apart() {
        kernel.with(pieces!["lib/rows_stored.wgsl"])
    } else if format.rotated {
        kernel.with(pieces!["lib/tokens.wgsl", "lib/rotation.wgsl", "lib/rows_rotated.wgsl"])
    } else {
        kernel.with(pieces!["lib/tokens.wgsl", "lib/rows_plain.wgsl"])
    };
    kernel = kernel.with(pieces!["lib/groups.wgsl", "pack.wgsl"]);
    let k = &mut kernel.constants;
    k.u32("PACK_TENSOR", u32::from(tensor == Tensor::Values));
    k.u32("PACK_BITS", format.bits.get());
    k.u32("PACK_LOW_BITS", format.bits.low_bits());
    k.u32("PACK_LOW_WORDS", format.bits.low_words(layout.line_codes()));
    k.u32("PACK_LINE_WORDS", layout.line_words());
    k.u32("PACK_LINES", layout.lines());
    k.u32("PACK_ROW_GROUPS", layout.channel_groups());
    k.u32("PACK_CODES", layout.first);
    k.u32("PACK_PARAMS", layout.first_param());
    k.u32("PACK_BATCHES", shape.batches);
    k.u32("PACK_TOKENS", shape.tokens);
    k.u32("PACK_CHANNELS", shape.channels);
    k.u32("PACK_GROUPS", shape.groups);
    k.u32("PACK_WORKGROUP", WORKGROUP);
    k.u32("CLIP_STEPS", CLIP_STEPS);
    k.flag("PACK_PER_TOKEN", layout.axis == Axis::PerToken);
    k.flag("PACK_COMPACT", format.compact);
    k.flag("PACK_ROUNDED", format.zero_point == ZeroPoint::Rounded);
    k.flag("CLIPPING", format.clipping);
    k.f32("CLIP_STEP", CLIP_STEP);
    k.i32("CLIP_LEAST_EXPONENT", CLIP_LEAST_EXPONENT);
    // Parameters, rows if they are rotated, and what clipping tries.
    kernel.workgroup_bytes = 8 * WORKGROUP + 4 * (shape.groups + shape.rotated);
    kernel.grid.sharing = shape.batches;
    kernel
}

/// How the groups of one head's keys or values of a block are divided among workgroups.
struct PackShape {
    /// Tokens whose groups a workgroup packs: whole words of every plane, and all of them unless groups are
    /// per token.
    tokens: u32,
    /// Channels whose groups a workgroup packs: whole words of every plane, and all of them unless groups are
    /// per channel.
    channels: u32,
    /// Groups, and so parameters, of one workgroup.
    groups: u32,
    /// Workgroups that share a head of a block.
    batches: u32,
    /// Elements of rows that are rotated in workgroup memory.
    rotated: u32,
}

impl PackShape {
    /// Workgroup memory holds a thousand parameters, and the elements that are rotated at once. Clipping
    /// tries so much that more workgroups share a block; besides, lavapipe ends every loop of an invocation
    /// that has gone round 65535 times in all.
    fn new(layout: &TensorLayout) -> PackShape {
        let TensorFormat { rotated, clipping, .. } = layout.format;
        let (head_dim, group) = (layout.head_dim, layout.group);
        let (tokens, channels, groups) = match layout.axis {
            Axis::PerChannel => {
                let channels = if clipping { head_dim.min(32) } else { head_dim };
                (group, channels, channels)
            }
            Axis::PerToken => {
                let row_groups = layout.channel_groups();
                let parameters = previous_power_of_two(1024 / row_groups);
                let few = rotated || clipping;
                let at_once = TensorLayout::ROTATED_AT_ONCE / head_dim;
                let rows = if few { previous_power_of_two(at_once) } else { u32::MAX };
                let tokens = group.min(parameters).min(rows).max(layout.whole_tokens());
                (tokens, head_dim, tokens * row_groups)
            }
        };
        let batches = (group / tokens) * head_dim.div_ceil(channels);
        let rotated = if rotated && !layout.rotates_apart() { tokens * head_dim } else { 0 };
        PackShape { tokens, channels, groups, batches, rotated }
    }
}
