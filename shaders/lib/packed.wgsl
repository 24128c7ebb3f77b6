// Packed pages: where they lie and how their codes and parameters are unpacked.
//
// Constants: BLOCK_WORDS, GROUP, HEAD_WORDS, KEY_BITS, KEY_BYTE_MASK, KEY_LOW_BITS, KEY_LOW_WORDS,
// VALUE_BITS, VALUE_BYTE_MASK, VALUE_LOW_BITS, VALUE_LOW_WORDS.
// Records: Split.

@group(0) @binding(2) var<storage, read> slab4: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> slab: array<u32>;

// A word of the low plane holds codes j, j + P, j + 2P, j + 3P with P = 8 / its width at the bottom of its
// four bytes once it is shifted by j codes: part j. A word of a plane of single bits holds 32 codes. `spread`
// puts the bits of 16 channels where part j finds those of its codes, once shifted by j.
fn spread(bits: u32) -> u32 {
    let pairs = (bits | (bits << 8u)) & 0x00ff00ffu;
    return (pairs | (pairs << 4u)) & 0x0f0f0f0fu;
}

fn key_part(low: vec4<u32>, high: vec4<u32>, part: u32) -> vec4<u32> {
    let codes = (low >> vec4<u32>(part * KEY_LOW_BITS)) & vec4<u32>(KEY_BYTE_MASK);
    if (KEY_BITS > KEY_LOW_BITS) {
        return codes | (((high >> vec4<u32>(part)) & vec4<u32>(0x01010101u)) << vec4<u32>(KEY_LOW_BITS));
    }
    return codes;
}

// Four tokens' high bits of the channels of word `word` of the low plane, `at` being vector 0 of their row
// words; nothing if there is one plane.
fn high_bits(at: u32, word: u32) -> vec4<u32> {
    if (KEY_BITS > KEY_LOW_BITS) {
        let w = slab4[at + (KEY_LOW_WORDS + word / 2u) * (GROUP / 4u)] >> vec4<u32>(16u * (word % 2u));
        return vec4<u32>(spread(w.x & 0xffffu), spread(w.y & 0xffffu), spread(w.z & 0xffffu), spread(w.w & 0xffffu));
    }
    return vec4<u32>();
}

fn key_codes(codes: u32) -> vec4<f32> {
    return vec4<f32>(unpack4xU8(codes));
}

fn value_codes(word: u32) -> vec4<f32> {
    return vec4<f32>(unpack4xU8(word & VALUE_BYTE_MASK));
}

// Part `part` of 16 codes in two planes.
fn value_plane_codes(low: u32, high: u32, part: u32) -> vec4<f32> {
    let codes = (low >> (part * VALUE_LOW_BITS)) & VALUE_BYTE_MASK;
    return vec4<f32>(unpack4xU8(codes | (((high >> part) & 0x01010101u) << VALUE_LOW_BITS)));
}

// 16 codes of one token's value from the words that hold them, one vector per part; of codes in two planes
// the second word is `spread`.
fn value_parts(w: vec4<u32>) -> Parts {
    if (VALUE_BITS > VALUE_LOW_BITS) {
        return Parts(
            value_plane_codes(w.x, w.y, 0u), value_plane_codes(w.x, w.y, 1u), value_plane_codes(w.x, w.y, 2u), value_plane_codes(w.x, w.y, 3u));
    }
    if (VALUE_BITS == 2u) {
        return Parts(value_codes(w.x), value_codes(w.x >> 2u), value_codes(w.x >> 4u), value_codes(w.x >> 6u));
    }
    if (VALUE_BITS == 4u) {
        return Parts(value_codes(w.x), value_codes(w.x >> 4u), value_codes(w.y), value_codes(w.y >> 4u));
    }
    return Parts(value_codes(w.x), value_codes(w.y), value_codes(w.z), value_codes(w.w));
}

// The words of chunk `chunk` of 16 codes of a row, for `value_parts`.
fn chunk_words(row: u32, chunk: u32) -> vec4<u32> {
    let at = row + chunk * (VALUE_LOW_BITS / 2u);
    var w = vec4<u32>(slab[at], 0u, 0u, 0u);
    if (VALUE_BITS > VALUE_LOW_BITS) {
        let high = slab[row + VALUE_LOW_WORDS + chunk / 2u] >> (16u * (chunk % 2u));
        w.y = spread(high & 0xffffu);
    }
    if (VALUE_LOW_BITS > 2u) {
        w.y = slab[at + 1u];
    }
    if (VALUE_LOW_BITS > 4u) {
        w.z = slab[at + 2u];
        w.w = slab[at + 3u];
    }
    return w;
}

