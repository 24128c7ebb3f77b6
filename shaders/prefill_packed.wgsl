// Attention of long chunks over packed pages: extends the partial results of a tile of rows. Twin:
// src/oracle/attend_packed.rs.
//
// | binding | what | access |
// |---|---|---|
// | 0, 1 of group 0 | params, plan: runs, splits, tiles | read |
// | 2 | slab, as vec4 | read |
// | 5 | partial results | read, write |
// | 0, 1 of group 1 | io, host's queries | read |
//
// Grid: x, z runs; y KV heads. Keys and values are read by lib/vectors_packed.wgsl.

@compute @workgroup_size(PREFILL_WORKGROUP)
fn prefill_packed(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    prefill_run(workgroup, local);
}
