// Four channels of a token in a packed page.
//
// Constants: CHANNEL_GROUP, GROUP, KEYS_PER_TOKEN, KEY_BITS, KEY_COMPACT, KEY_GROUPS, KEY_LOW_BITS,
// KEY_LOW_WORDS, KEY_PARAMS, PACKED_FORMAT, VALUES_PER_CHANNEL, VALUE_BITS, VALUE_CODES, VALUE_COMPACT,
// VALUE_GROUPS, VALUE_LOW_BITS, VALUE_LOW_WORDS, VALUE_PARAMS, VALUE_ROW_WORDS.
// Records: Split.

// The codes of channels 4v to 4v + 3 of a row of `bits` wide codes, from the word that holds them.
fn four_codes(word: u32, v: u32, bits: u32) -> vec4<f32> {
    let shift = (4u * bits * v) % 32u;
    let codes = (vec4<u32>(word) >> (vec4<u32>(0u, 1u, 2u, 3u) * bits + shift)) & vec4<u32>((1u << bits) - 1u);
    return vec4<f32>(codes);
}

// The high bits of the same channels, from the word that holds them.
fn four_high_bits(word: u32, v: u32, low_bits: u32) -> vec4<f32> {
    let bits = (vec4<u32>(word) >> (vec4<u32>(0u, 1u, 2u, 3u) + (4u * v) % 32u)) & vec4<u32>(1u);
    return vec4<f32>(bits << vec4<u32>(low_bits));
}

fn key_vector(split: Split, head: u32, token: u32, v: u32) -> vec4<f32> {
    let first = head_words(split, head, token);
    let in_block = token % GROUP;
    if (KEY_BITS == 16u) {
        let f = PACKED_FORMAT;
        return vec4<f32>(
            pair(f, slab[first + 2u * v * GROUP + in_block]), pair(f, slab[first + (2u * v + 1u) * GROUP + in_block]));
    }
    let word = slab[first + (4u * KEY_LOW_BITS * v / 32u) * GROUP + in_block];
    var codes = four_codes(word, v, KEY_LOW_BITS);
    if (KEY_BITS > KEY_LOW_BITS) {
        codes += four_high_bits(slab[first + (KEY_LOW_WORDS + v / 8u) * GROUP + in_block], v, KEY_LOW_BITS);
    }
    if (KEYS_PER_TOKEN) {
        let p = param_at(first + KEY_PARAMS, in_block * KEY_GROUPS + 4u * v / CHANNEL_GROUP, KEY_COMPACT);
        return fma(codes, vec4<f32>(p.x), vec4<f32>(p.y));
    }
    let p = four_params((first + KEY_PARAMS) / 4u, v, KEY_COMPACT);
    return fma(codes, scales(p, KEY_COMPACT), minima(p, KEY_COMPACT));
}

fn value_vector(split: Split, head: u32, token: u32, v: u32) -> vec4<f32> {
    let first = head_words(split, head, token);
    let in_block = token % GROUP;
    let row = first + VALUE_CODES + in_block * VALUE_ROW_WORDS;
    if (VALUE_BITS == 16u) {
        let f = PACKED_FORMAT;
        return vec4<f32>(pair(f, slab[row + 2u * v]), pair(f, slab[row + 2u * v + 1u]));
    }
    var codes = four_codes(slab[row + 4u * VALUE_LOW_BITS * v / 32u], v, VALUE_LOW_BITS);
    if (VALUE_BITS > VALUE_LOW_BITS) {
        codes += four_high_bits(slab[row + VALUE_LOW_WORDS + v / 8u], v, VALUE_LOW_BITS);
    }
    if (VALUES_PER_CHANNEL) {
        let p = four_params((first + VALUE_PARAMS) / 4u, v, VALUE_COMPACT);
        return fma(codes, scales(p, VALUE_COMPACT), minima(p, VALUE_COMPACT));
    }
    let p = param_at(first + VALUE_PARAMS, in_block * VALUE_GROUPS + 4u * v / CHANNEL_GROUP, VALUE_COMPACT);
    return fma(codes, vec4<f32>(p.x), vec4<f32>(p.y));
}