// A part (`key_part`) of four channels of four tokens: a channel per vector.
fn key_channels(codes: vec4<u32>) -> Parts {
    let c0 = key_codes(codes.x);
    let c1 = key_codes(codes.y);
    let c2 = key_codes(codes.z);
    let c3 = key_codes(codes.w);
    return Parts(
        vec4<f32>(c0.x, c1.x, c2.x, c3.x),
        vec4<f32>(c0.y, c1.y, c2.y, c3.y),
        vec4<f32>(c0.z, c1.z, c2.z, c3.z),
        vec4<f32>(c0.w, c1.w, c2.w, c3.w),
    );
}

// First word of `head` in the block that holds `token`.
fn head_words(split: Split, head: u32, token: u32) -> u32 {
    return (split.source + token / GROUP) * BLOCK_WORDS + head * HEAD_WORDS;
}

// A compact parameter, in the low half of `bits`: see param_scale and param_min of lib/quantizer.wgsl. A
// scale of 0 is none here, but then its codes and its minimum are.
fn compact_scale(bits: u32) -> f32 {
    return bitcast<f32>(((bits & 0xffu) << 20u) + (112u << 23u));
}

// Its minimum in scales.
fn compact_minimum(bits: u32) -> f32 {
    return f32(i32(bits << 17u) >> 25u) * select(0.25, 4.0, (bits & 0x8000u) != 0u);
}

// (scale, minimum) of a group.
fn group_param(bits: u32, compact: bool) -> vec2<f32> {
    if (compact) {
        let scale = compact_scale(bits);
        return vec2<f32>(scale, compact_minimum(bits) * scale);
    }
    return unpack2x16float(bits);
}

// The same of parameter `n` of those that begin at word `at`.
fn param_at(at: u32, n: u32, compact: bool) -> vec2<f32> {
    if (compact) {
        return group_param(slab[at + n / 2u] >> (16u * (n % 2u)), true);
    }
    return group_param(slab[at + n], false);
}

// Two words of compact parameters, one to an element.
fn halves(words: vec2<u32>) -> vec4<u32> {
    return vec4<u32>(words.x & 0xffffu, words.x >> 16u, words.y & 0xffffu, words.y >> 16u);
}

// Parameters 4 * `v` to 4 * `v` + 3 of those that begin at vector `at`.
fn four_params(at: u32, v: u32, compact: bool) -> vec4<u32> {
    if (compact) {
        let words = slab4[at + v / 2u];
        return halves(select(words.xy, words.zw, v % 2u == 1u));
    }
    return slab4[at + v];
}

fn scales(p: vec4<u32>, compact: bool) -> vec4<f32> {
    return vec4<f32>(
        group_param(p.x, compact).x,
        group_param(p.y, compact).x,
        group_param(p.z, compact).x,
        group_param(p.w, compact).x,
    );
}

fn minima(p: vec4<u32>, compact: bool) -> vec4<f32> {
    return vec4<f32>(
        group_param(p.x, compact).y,
        group_param(p.y, compact).y,
        group_param(p.z, compact).y,
        group_param(p.w, compact).y,
    );
}

fn permute(n0: vec4<f32>, n1: vec4<f32>, n2: vec4<f32>, n3: vec4<f32>) -> Parts {
    if (KEY_LOW_BITS == 2u) {
        return Parts(
            vec4<f32>(n0.x, n1.x, n2.x, n3.x),
            vec4<f32>(n0.y, n1.y, n2.y, n3.y),
            vec4<f32>(n0.z, n1.z, n2.z, n3.z),
            vec4<f32>(n0.w, n1.w, n2.w, n3.w),
        );
    }
    if (KEY_LOW_BITS == 4u) {
        return Parts(vec4<f32>(n0.xz, n1.xz), vec4<f32>(n0.yw, n1.yw), vec4<f32>(), vec4<f32>());
    }
    return Parts(n0, vec4<f32>(), vec4<f32>(), vec4<f32>());
}

// Back from the order of the parts to that of the channels, plus the minima's sum.
fn natural(a: Parts, zero: f32) -> Parts {
    let z = vec4<f32>(zero);
    if (VALUE_LOW_BITS == 2u) {
        return Parts(
            vec4<f32>(a.p0.x, a.p1.x, a.p2.x, a.p3.x) + z,
            vec4<f32>(a.p0.y, a.p1.y, a.p2.y, a.p3.y) + z,
            vec4<f32>(a.p0.z, a.p1.z, a.p2.z, a.p3.z) + z,
            vec4<f32>(a.p0.w, a.p1.w, a.p2.w, a.p3.w) + z,
        );
    }
    if (VALUE_LOW_BITS == 4u) {
        return Parts(
            vec4<f32>(a.p0.x, a.p1.x, a.p0.y, a.p1.y) + z,
            vec4<f32>(a.p0.z, a.p1.z, a.p0.w, a.p1.w) + z,
            vec4<f32>(a.p2.x, a.p3.x, a.p2.y, a.p3.y) + z,
            vec4<f32>(a.p2.z, a.p3.z, a.p2.w, a.p3.w) + z,
        );
    }
    return Parts(a.p0 + z, a.p1 + z, a.p2 + z, a.p3 + z);
}
