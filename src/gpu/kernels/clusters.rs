//! Attention by clusters of invocations that exchange data by subgroup shuffles: no workgroup memory, no
//! barrier.

use super::needs::Needs;
use super::source::{Piece, pieces};
use super::{Bindings, Context, Grid, GridY, Kernel};
use crate::format::{Axis, Tensor};

/// Invocations of a workgroup of clusters.
pub(super) const WORKGROUP: u32 = 32;

const PACKED: &str = "src/oracle/attend_packed.rs";
const UNPACKED: &str = "src/oracle/attend_unpacked.rs";

/// Invocations of a cluster: each owns 16 channels.
pub(super) fn lanes(c: &Context<'_>) -> u32 {
    c.shape.layout.head_dim / 16
}

/// Decode steps over packed pages.
pub(super) fn decode_packed(c: &Context<'_>, rows: u32) -> Kernel {
    let kernel = Kernel::new(c, "decode_packed", PACKED, Bindings::Attend, packed_pieces());
    // Loading the queries takes as long as a part of a page.
    clustered(c, kernel.with(pieces!["decode_packed_clusters.wgsl"]), rows, 8, false)
}

/// Decode steps over unpacked tokens.
pub(super) fn decode_unpacked(c: &Context<'_>, rows: u32) -> Kernel {
    let kernel = Kernel::new(c, "decode_unpacked", UNPACKED, Bindings::Attend, unpacked_pieces());
    clustered(c, kernel.with(pieces!["decode_unpacked_clusters.wgsl"]), rows, 1, false)
}

/// Long chunks over packed pages.
pub(super) fn prefill_packed(c: &Context<'_>) -> Kernel {
    let kernel = Kernel::new(c, "prefill_packed", PACKED, Bindings::Attend, packed_pieces());
    clustered(c, kernel.with(pieces!["prefill_packed_clusters.wgsl"]), c.tiles.prefill_tile(), 1, true)
}

/// Long chunks over unpacked tokens.
pub(super) fn prefill_unpacked(c: &Context<'_>) -> Kernel {
    let kernel = Kernel::new(c, "prefill_unpacked", UNPACKED, Bindings::Attend, unpacked_pieces());
    clustered(c, kernel.with(pieces!["prefill_unpacked_clusters.wgsl"]), c.tiles.prefill_tile(), 1, true)
}

fn packed_pieces() -> [Piece; 5] {
    pieces![
        "lib/rows.wgsl",
        "lib/packed.wgsl",
        "lib/products.wgsl",
        "lib/clusters.wgsl",
        "lib/clusters_packed.wgsl"
    ]
}

fn unpacked_pieces() -> [Piece; 4] {
    pieces!["lib/rows.wgsl", "lib/slots.wgsl", "lib/clusters.wgsl", "lib/clusters_window.wgsl"]
}

/// Adds what lib/clusters.wgsl reads. A cluster takes up to four rows.
fn clustered(c: &Context<'_>, mut kernel: Kernel, rows: u32, items_at_most: u32, prefill: bool) -> Kernel {
    let cluster_rows = rows.min(4);
    let k = &mut kernel.constants;
    k.u32("ROWS", rows);
    k.u32("WORKGROUP", WORKGROUP);
    k.u32("LANES", lanes(c));
    k.u32("KEY_ROWS", cluster_rows);
    k.u32("ROW_GROUPS", rows / cluster_rows);
    k.u32("ITEMS_AT_MOST", items_at_most);
    k.flag("PREFILL", prefill);
    kernel.needs = Needs {
        features: wgpu::Features::SUBGROUP,
        subgroup_size: lanes(c),
        linear_lanes: true,
        ..Needs::default()
    };
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
