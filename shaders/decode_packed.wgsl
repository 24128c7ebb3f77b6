// Decode attention over one packed page: dequantizes on the fly, writes a partial result per row. Twin:
// src/oracle/attend_packed.rs.
//
// | binding | what | access |
// |---|---|---|
// | 0, 1 of group 0 | params, plan: splits, tiles | read |
// | 2, 3 | slab, as vec4 and as words | read |
// | 4 | partial results | write |
// | 0, 1 of group 1 | io, host's queries | read |
//
// Grid: x, z splits; y KV heads. Keys and values are read by lib/keys_*.wgsl and lib/values_*.wgsl.
//
// Constants: WORKGROUP.

@compute @workgroup_size(WORKGROUP)
fn decode_packed(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    decode_split(workgroup, local);
}
