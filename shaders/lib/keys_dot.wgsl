// Logits of a packed page by integer dot products: the queries times the scales, rounded to 8 bits per row
// and block, times the codes. What rounding adds to the logits is noise of a few per cent of what 2-bit codes
// have added already; integer sums are exact. lib/keys_quantized.wgsl comes before.
//
// Constants: BLOCKS_PER_PAGE, GROUP, HEAD_DIM, KEY_LOW_BITS, KEY_ROWS, KEY_SLICES, QUERY_VECS, ROWS.
// Records: Split.

// Chunks of 16 channels: four words of queries, one vector.
const DOT_CHUNKS: u32 = HEAD_DIM / 16u;

// Rounded queries [block][row][chunk].
var<workgroup> sh_rounded: array<vec4<u32>, BLOCKS_PER_PAGE * ROWS * DOT_CHUNKS>;

// Scales of a chunk in the order of the codes.
fn chunk_scales(first: u32, chunk: u32) -> Parts {
    if (KEY_LOW_BITS == 2u) {
        return word_scales(first, chunk);
    }
    let low = word_scales(first, 2u * chunk);
    let high = word_scales(first, 2u * chunk + 1u);
    return Parts(low.p0, low.p1, high.p0, high.p1);
}

fn scaled_query(row: u32, chunk: u32, s: Parts) -> Parts {
    let at = row * QUERY_VECS + 4u * chunk;
    return Parts(sh[at] * s.p0, sh[at + 1u] * s.p1, sh[at + 2u] * s.p2, sh[at + 3u] * s.p3);
}

fn largest_part(x: Parts) -> f32 {
    let m = max(max(abs(x.p0), abs(x.p1)), max(abs(x.p2), abs(x.p3)));
    return max(max(m.x, m.y), max(m.z, m.w));
}

// Four numbers times `inverse`, rounded to even, as bytes. Adding 1.5 * 2^23 leaves an integer in the low
// bits of the sum: conversions and pack4xI8 take NVIDIA's and AMD's GPUs many times as long.
fn rounded_bytes(x: vec4<f32>, inverse: f32) -> u32 {
    let n = bitcast<vec4<u32>>(fma(x, vec4<f32>(inverse), vec4<f32>(12582912.0))) & vec4<u32>(0xffu);
    return n.x | (n.y << 8u) | (n.z << 16u) | (n.w << 24u);
}

fn rounded(x: Parts, inverse: f32) -> vec4<u32> {
    return vec4<u32>(
        rounded_bytes(x.p0, inverse), rounded_bytes(x.p1, inverse), rounded_bytes(x.p2, inverse), rounded_bytes(x.p3, inverse));
}

// Rounds the queries for every block, and returns per row what a unit of them stands for in the invocation's
// own block. The lanes that share a block divide its chunks among them. Ends with a barrier.
fn prepare_queries(split: Split, head: u32, quad: u32, slice: u32, row: u32, local: u32) -> vec4<f32> {
    let used = 4u * quad < split.tokens;
    let first = head_words(split, head, min(4u * quad, split.tokens - 1u));
    let lane = lane_of(quad, slice);
    var most = vec4<f32>();
    for (var chunk = lane; chunk < DOT_CHUNKS; chunk += BLOCK_LANES) {
        let s = chunk_scales(first, chunk);
        most.x = max(most.x, largest_part(scaled_query(row, chunk, s)));
        if (KEY_ROWS > 1u) {
            most.y = max(most.y, largest_part(scaled_query(row + 1u, chunk, s)));
        }
        if (KEY_ROWS > 2u) {
            most.z = max(most.z, largest_part(scaled_query(row + 2u, chunk, s)));
            most.w = max(most.w, largest_part(scaled_query(row + 3u, chunk, s)));
        }
    }
    sh[SH_BLOCK + local] = most;
    workgroupBarrier();
    for (var i = 0u; i < min(BLOCK_LANES, DOT_CHUNKS); i++) {
        most = max(most, sh[SH_BLOCK + block_lane(local - slice * QUADS, i)]);
    }
    let unit = most / 127.0;
    let inverse = select(vec4<f32>(), 127.0 / max(most, vec4<f32>(1.0e-30)), most > vec4<f32>(1.0e-30));
    let block = 4u * quad / GROUP;
    if (used) {
        for (var chunk = lane; chunk < DOT_CHUNKS; chunk += BLOCK_LANES) {
            let s = chunk_scales(first, chunk);
            let at = (block * ROWS + row) * DOT_CHUNKS + chunk;
            sh_rounded[at] = rounded(scaled_query(row, chunk, s), inverse.x);
            if (KEY_ROWS > 1u) {
                sh_rounded[at + DOT_CHUNKS] = rounded(scaled_query(row + 1u, chunk, s), inverse.y);
            }
            if (KEY_ROWS > 2u) {
                sh_rounded[at + 2u * DOT_CHUNKS] = rounded(scaled_query(row + 2u, chunk, s), inverse.z);
                sh_rounded[at + 3u * DOT_CHUNKS] = rounded(scaled_query(row + 3u, chunk, s), inverse.w);
            }
        }
    }
    workgroupBarrier();
    return unit;
}

