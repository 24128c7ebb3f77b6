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

// 16 codes of one token's value from the words that hold them, one vector per part.
fn value_parts(w: vec4<u32>) -> Parts {
    if (VALUE_BITS == 2u) {
        return Parts(value_codes(w.x), value_codes(w.x >> 2u), value_codes(w.x >> 4u), value_codes(w.x >> 6u));
    }
    if (VALUE_BITS == 4u) {
        return Parts(value_codes(w.x), value_codes(w.x >> 4u), value_codes(w.y), value_codes(w.y >> 4u));
    }
    return Parts(value_codes(w.x), value_codes(w.y), value_codes(w.z), value_codes(w.w));
}

// A part of four channels of four tokens, whose words are shifted so that its codes are at the bottom of their bytes: a channel per vector.
fn key_channels(words: vec4<u32>) -> Parts {
    let c0 = key_codes(words.x);
    let c1 = key_codes(words.y);
    let c2 = key_codes(words.z);
    let c3 = key_codes(words.w);
    return Parts(
        vec4<f32>(c0.x, c1.x, c2.x, c3.x),
        vec4<f32>(c0.y, c1.y, c2.y, c3.y),
        vec4<f32>(c0.z, c1.z, c2.z, c3.z),
        vec4<f32>(c0.w, c1.w, c2.w, c3.w),
    );
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
