//! How the work of the attention passes is divided among workgroups and their invocations, and what memory that takes.

use super::shaders::Pass;
use super::variant::{Variant, lanes};
use crate::format::{Axis, Tensor, TensorFormat};
use crate::geometry::Geometry;

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
pub(super) struct AttendShape {
    pub(super) key_rows: u32,
    pub(super) row_groups: u32,
    pub(super) key_slices: u32,
    pub(super) workgroup: u32,
    pub(super) query_vecs: u32,
    pub(super) value_rows: u32,
    pub(super) row_pairs: u32,
    pub(super) chunks: u32,
    pub(super) token_shares: u32,
    pub(super) sh_vecs: u32,
}

impl AttendShape {
    pub(super) fn new(g: &Geometry, rows: u32, source: Source) -> AttendShape {
        const QUADS: u32 = 64;
        let padded = g.layout.head_dim.next_multiple_of(16);
        let key_rows = cluster_rows(rows);
        let row_groups = rows / key_rows;
        // Invocations that share the channels of a row group's keys. Long sequences have more pages than a GPU can hold, where more invocations for each
        // cost more than they gain, except that integer dot products then need fewer registers. But unpacked tokens fill one or two splits: few
        // invocations would wait for their loads.
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
        // Workgroup memory in vec4, by phase: see lib/attend.wgsl.
        let block = rows * padded / 4 + workgroup;
        let slices = key_slices / 2 * QUADS * rows;
        let maxima = row_groups * (QUADS + 8);
        let weights = rows * QUADS;
        let row_sums = token_shares * row_pairs + row_groups;
        let sums = token_shares / 2 * chunks * row_pairs * 4;
        let sh_vecs = [block, slices, maxima, weights, row_sums, sums].into_iter().max().unwrap_or(0);
        AttendShape {
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

/// Invocations of a workgroup of clusters.
pub(super) const CLUSTER_WORKGROUP: u32 = 32;

/// Workgroups in y of a pass whose work is divided by KV heads.
pub(super) fn attend_groups(g: &Geometry, variant: Variant, pass: Pass, heads: u32) -> u32 {
    let rows = match pass {
        Pass::AttendHistory(rows) | Pass::AttendWindow(rows) => rows,
        Pass::FoldHistory | Pass::FoldWindow => g.fold_tile(),
        _ => return heads,
    };
    match variant {
        Variant::Portable | Variant::IntegerDot => heads,
        Variant::Subgroups => {
            let clusters = heads * (rows / cluster_rows(rows));
            clusters.div_ceil(CLUSTER_WORKGROUP / lanes(g))
        }
    }
}

/// Work items of an attention pass that one workgroup takes at most, one after the other: where loading the queries takes as long as a part of a page.
pub(super) fn items_at_most(variant: Variant, pass: Pass) -> u32 {
    match (variant, pass) {
        (Variant::Subgroups, Pass::AttendHistory(_)) => 8,
        _ => 1,
    }
}

/// Work items that one workgroup takes of `count`: few are divided among more workgroups. They do not change a bit.
pub(super) fn items_each(variant: Variant, pass: Pass, count: u32) -> u32 {
    (count / 16).clamp(1, items_at_most(variant, pass))
}

/// Bytes of workgroup memory that integer dot products need for tiles of `rows` rows, besides what all attention does.
fn dot_bytes(g: &Geometry, rows: u32) -> u32 {
    g.layout.blocks_per_page() * rows * g.layout.head_dim
}

/// Whether the history's keys meet tiles of `rows` rows by integer dot products.
pub(super) fn by_dots(g: &Geometry, variant: Variant, rows: u32) -> bool {
    variant == Variant::IntegerDot && g.layout.keys.bits.is_quantized() && dot_fits(g, rows)
}

/// Whether tiles of `rows` rows can have integer dot products within WebGPU's 16 KiB of workgroup memory; others have f32 ones.
fn dot_fits(g: &Geometry, rows: u32) -> bool {
    let shape = AttendShape::new(g, rows, Source::PageByDots);
    shape.workgroup <= 256 && 16 * shape.sh_vecs + dot_bytes(g, rows) <= 16384
}

/// Rows of one cluster, and of one invocation for keys.
pub(super) fn cluster_rows(rows: u32) -> u32 {
    rows.min(4)
}

/// How a tile of a long chunk is divided among the 256 invocations of a workgroup: see lib/fold.wgsl.
pub(super) struct FoldShape {
    pub(super) columns: u32,
    pub(super) key_tile: u32,
    pub(super) value_tokens: u32,
    pub(super) sh_vecs: u32,
}

impl FoldShape {
    pub(super) fn new(g: &Geometry) -> FoldShape {
        let rows = g.fold_tile();
        let vecs = g.layout.head_dim / 4;
        let columns = 256 / (rows / 4);
        let key_tile = columns.max(32);
        let value_tokens = previous_power_of_two(256 / vecs).min(key_tile);
        let chunks = 4 * (rows + key_tile);
        FoldShape { columns, key_tile, value_tokens, sh_vecs: chunks + key_tile * rows / 4 }
    }
}

/// Whether any kernel of this geometry would use integer dot products.
pub(super) fn any_dot_fits(g: &Geometry) -> bool {
    g.split_tiles().into_iter().any(|rows| dot_fits(g, rows))
}

/// Invocations of the pack passes.
pub(super) const PACK_WORKGROUP: u32 = 128;

/// How the groups of one head's keys or values of a block are divided among workgroups.
pub(super) struct PackShape {
    /// Tokens whose groups a workgroup packs: all of them, unless groups are per token.
    pub(super) tokens: u32,
    /// Channels whose groups a workgroup packs: whole words of every plane, and all of them unless groups are per channel.
    pub(super) channels: u32,
    /// Groups, and so parameters, of one workgroup.
    pub(super) groups: u32,
    /// Workgroups that share a head of a block.
    pub(super) batches: u32,
    /// Elements of rows that are rotated in workgroup memory.
    pub(super) rotated: u32,
}

impl PackShape {
    /// Workgroup memory holds a thousand parameters, and two thousand rotated elements. Clipping tries so much that more workgroups share a block; besides,
    /// lavapipe ends every loop of an invocation that has gone round 65535 times in all.
    pub(super) fn new(g: &Geometry, tensor: Tensor) -> PackShape {
        let layout = g.layout.tensor(tensor);
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
                let rows = if few { previous_power_of_two(2048 / head_dim) } else { u32::MAX };
                let tokens = group.min(parameters).min(rows);
                (tokens, head_dim, tokens * row_groups)
            }
        };
        let batches = (group / tokens) * head_dim.div_ceil(channels);
        let rotated = if rotated && !layout.rotates_apart() { tokens * head_dim } else { 0 };
        PackShape { tokens, channels, groups, batches, rotated }
    }
}

/// Workgroups that share a work item.
pub(super) fn batches(g: &Geometry, pass: Pass) -> u32 {
    match pass {
        Pass::Pack(tensor) => PackShape::new(g, tensor).batches,
        _ => 1,
    }
}

/// Bytes of workgroup memory that the largest kernel of this geometry and variant uses.
pub(super) fn workgroup_bytes(g: &Geometry, variant: Variant) -> u32 {
    let attention = g.split_tiles().into_iter().map(|rows| {
        let bytes = |source| 16 * AttendShape::new(g, rows, source).sh_vecs;
        let history = match by_dots(g, variant, rows) {
            true => bytes(Source::PageByDots) + dot_bytes(g, rows),
            false => bytes(Source::Page),
        };
        history.max(bytes(Source::Window))
    });
    // Parameters, rows if they are rotated, and what clipping tries.
    let pack = [Tensor::Keys, Tensor::Values].map(|tensor| {
        let shape = PackShape::new(g, tensor);
        8 * PACK_WORKGROUP + 4 * (shape.groups + shape.rotated)
    });
    let pack = pack[0].max(pack[1]);
    let merge = 24 * 256;
    let fold = if g.may_fold() { 16 * FoldShape::new(g).sh_vecs } else { 0 };
    attention.max().unwrap_or(0).max(pack).max(merge).max(fold)
}

fn previous_power_of_two(n: u32) -> u32 {
    1 << n.max(1).ilog2()
}
