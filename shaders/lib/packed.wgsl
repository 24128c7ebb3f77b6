// Packed pages: where they lie, and their parameters.
//
// Constants: BLOCK_WORDS, GROUP, HEAD_WORDS.
// Records: Split.

@group(0) @binding(2) var<storage, read> slab4: array<vec4<u32>>;

// Word `at` of the slab.
fn slab_word(at: u32) -> u32 {
    return slab4[at / 4u][at % 4u];
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
        return group_param(slab_word(at + n / 2u) >> (16u * (n % 2u)), true);
    }
    return group_param(slab_word(at + n), false);
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
