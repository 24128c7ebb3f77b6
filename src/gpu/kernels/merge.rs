//! Partial results are joined.

use super::source::pieces;
use super::variant::MergeKernels;
use super::{Bindings, Context, Kernel};

/// A workgroup takes a row of a head: an invocation owns four channels and a share of the splits.
pub(super) fn merge(c: &Context<'_>, rows: u32) -> Kernel {
    let vecs = (c.shape.layout.head_dim / 4).next_power_of_two();
    let workgroup = match c.variant.merge() {
        MergeKernels::Wide => 256,
        // Few splits leave most invocations without work, which costs a software adapter more than it gains
        // with many.
        MergeKernels::Narrow => vecs.max(64),
    };
    let mut kernel = Kernel::new(c, "merge", "src/oracle/merge.rs", Bindings::Merge, pieces!["merge.wgsl"]);
    let k = &mut kernel.constants;
    k.u32("ROWS", rows);
    k.u32("MERGE_VECS", vecs);
    k.u32("MERGE_WORKGROUP", workgroup);
    k.u32("MERGE_SHARES", (workgroup / vecs).min(16));
    // A maximum, a sum and a vector for each.
    kernel.workgroup_bytes = 24 * workgroup;
    kernel.grid.per_record = rows;
    kernel
}
