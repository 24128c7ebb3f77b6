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

const BIAS_LANES: u32 = 0u;
fn query_channel(v: u32, i: u32) -> u32 {
    return 4u * v + i;
}

fn bias_part(split: Split, head: u32, quad: u32, row: u32) -> vec4<f32> {
    return vec4<f32>();
}

fn prepare_queries(split: Split, head: u32, quad: u32, row: u32, local: u32) -> vec4<f32> {
    return vec4<f32>();
}

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

// 16 channels of one token's value. A chunk that reaches past the row reads its neighbour; those sums are not written.
struct Channels {
    c0: vec4<f32>,
    c1: vec4<f32>,
    c2: vec4<f32>,
    c3: vec4<f32>,
}

fn channels(slot: u32, head: u32, chunk: u32) -> Channels {
    if (WINDOW_FORMAT == F32) {
        return Channels(
            bitcast<vec4<f32>>(fetch(slot, 1u, head, 4u * chunk)),
            bitcast<vec4<f32>>(fetch(slot, 1u, head, 4u * chunk + 1u)),
            bitcast<vec4<f32>>(fetch(slot, 1u, head, 4u * chunk + 2u)),
            bitcast<vec4<f32>>(fetch(slot, 1u, head, 4u * chunk + 3u)),
        );
    }
    let low = fetch(slot, 1u, head, 2u * chunk);
    let high = fetch(slot, 1u, head, 2u * chunk + 1u);
    return Channels(
        vec4<f32>(pair(WINDOW_FORMAT, low.x), pair(WINDOW_FORMAT, low.y)),
        vec4<f32>(pair(WINDOW_FORMAT, low.z), pair(WINDOW_FORMAT, low.w)),
        vec4<f32>(pair(WINDOW_FORMAT, high.x), pair(WINDOW_FORMAT, high.y)),
        vec4<f32>(pair(WINDOW_FORMAT, high.z), pair(WINDOW_FORMAT, high.w)),
    );
}

fn add_token(sums: ptr<function, Sums>, slot: u32, head: u32, chunk: u32, p: vec2<f32>) {
    let x = channels(slot, head, chunk);
    (*sums).weights += p;
    (*sums).a0 = fma(vec4<f32>(p.x), x.c0, (*sums).a0);
    (*sums).a1 = fma(vec4<f32>(p.x), x.c1, (*sums).a1);
    (*sums).a2 = fma(vec4<f32>(p.x), x.c2, (*sums).a2);
    (*sums).a3 = fma(vec4<f32>(p.x), x.c3, (*sums).a3);
    if (VALUE_ROWS > 1u) {
        (*sums).b0 = fma(vec4<f32>(p.y), x.c0, (*sums).b0);
        (*sums).b1 = fma(vec4<f32>(p.y), x.c1, (*sums).b1);
        (*sums).b2 = fma(vec4<f32>(p.y), x.c2, (*sums).b2);
        (*sums).b3 = fma(vec4<f32>(p.y), x.c3, (*sums).b3);
    }
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
