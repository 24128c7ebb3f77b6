// Attention of long chunks over unpacked tokens, by clusters of invocations: extends the partial results of a
// tile of rows. Twin: src/oracle/attend_unpacked.rs.
//
// | binding | what | access |
// |---|---|---|
// | 0, 1 of group 0 | params, plan | read |
// | 3, 4 | sink slots and rings, staging, as vec4 | read |
// | 5 | partial results | read, write |
// | 0, 1, 2 of group 1 | io, host's queries as words and as vec4 | read |
//
// Grid: x, z runs; y clusters, one per KV head and KEY_ROWS rows.
//
// Constants: WORKGROUP.

@compute @workgroup_size(WORKGROUP)
fn prefill_unpacked(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
    @builtin(subgroup_invocation_id) in_subgroup: u32,
) {
    attend_cluster(workgroup, local, in_subgroup);
}
