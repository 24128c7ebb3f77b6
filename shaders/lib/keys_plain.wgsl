// Keys without parameters, for lib/decode.wgsl: no bias, and queries in the order of the channels.
//
// Records: Split.

const BLOCK_LANES: u32 = 0u;
const BIAS_PARTS: u32 = 0u;

fn block_lane(local: u32, lane: u32) -> u32 {
    return local;
}

fn query_channel(v: u32, i: u32) -> u32 {
    return 4u * v + i;
}

fn bias_part(split: Split, head: u32, quad: u32, slice: u32, row: u32) -> vec4<f32> {
    return vec4<f32>();
}

// Adds the rows' products with vector `v` of four tokens' keys.
fn add_vector(logits: ptr<function, Logits>, k: Parts, row: u32, v: u32) {
    add_rows(logits, k, query(row, v), query(row + 1u, v), query(row + 2u, v), query(row + 3u, v));
}