// In a function of its own: where several calls in one block share an argument, naga's MSL declares it twice.
fn dot_bytes(a: u32, b: u32) -> i32 {
    return dot4I8Packed(a, b);
}

// One row's products with a part of four tokens' codes: bytes of 0 to 15, so signed products are right.
fn four_dots(sum: vec4<i32>, q: u32, codes: vec4<u32>) -> vec4<i32> {
    return sum
        + vec4<i32>(
            dot_bytes(q, codes.x), dot_bytes(q, codes.y), dot_bytes(q, codes.z), dot_bytes(q, codes.w));
}

fn chunk_dots(sum: vec4<i32>, q: vec4<u32>, c0: vec4<u32>, c1: vec4<u32>, c2: vec4<u32>, c3: vec4<u32>) -> vec4<i32> {
    return four_dots(four_dots(four_dots(four_dots(sum, q.x, c0), q.y, c1), q.z, c2), q.w, c3);
}

// Adds the products of the slice's chunks.
fn add_logits(logits: ptr<function, Logits>, split: Split, head: u32, quad: u32, slice: u32, row: u32, query_unit: vec4<f32>) {
    let token = 4u * quad;
    if (token >= split.tokens) {
        return;
    }
    let first = head_words(split, head, token);
    let at = (first + token % GROUP) / 4u;
    let of_block = (token / GROUP) * ROWS + row;
    var sum0 = vec4<i32>();
    var sum1 = vec4<i32>();
    var sum2 = vec4<i32>();
    var sum3 = vec4<i32>();
    for (var chunk = slice; chunk < DOT_CHUNKS; chunk += KEY_SLICES) {
        var c0 = vec4<u32>();
        var c1 = vec4<u32>();
        var c2 = vec4<u32>();
        var c3 = vec4<u32>();
        if (KEY_LOW_BITS == 2u) {
            let words = slab4[at + chunk * (GROUP / 4u)];
            let bits = high_bits(at, chunk);
            c0 = key_part(words, bits, 0u);
            c1 = key_part(words, bits, 1u);
            c2 = key_part(words, bits, 2u);
            c3 = key_part(words, bits, 3u);
        } else {
            let low = slab4[at + 2u * chunk * (GROUP / 4u)];
            let high = slab4[at + (2u * chunk + 1u) * (GROUP / 4u)];
            c0 = key_part(low, low, 0u);
            c1 = key_part(low, low, 1u);
            c2 = key_part(high, high, 0u);
            c3 = key_part(high, high, 1u);
        }
        let q = of_block * DOT_CHUNKS + chunk;
        sum0 = chunk_dots(sum0, sh_rounded[q], c0, c1, c2, c3);
        if (KEY_ROWS > 1u) {
            sum1 = chunk_dots(sum1, sh_rounded[q + DOT_CHUNKS], c0, c1, c2, c3);
        }
        if (KEY_ROWS > 2u) {
            sum2 = chunk_dots(sum2, sh_rounded[q + 2u * DOT_CHUNKS], c0, c1, c2, c3);
            sum3 = chunk_dots(sum3, sh_rounded[q + 3u * DOT_CHUNKS], c0, c1, c2, c3);
        }
    }
    (*logits).r0 += vec4<f32>(sum0) * query_unit.x;
    if (KEY_ROWS > 1u) {
        (*logits).r1 += vec4<f32>(sum1) * query_unit.y;
    }
    if (KEY_ROWS > 2u) {
        (*logits).r2 += vec4<f32>(sum2) * query_unit.z;
        (*logits).r3 += vec4<f32>(sum3) * query_unit.w;
    }
}
