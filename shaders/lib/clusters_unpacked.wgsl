// Units of unpacked tokens for lib/clusters.wgsl.
//
// Constants: F32, KEY_ROWS, LANES, WINDOW_FORMAT.
// Records: Split.

// 16 channels from eight words of 16-bit elements.
fn sixteen_channels(format: u32, low: vec4<u32>, high: vec4<u32>) -> Parts {
    return Parts(
        vec4<f32>(pair(format, low.x), pair(format, low.y)),
        vec4<f32>(pair(format, low.z), pair(format, low.w)),
        vec4<f32>(pair(format, high.x), pair(format, high.y)),
        vec4<f32>(pair(format, high.z), pair(format, high.w)),
    );
}

// Chunk `chunk` of 16 channels of a token's key or value. A chunk that reaches past the row reads its
// neighbour.
fn token_channels(slot: u32, tensor: u32, head: u32, chunk: u32) -> Parts {
    if (WINDOW_FORMAT == F32) {
        return Parts(
            bitcast<vec4<f32>>(fetch(slot, tensor, head, 4u * chunk)),
            bitcast<vec4<f32>>(fetch(slot, tensor, head, 4u * chunk + 1u)),
            bitcast<vec4<f32>>(fetch(slot, tensor, head, 4u * chunk + 2u)),
            bitcast<vec4<f32>>(fetch(slot, tensor, head, 4u * chunk + 3u)),
        );
    }
    let low = fetch(slot, tensor, head, 2u * chunk);
    let high = fetch(slot, tensor, head, 2u * chunk + 1u);
    return sixteen_channels(WINDOW_FORMAT, low, high);
}

// The slots of the lane's own four tokens.
fn own_slots(split: Split, first: u32, lane: u32) -> vec4<u32> {
    let token = first + 4u * lane;
    return vec4<u32>(
        slot_of(split, token), slot_of(split, token + 1u), slot_of(split, token + 2u), slot_of(split, token + 3u));
}

fn dot_lane(q: Parts, x: Parts) -> f32 {
    let sum = fma(q.p3, x.p3, fma(q.p2, x.p2, fma(q.p1, x.p1, q.p0 * x.p0)));
    return (sum.x + sum.y) + (sum.z + sum.w);
}

// The rows' products with one token in the lane's channels.
fn dot_rows(q: Rows, x: Parts) -> vec4<f32> {
    var d = vec4<f32>(dot_lane(q.r0, x), 0.0, 0.0, 0.0);
    if (KEY_ROWS > 1u) {
        d.y = dot_lane(q.r1, x);
    }
    if (KEY_ROWS > 2u) {
        d.z = dot_lane(q.r2, x);
        d.w = dot_lane(q.r3, x);
    }
    return d;
}

fn token_logits(split: Split, head: u32, first: u32, lane: u32, base: u32, q: Rows) -> Logits {
    let slots = own_slots(split, first, lane);
    var logits = Logits();
    for (var quad = 0u; quad < LANES; quad++) {
        let s = subgroupShuffle(slots, base + quad);
        let a = dot_rows(q, token_channels(s.x, 0u, head, lane));
        let b = dot_rows(q, token_channels(s.y, 0u, head, lane));
        let c = dot_rows(q, token_channels(s.z, 0u, head, lane));
        let d = dot_rows(q, token_channels(s.w, 0u, head, lane));
        let share = Logits(
            vec4<f32>(a.x, b.x, c.x, d.x), vec4<f32>(a.y, b.y, c.y, d.y), vec4<f32>(a.z, b.z, c.z, d.z), vec4<f32>(a.w, b.w, c.w, d.w));
        give(&logits, share, lane == quad);
    }
    return logits;
}

fn token_values(split: Split, head: u32, first: u32, lane: u32, base: u32, p: Logits) -> Sums {
    let slots = own_slots(split, first, lane);
    var sums = Sums();
    for (var quad = 0u; quad < LANES; quad++) {
        let owner = base + quad;
        let s = subgroupShuffle(slots, owner);
        let w0 = subgroupShuffle(p.r0, owner);
        let w1 = subgroupShuffle(p.r1, owner);
        let w2 = subgroupShuffle(p.r2, owner);
        let w3 = subgroupShuffle(p.r3, owner);
        add_weighted(&sums, token_channels(s.x, 1u, head, lane), vec4<f32>(w0.x, w1.x, w2.x, w3.x));
        add_weighted(&sums, token_channels(s.y, 1u, head, lane), vec4<f32>(w0.y, w1.y, w2.y, w3.y));
        add_weighted(&sums, token_channels(s.z, 1u, head, lane), vec4<f32>(w0.z, w1.z, w2.z, w3.z));
        add_weighted(&sums, token_channels(s.w, 1u, head, lane), vec4<f32>(w0.w, w1.w, w2.w, w3.w));
    }
    return sums;
}
