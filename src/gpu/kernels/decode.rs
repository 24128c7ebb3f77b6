//! Attention of decode steps: a workgroup takes a tile of rows and a split of up to 256 tokens, and writes a
//! partial result per row.

use super::source::{Piece, pieces};
use super::{Bindings, Context, Kernel, previous_power_of_two};
use crate::format::{Axis, Tensor};

const PACKED: &str = "src/oracle/attend_packed.rs";
const UNPACKED: &str = "src/oracle/attend_unpacked.rs";

/// Over packed pages, in f32.
pub(super) fn packed(c: &Context<'_>, rows: u32) -> Kernel {
    let keys = c.shape.layout.tensor(Tensor::Keys);
    let pieces: &[Piece] = if keys.axis == Axis::PerToken {
        &pieces!["lib/keys_plain.wgsl", "lib/queries_float.wgsl", "lib/keys_by_vectors.wgsl"]
    } else if !keys.format.bits.is_quantized() {
        &pieces!["lib/keys_plain.wgsl", "lib/queries_float.wgsl", "lib/keys_sixteen.wgsl"]
    } else {
        &pieces!["lib/keys_quantized.wgsl", "lib/queries_float.wgsl", "lib/keys_float.wgsl"]
    };
    with_keys(c, rows, &TileShape::new(c, rows, Source::Page), pieces)
}

/// Over packed pages, with keys that `key_pieces` read.
pub(super) fn with_keys(c: &Context<'_>, rows: u32, shape: &TileShape, key_pieces: &[Piece]) -> Kernel {
    let [keys, values] = [Tensor::Keys, Tensor::Values].map(|tensor| c.shape.layout.tensor(tensor));
    let values_by_vectors = values.axis == Axis::PerChannel;
    let mut kernel = Kernel::new(c, "decode_packed", PACKED, Bindings::Attend, []).with(pieces![
        "lib/rows.wgsl",
        "lib/decode.wgsl",
        "lib/packed.wgsl",
        "lib/products.wgsl"
    ]);
    if keys.axis == Axis::PerToken || values_by_vectors {
        kernel = kernel.with(pieces!["lib/vectors_packed.wgsl"]);
    }
    kernel = kernel.with(key_pieces.iter().copied());
    kernel = if values_by_vectors {
        kernel.with(pieces!["lib/values_by_vectors.wgsl"])
    } else if values.format.bits.is_quantized() {
        kernel.with(pieces!["lib/values_quantized.wgsl"])
    } else {
        kernel.with(pieces!["lib/values_sixteen.wgsl"])
    };
    tiled(kernel.with(pieces!["decode_packed.wgsl"]), rows, shape)
}

/// Over unpacked tokens.
pub(super) fn unpacked(c: &Context<'_>, rows: u32) -> Kernel {
    let kernel = Kernel::new(c, "decode_unpacked", UNPACKED, Bindings::Attend, []).with(pieces![
        "lib/rows.wgsl",
        "lib/decode.wgsl",
        "lib/slots.wgsl",
        "lib/products.wgsl",
        "lib/keys_plain.wgsl",
        "lib/queries_float.wgsl",
        "decode_unpacked.wgsl"
    ]);
    tiled(kernel, rows, &TileShape::new(c, rows, Source::Window))
}

/// Adds what lib/decode.wgsl reads.
fn tiled(mut kernel: Kernel, rows: u32, shape: &TileShape) -> Kernel {
    let k = &mut kernel.constants;
    k.u32("ROWS", rows);
    k.u32("KEY_ROWS", shape.key_rows);
    k.u32("ROW_GROUPS", shape.row_groups);
    k.u32("KEY_SLICES", shape.key_slices);
    k.u32("WORKGROUP", shape.workgroup);
    k.u32("QUERY_VECS", shape.query_vecs);
    k.u32("VALUE_ROWS", shape.value_rows);
    k.u32("ROW_PAIRS", shape.row_pairs);
    k.u32("CHUNKS", shape.chunks);
    k.u32("UNITS", shape.chunks * shape.row_pairs);
    k.u32("TOKEN_SHARES", shape.token_shares);
    k.u32("SH_VECS", shape.sh_vecs);
    k.flag("PREFILL", false);
    kernel.workgroup_bytes = 16 * shape.sh_vecs;
    kernel
}

/// What the attention of a tile reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Source {
    /// A packed page.
    Page,
    /// A packed page, its keys by integer dot products.
    PageByDots,
    /// Unpacked tokens.
    Window,
}

/// How the attention of one tile is divided among the invocations of a workgroup.
pub(super) struct TileShape {
    key_rows: u32,
    row_groups: u32,
    key_slices: u32,
    pub(super) workgroup: u32,
    query_vecs: u32,
    value_rows: u32,
    row_pairs: u32,
    chunks: u32,
    token_shares: u32,
    pub(super) sh_vecs: u32,
}

impl TileShape {
    pub(super) fn new(c: &Context<'_>, rows: u32, source: Source) -> TileShape {
        const QUADS: u32 = 64;
        let padded = c.shape.layout.head_dim.next_multiple_of(16);
        // Of one invocation, for keys.
        let key_rows = rows.min(4);
        let row_groups = rows / key_rows;
        // Invocations that share the channels of a row group's keys. Long sequences have more pages than a
        // GPU can hold, where more invocations for each cost more than they gain, except that integer dot
        // products then need fewer registers. But unpacked tokens fill one or two splits: few invocations
        // would wait for their loads.
        let key_slices = match source {
            Source::Page => 1,
            Source::PageByDots => (key_rows / 2).max(1),
            Source::Window => (4 / row_groups).max(1),
        };
        let workgroup = QUADS * row_groups * key_slices;
        let value_rows = rows.min(2);
        let row_pairs = rows / value_rows;
        let chunks = padded / 16;
        let token_shares = previous_power_of_two(workgroup / (chunks * row_pairs));
        // Workgroup memory in vec4, by phase: see lib/decode.wgsl.
        let block = rows * padded / 4 + workgroup;
        let slices = key_slices / 2 * QUADS * rows;
        let maxima = row_groups * (QUADS + 8);
        let weights = rows * QUADS;
        let row_sums = token_shares * row_pairs + row_groups;
        let sums = token_shares / 2 * chunks * row_pairs * 4;
        let sh_vecs = [block, slices, maxima, weights, row_sums, sums].into_iter().max().unwrap_or(0);
        TileShape {
            key_rows,
            row_groups,
            key_slices,
            workgroup,
            query_vecs: padded / 4,
            value_rows,
            row_pairs,
            chunks,
            token_shares,
            sh_vecs,
        }
    }
}
