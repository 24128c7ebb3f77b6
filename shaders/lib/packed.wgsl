// Packed pages: where they lie and how their codes and parameters are unpacked.

@group(0) @binding(2) var<storage, read> slab4: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> slab: array<u32>;

// Codes j, j + P, j + 2P, j + 3P of a word, with P = 8 / bits: shifting by j codes brings them to the bottom of its four bytes.
fn key_codes(word: u32) -> vec4<f32> {
    return vec4<f32>(unpack4xU8(word & KEY_BYTE_MASK));
}

fn value_codes(word: u32) -> vec4<f32> {
    return vec4<f32>(unpack4xU8(word & VALUE_BYTE_MASK));
}

// First word of `head` in the block that holds `token`.
fn head_words(split: Split, head: u32, token: u32) -> u32 {
    return (split.source * BLOCKS_PER_PAGE + token / GROUP) * BLOCK_WORDS + head * HEAD_WORDS;
}

fn scales(p: vec4<u32>) -> vec4<f32> {
    return vec4<f32>(
        unpack2x16float(p.x).x,
        unpack2x16float(p.y).x,
        unpack2x16float(p.z).x,
        unpack2x16float(p.w).x,
    );
}

fn minima(p: vec4<u32>) -> vec4<f32> {
    return vec4<f32>(
        unpack2x16float(p.x).y,
        unpack2x16float(p.y).y,
        unpack2x16float(p.z).y,
        unpack2x16float(p.w).y,
    );
}

fn permute(n0: vec4<f32>, n1: vec4<f32>, n2: vec4<f32>, n3: vec4<f32>) -> Parts {
    if (KEY_BITS == 2u) {
        return Parts(
            vec4<f32>(n0.x, n1.x, n2.x, n3.x),
            vec4<f32>(n0.y, n1.y, n2.y, n3.y),
            vec4<f32>(n0.z, n1.z, n2.z, n3.z),
            vec4<f32>(n0.w, n1.w, n2.w, n3.w),
        );
    }
    if (KEY_BITS == 4u) {
        return Parts(vec4<f32>(n0.xz, n1.xz), vec4<f32>(n0.yw, n1.yw), vec4<f32>(), vec4<f32>());
    }
    return Parts(n0, vec4<f32>(), vec4<f32>(), vec4<f32>());
}

// Back from the order of the parts to that of the channels, plus the minima's sum.
fn natural(a: Parts, zero: f32) -> Parts {
    let z = vec4<f32>(zero);
    if (VALUE_BITS == 2u) {
        return Parts(
            vec4<f32>(a.p0.x, a.p1.x, a.p2.x, a.p3.x) + z,
            vec4<f32>(a.p0.y, a.p1.y, a.p2.y, a.p3.y) + z,
            vec4<f32>(a.p0.z, a.p1.z, a.p2.z, a.p3.z) + z,
            vec4<f32>(a.p0.w, a.p1.w, a.p2.w, a.p3.w) + z,
        );
    }
    if (VALUE_BITS == 4u) {
        return Parts(
            vec4<f32>(a.p0.x, a.p1.x, a.p0.y, a.p1.y) + z,
            vec4<f32>(a.p0.z, a.p1.z, a.p0.w, a.p1.w) + z,
            vec4<f32>(a.p2.x, a.p3.x, a.p2.y, a.p3.y) + z,
            vec4<f32>(a.p2.z, a.p3.z, a.p2.w, a.p3.w) + z,
        );
    }
    return Parts(a.p0 + z, a.p1 + z, a.p2 + z, a.p3 + z);
}

// One row's products with four channels of four tokens (`t0` to `t3` hold a channel each).
fn add_products(sum: vec4<f32>, q: vec4<f32>, t0: vec4<f32>, t1: vec4<f32>, t2: vec4<f32>, t3: vec4<f32>) -> vec4<f32> {
    return fma(vec4<f32>(q.w), t3, fma(vec4<f32>(q.z), t2, fma(vec4<f32>(q.y), t1, fma(vec4<f32>(q.x), t0, sum))));
}

// The elements of four 16-bit words: first and second of each.
struct FourPairs {
    first: vec4<f32>,
    second: vec4<f32>,
}

fn four_pairs(words: vec4<u32>) -> FourPairs {
    let x = pair(PACKED_FORMAT, words.x);
    let y = pair(PACKED_FORMAT, words.y);
    let z = pair(PACKED_FORMAT, words.z);
    let w = pair(PACKED_FORMAT, words.w);
    return FourPairs(vec4<f32>(x.x, y.x, z.x, w.x), vec4<f32>(x.y, y.y, z.y, w.y));
}

// 16 channels of one token in 16 bits.
fn sixteen_channels(low: vec4<u32>, high: vec4<u32>) -> Parts {
    let f = PACKED_FORMAT;
    return Parts(
        vec4<f32>(pair(f, low.x), pair(f, low.y)),
        vec4<f32>(pair(f, low.z), pair(f, low.w)),
        vec4<f32>(pair(f, high.x), pair(f, high.y)),
        vec4<f32>(pair(f, high.z), pair(f, high.w)),
    );
}
