// Whether the invocations of a workgroup are numbered as lib/clusters.wgsl needs: LANES consecutive ones
// share a subgroup, in order. No rule of WGSL or Vulkan says so; the host runs this before it chooses the
// cluster kernels.
//
// | binding | what | access |
// |---|---|---|
// | 0 of group 0 | 1 per invocation if so | write |
//
// Constants: LANES, WORKGROUP.

@group(0) @binding(0) var<storage, read_write> ordered: array<u32>;

@compute @workgroup_size(WORKGROUP)
fn lane_order(
    @builtin(local_invocation_index) local: u32,
    @builtin(subgroup_invocation_id) in_subgroup: u32,
) {
    let lane = in_subgroup % LANES;
    let first = subgroupShuffle(local, in_subgroup - lane);
    ordered[local] = select(0u, 1u, lane == local % LANES && first == local - lane);
}
