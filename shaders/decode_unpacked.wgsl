// Decode attention over unpacked tokens: sinks, residual window, and the step's own new tokens. Twin:
// src/oracle/attend_unpacked.rs.
//
// | binding | what | access |
// |---|---|---|
// | 0, 1 of group 0 | params, plan: splits, tiles, slot lists | read |
// | 2, 3 | sink slots and rings, staging, as vec4 | read |
// | 4 | partial results | write |
// | 0, 1 of group 1 | io, host's queries | read |
//
// Grid: x, z splits; y KV heads.
//
// Constants: F32, KEY_SLICES, VALUE_ROWS, WINDOW_FORMAT, WORKGROUP.
// Records: Split.

// Adds the products of the slice's channels.
fn add_logits(logits: ptr<function, Logits>, split: Split, head: u32, quad: u32, slice: u32, row: u32, query_unit: vec4<f32>) {
    let token = 4u * quad;
    if (token >= split.tokens) {
        return;
    }
    let s0 = slot_of(split, token);
    let s1 = slot_of(split, token + 1u);
    let s2 = slot_of(split, token + 2u);
    let s3 = slot_of(split, token + 3u);
    for (var v = slice; v < ROW_VECS; v += KEY_SLICES) {
        let a = fetch(s0, 0u, head, v);
        let b = fetch(s1, 0u, head, v);
        let c = fetch(s2, 0u, head, v);
        let d = fetch(s3, 0u, head, v);
        let x = vec4<u32>(a.x, b.x, c.x, d.x);
        let y = vec4<u32>(a.y, b.y, c.y, d.y);
        let z = vec4<u32>(a.z, b.z, c.z, d.z);
        let w = vec4<u32>(a.w, b.w, c.w, d.w);
        if (WINDOW_FORMAT == F32) {
            let k = Parts(bitcast<vec4<f32>>(x), bitcast<vec4<f32>>(y), bitcast<vec4<f32>>(z), bitcast<vec4<f32>>(w));
            add_vector(logits, k, row, v);
        } else {
            add_vector(logits, pair_channels(WINDOW_FORMAT, x, y), row, 2u * v);
            add_vector(logits, pair_channels(WINDOW_FORMAT, z, w), row, 2u * v + 1u);
        }
    }
}

// A chunk of channels that reaches past the row reads its neighbour; those sums are not written.
fn add_token(sums: ptr<function, Sums>, slot: u32, head: u32, chunk: u32, p: vec2<f32>) {
    (*sums).weights += p;
    add_weighted(sums, token_channels(slot, 1u, head, chunk), p);
}

fn tile_values(split: Split, head: u32, chunk: u32, row: u32, begin: u32, end: u32) -> Sums {
    var sums = Sums();
    for (var quad = begin; quad < end; quad++) {
        let a = sh[row * QUADS + quad];
        var b = vec4<f32>();
        if (VALUE_ROWS > 1u) {
            b = sh[(row + 1u) * QUADS + quad];
        }
        let token = 4u * quad;
        add_token(&sums, slot_of(split, token), head, chunk, vec2<f32>(a.x, b.x));
        add_token(&sums, slot_of(split, token + 1u), head, chunk, vec2<f32>(a.y, b.y));
        add_token(&sums, slot_of(split, token + 2u), head, chunk, vec2<f32>(a.z, b.z));
        add_token(&sums, slot_of(split, token + 3u), head, chunk, vec2<f32>(a.w, b.w));
    }
    return sums;
}

@compute @workgroup_size(WORKGROUP)
fn decode_unpacked(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    decode_split(workgroup, local);
}
