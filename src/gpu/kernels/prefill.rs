//! Attention of long chunks: a workgroup takes a tile of rows and a run of splits, whose codes it expands
//! once for all rows, and extends the rows' partial results.

use super::source::pieces;
use super::{Bindings, Context, Kernel, previous_power_of_two};

/// Over packed pages.
pub(super) fn packed(c: &Context<'_>) -> Kernel {
    let pieces = pieces![
        "lib/rows.wgsl",
        "lib/packed.wgsl",
        "lib/prefill.wgsl",
        "lib/code_bit.wgsl",
        "lib/vectors_packed.wgsl",
        "prefill_packed.wgsl"
    ];
    tiled(c, Kernel::new(c, "prefill_packed", "src/oracle/attend_packed.rs", Bindings::Attend, pieces))
}

/// Over unpacked tokens.
pub(super) fn unpacked(c: &Context<'_>) -> Kernel {
    let pieces = pieces![
        "lib/rows.wgsl",
        "lib/slots.wgsl",
        "lib/prefill.wgsl",
        "lib/vectors_unpacked.wgsl",
        "prefill_unpacked.wgsl"
    ];
    tiled(c, Kernel::new(c, "prefill_unpacked", "src/oracle/attend_unpacked.rs", Bindings::Attend, pieces))
}

/// Adds what lib/prefill.wgsl reads: how a tile is divided among the 256 invocations of a workgroup.
fn tiled(c: &Context<'_>, mut kernel: Kernel) -> Kernel {
    let rows = c.tiles.prefill_tile();
    let vecs = c.shape.layout.head_dim / 4;
    let columns = 256 / (rows / 4);
    let key_tile = columns.max(32);
    let value_tokens = previous_power_of_two(256 / vecs).min(key_tile);
    let chunks = 4 * (rows + key_tile);
    let sh_vecs = chunks + key_tile * rows / 4;
    let k = &mut kernel.constants;
    k.u32("ROWS", rows);
    k.u32("COLUMNS", columns);
    k.u32("REDUCE_STEP", if columns > 32 { 8 } else { 4 });
    k.u32("KEY_TILE", key_tile);
    k.u32("TOKENS_EACH", key_tile / columns);
    k.u32("OUTPUTS_EACH", vecs.div_ceil(columns));
    k.u32("VALUE_TOKENS", value_tokens);
    k.u32("SH_VECS", sh_vecs);
    kernel.workgroup_bytes = 16 * sh_vecs;
    kernel
}
