// Four channels of a token in a packed page. lib/code_bit.wgsl comes before.
//
// Constants: CHANNEL_GROUP, GROUP, HEAD_DIM, KEYS_PER_TOKEN, KEY_BITS, KEY_COMPACT, KEY_GROUPS, KEY_LOW_BITS,
// KEY_LOW_WORDS, KEY_PARAMS, PACKED_FORMAT, VALUES_PER_CHANNEL, VALUE_BITS, VALUE_CODES, VALUE_COMPACT,
// VALUE_GROUPS, VALUE_LOW_BITS, VALUE_LOW_WORDS, VALUE_PARAMS.
// Records: Split.

// Channels 4v to 4v + 3 of a key are in the four bytes of a word.
fn key_vector(split: Split, head: u32, token: u32, v: u32) -> vec4<f32> {
    let first = head_words(split, head, token);
    let in_block = token % GROUP;
    if (KEY_BITS == 16u) {
        let f = PACKED_FORMAT;
        return vec4<f32>(
            pair(f, slab_word(first + 2u * v * GROUP + in_block)), pair(f, slab_word(first + (2u * v + 1u) * GROUP + in_block)));
    }
    let word = slab_word(first + (KEY_LOW_BITS * v / 8u) * GROUP + in_block);
    let mask = ((1u << KEY_LOW_BITS) - 1u) * 0x01010101u;
    var bytes = (word >> code_bit(KEY_LOW_BITS, 4u * v)) & mask;
    if (KEY_BITS > KEY_LOW_BITS) {
        let high = slab_word(first + (KEY_LOW_WORDS + v / 8u) * GROUP + in_block);
        bytes |= ((high >> code_bit(1u, 4u * v)) & 0x01010101u) << KEY_LOW_BITS;
    }
    let codes = vec4<f32>(unpack4xU8(bytes));
    if (KEYS_PER_TOKEN) {
        let p = param_at(first + KEY_PARAMS, in_block * KEY_GROUPS + 4u * v / CHANNEL_GROUP, KEY_COMPACT);
        return fma(codes, vec4<f32>(p.x), vec4<f32>(p.y));
    }
    let p = four_params((first + KEY_PARAMS) / 4u, v, KEY_COMPACT);
    return fma(codes, scales(p, KEY_COMPACT), minima(p, KEY_COMPACT));
}

// Those of a value are at the same place of four neighbouring words.
fn value_vector(split: Split, head: u32, token: u32, v: u32) -> vec4<f32> {
    let first = head_words(split, head, token);
    let in_block = token % GROUP;
    let at = (first + VALUE_CODES) / 4u + v;
    let words = slab4[at + (VALUE_LOW_BITS * in_block / 32u) * (HEAD_DIM / 4u)];
    if (VALUE_BITS == 16u) {
        let f = PACKED_FORMAT;
        let halves = words >> vec4<u32>(16u * (in_block % 2u));
        return vec4<f32>(
            pair(f, halves.x & 0xffffu).x,
            pair(f, halves.y & 0xffffu).x,
            pair(f, halves.z & 0xffffu).x,
            pair(f, halves.w & 0xffffu).x,
        );
    }
    let mask = vec4<u32>((1u << VALUE_LOW_BITS) - 1u);
    var bits = (words >> vec4<u32>(code_bit(VALUE_LOW_BITS, in_block))) & mask;
    if (VALUE_BITS > VALUE_LOW_BITS) {
        let high = slab4[at + (VALUE_LOW_WORDS + in_block / 32u) * (HEAD_DIM / 4u)];
        bits |= ((high >> vec4<u32>(code_bit(1u, in_block))) & vec4<u32>(1u)) << vec4<u32>(VALUE_LOW_BITS);
    }
    let codes = vec4<f32>(bits);
    if (VALUES_PER_CHANNEL) {
        let p = four_params((first + VALUE_PARAMS) / 4u, v, VALUE_COMPACT);
        return fma(codes, scales(p, VALUE_COMPACT), minima(p, VALUE_COMPACT));
    }
    let p = param_at(first + VALUE_PARAMS, in_block * VALUE_GROUPS + 4u * v / CHANNEL_GROUP, VALUE_COMPACT);
    return fma(codes, vec4<f32>(p.x), vec4<f32>(p.y));
}
