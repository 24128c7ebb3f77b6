// Attention of long chunks over unpacked tokens: extends the partial results of a tile of rows. Twin:
// src/oracle/attend_unpacked.rs.
//
// | binding | what | access |
// |---|---|---|
// | 0, 1 of group 0 | params, plan: runs, splits, tiles, slot lists | read |
// | 3, 4 | sink slots and rings, staging, as vec4 | read |
// | 5 | partial results | read, write |
// | 0, 1 of group 1 | io, host's queries | read |
//
// Grid: x, z runs; y KV heads.
//
// Records: Split.

fn key_vector(split: Split, head: u32, token: u32, v: u32) -> vec4<f32> {
    return token_vector(split, 0u, head, token, v);
}

fn value_vector(split: Split, head: u32, token: u32, v: u32) -> vec4<f32> {
    return token_vector(split, 1u, head, token, v);
}

@compute @workgroup_size(PREFILL_WORKGROUP)
fn prefill_unpacked(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    prefill_run(workgroup, local);
}
