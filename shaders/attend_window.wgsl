// Decode attention over unpacked tokens: sinks, residual window, and the step's own new tokens. Twin: src/oracle/attend_window.rs.
//
// | binding | what | access |
// |---|---|---|
// | 0, 1 of group 0 | params, plan: splits, tiles, slot lists | read |
// | 2, 3 | sink slots and rings, staging, as vec4 | read |
// | 4 | partial results | write |
// | 0, 1 of group 1 | io, host's queries | read |
//
// Grid: x, z splits; y KV heads.

// Logits of one token for up to four rows.
fn token_logits(slot: u32, head: u32, row: u32) -> vec4<f32> {
    var sum: Dots;
    for (var v = 0u; v < ROW_VECS; v++) {
        let words = fetch(slot, 0u, head, v);
        if (WINDOW_FORMAT == F32) {
            add_dots(&sum, row, v, bitcast<vec4<f32>>(words));
        } else {
            add_dots(&sum, row, 2u * v, vec4<f32>(pair(WINDOW_FORMAT, words.x), pair(WINDOW_FORMAT, words.y)));
            add_dots(&sum, row, 2u * v + 1u, vec4<f32>(pair(WINDOW_FORMAT, words.z), pair(WINDOW_FORMAT, words.w)));
        }
    }
    return finish_dots(sum);
}

fn tile_logits(split: Split, head: u32, quad: u32, row: u32, query_unit: vec4<f32>) -> Logits {
    let token = 4u * quad;
    if (token >= split.tokens) {
        return Logits();
    }
    let l0 = token_logits(slot_of(split, token), head, row);
    let l1 = token_logits(slot_of(split, token + 1u), head, row);
    let l2 = token_logits(slot_of(split, token + 2u), head, row);
    let l3 = token_logits(slot_of(split, token + 3u), head, row);
    return Logits(
        vec4<f32>(l0.x, l1.x, l2.x, l3.x),
        vec4<f32>(l0.y, l1.y, l2.y, l3.y),
        vec4<f32>(l0.z, l1.z, l2.z, l3.z),
        vec4<f32>(l0.w, l1.w, l2.w, l3.w),
    );
}

// A chunk of channels that reaches past the row reads its neighbour; those sums are not written.
fn add_token(sums: ptr<function, Sums>, slot: u32, head: u32, chunk: u32, p: vec2<f32>) {
    (*sums).weights += p;
    add_weighted(sums, token_channels(slot, 1u, head, chunk), p);
}

fn tile_values(split: Split, head: u32, chunk: u32, row: u32, begin: u32, end: u32) -> Sums {
    var sums: Sums;
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
fn attend_window(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    attend_split(group, local);
}
