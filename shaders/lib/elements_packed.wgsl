// Elements of packed tokens, one at a time, by their definition. The pass file has the slab.
// lib/quantizer.wgsl and lib/code_bit.wgsl come before.
//
// Constants: CHANNEL_GROUP, GROUP, HEAD_DIM, KEYS_PER_TOKEN, KEY_BITS, KEY_COMPACT, KEY_GROUPS, KEY_LOW_BITS,
// KEY_LOW_WORDS, KEY_PARAMS, PACKED_FORMAT, VALUES_PER_CHANNEL, VALUE_BITS, VALUE_CODES, VALUE_COMPACT,
// VALUE_GROUPS, VALUE_LOW_BITS, VALUE_LOW_WORDS, VALUE_PARAMS.

// f32 bits of the value that a code stands for, by parameter `n` of those that begin at word `at`: an exact
// product and one rounded sum.
fn dequantized(at: u32, n: u32, compact: bool, code: u32) -> u32 {
    var param = slab[at + n];
    if (compact) {
        param = (slab[at + n / 2u] >> (16u * (n % 2u))) & 0xffffu;
    }
    return bitcast<u32>(f32(code) * param_scale(param, compact) + param_min(param, compact));
}

// Code `j` of a line, or its 16 bits: the line's first word is `at`, its next ones `lines` words further
// each.
fn line_code(at: u32, lines: u32, bits: u32, low_bits: u32, low_words: u32, j: u32) -> u32 {
    let word = slab[at + (j * low_bits / 32u) * lines];
    if (bits == 16u) {
        return (word >> (16u * (j % 2u))) & 0xffffu;
    }
    var code = (word >> code_bit(low_bits, j)) & ((1u << low_bits) - 1u);
    if (bits > low_bits) {
        code |= ((slab[at + (low_words + j / 32u) * lines] >> code_bit(1u, j)) & 1u) << low_bits;
    }
    return code;
}

// f32 bits of `channel` of a packed token's value; `first` is the first word of its head in the block.
fn value_element(first: u32, token: u32, channel: u32) -> u32 {
    let code = line_code(first + VALUE_CODES + channel, HEAD_DIM, VALUE_BITS, VALUE_LOW_BITS, VALUE_LOW_WORDS, token);
    if (VALUE_BITS == 16u) {
        return element_bits(PACKED_FORMAT, code, 0u);
    }
    let group = select(token * VALUE_GROUPS + channel / CHANNEL_GROUP, channel, VALUES_PER_CHANNEL);
    return dequantized(first + VALUE_PARAMS, group, VALUE_COMPACT, code);
}

// The same for its key.
fn key_element(first: u32, token: u32, channel: u32) -> u32 {
    let code = line_code(first + token, GROUP, KEY_BITS, KEY_LOW_BITS, KEY_LOW_WORDS, channel);
    if (KEY_BITS == 16u) {
        return element_bits(PACKED_FORMAT, code, 0u);
    }
    let group = select(channel, token * KEY_GROUPS + channel / CHANNEL_GROUP, KEYS_PER_TOKEN);
    return dequantized(first + KEY_PARAMS, group, KEY_COMPACT, code);
}
