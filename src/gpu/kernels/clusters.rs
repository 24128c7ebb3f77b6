//! Attention by clusters of invocations that exchange data by subgroup shuffles: no workgroup memory, no
//! barrier.

use super::needs::Needs;
use super::source::{Piece, pieces};
use super::{Bindings, Context, Grid, GridY, Kernel, Reads};
use crate::format::{Axis, Tensor};

/// Invocations of a workgroup of clusters.
pub(super) const WORKGROUP: u32 = 32;

/// Invocations of a cluster: each owns 16 channels.
pub(super) fn lanes(c: &Context<'_>) -> u32 {
    c.shape.layout.head_dim / 16
}

/// Decode steps.
pub(super) fn decode(c: &Context<'_>, reads: Reads, rows: u32) -> Kernel {
    let kernel = Kernel::new(c, "decode", "src/oracle/attend.rs", Bindings::Attend, pieces());
    // Loading the queries takes as long as a part of a page.
    let items_at_most = if reads == Reads::Unpacked { 1 } else { 8 };
    clustered(c, kernel.with(pieces!["decode_clusters.wgsl"]), rows, items_at_most, reads, false)
}

/// Long chunks over packed pages.
pub(super) fn prefill_packed(c: &Context<'_>) -> Kernel {
    let twin = "src/oracle/attend_packed.rs";
    let kernel = Kernel::new(c, "prefill_packed", twin, Bindings::Attend, pieces());
    let kernel = kernel.with(pieces!["prefill_packed_clusters.wgsl"]);
    clustered(c, kernel, c.tiles.prefill_tile(), 1, Reads::Packed, true)
}

/// Long chunks over unpacked tokens.
pub(super) fn prefill_unpacked(c: &Context<'_>) -> Kernel {
    let twin = "src/oracle/attend_unpacked.rs";
    let kernel = Kernel::new(c, "prefill_unpacked", twin, Bindings::Attend, pieces());
    let kernel = kernel.with(pieces!["prefill_unpacked_clusters.wgsl"]);
    clustered(c, kernel, c.tiles.prefill_tile(), 1, Reads::Unpacked, true)
}

fn pieces() -> [Piece; 9] {
    pieces![
        "lib/rows.wgsl",
        "lib/packed.wgsl",
        "lib/slots.wgsl",
        "lib/products.wgsl",
        "lib/field_convert.wgsl",
        "lib/lines.wgsl",
        "lib/clusters.wgsl",
        "lib/clusters_packed.wgsl",
        "lib/clusters_unpacked.wgsl"
    ]
}

/// Adds what lib/clusters.wgsl reads. A cluster takes up to four rows.
fn clustered(
    c: &Context<'_>,
    mut kernel: Kernel,
    rows: u32,
    items_at_most: u32,
    reads: Reads,
    prefill: bool,
) -> Kernel {
    let cluster_rows = rows.min(4);
    let k = &mut kernel.constants;
    k.u32("ROWS", rows);
    k.u32("WORKGROUP", WORKGROUP);
    k.u32("LANES", lanes(c));
    k.u32("KEY_ROWS", cluster_rows);
    k.u32("ROW_GROUPS", rows / cluster_rows);
    k.u32("ITEMS_AT_MOST", items_at_most);
    k.flag("PREFILL", prefill);
    k.flag("READS_PACKED", reads != Reads::Unpacked);
    k.flag("READS_UNPACKED", reads != Reads::Packed);
    kernel.needs = Needs { features: wgpu::Features::SUBGROUP, subgroup_size: lanes(c), linear_lanes: true };
    let y = GridY::Heads { units: rows / cluster_rows, per_workgroup: WORKGROUP / lanes(c) };
    kernel.grid = Grid { items_at_most, y, ..Grid::default() };
    kernel
}

/// Whether there are kernels for this shape; if not, what they need.
pub(super) fn supports(c: &Context<'_>) -> Result<(), &'static str> {
    let layout = &c.shape.layout;
    let [keys, values] = [Tensor::Keys, Tensor::Values].map(|tensor| layout.tensor(tensor));
    if ![64, 128].contains(&layout.head_dim) {
        return Err("head_dim = 64 or 128");
    }
    if layout.group < layout.head_dim / 4 {
        return Err("group_size >= head_dim / 4");
    }
    if (keys.axis, values.axis) != (Axis::PerChannel, Axis::PerToken) {
        return Err("keys per channel and values per token");
    }
    if values.channel_groups() > 4 {
        return Err("value_group_size >= head_dim / 4");
    }
    Ok(())
}
