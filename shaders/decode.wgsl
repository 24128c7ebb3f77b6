// Decode attention: a run of splits of one sequence extends a partial result per row. Twin:
// src/oracle/attend.rs.
//
// | binding | what | access |
// |---|---|---|
// | 0, 1 of group 0 | params, plan: runs, splits, tiles, slot lists | read |
// | 2 | slab, as vec4 | read |
// | 3, 4 | sink slots and rings, staging, as vec4 | read |
// | 5 | partial results | read, write |
// | 0, 1 of group 1 | io, host's queries | read |
//
// Grid: x, z runs; y KV heads. lib/decode.wgsl does the work.
//
// Constants: WORKGROUP.

@compute @workgroup_size(WORKGROUP)
fn decode(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    decode_run(workgroup, local);
}
