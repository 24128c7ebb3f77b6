// Elements of packed tokens, one at a time, by their definition. The pass file has the slab.
//
// Constants: CHANNEL_GROUP, GROUP, KEYS_PER_TOKEN, KEY_BITS, KEY_CODES_PER_WORD, KEY_COMPACT, KEY_GROUPS,
// KEY_LOW_BITS, KEY_LOW_WORDS, KEY_PARAMS, PACKED_FORMAT, VALUES_PER_CHANNEL, VALUE_BITS, VALUE_CODES,
// VALUE_CODES_PER_WORD, VALUE_COMPACT, VALUE_GROUPS, VALUE_LOW_BITS, VALUE_LOW_WORDS, VALUE_PARAMS,
// VALUE_ROW_WORDS.

// f32 bits of the value that a code stands for, by parameter `n` of those that begin at word `at`: an exact
// product and one rounded sum.
fn dequantized(at: u32, n: u32, compact: bool, code: u32) -> u32 {
    var param = slab[at + n];
    if (compact) {
        param = (slab[at + n / 2u] >> (16u * (n % 2u))) & 0xffffu;
    }
    return bitcast<u32>(f32(code) * param_scale(param, compact) + param_min(param, compact));
}

// f32 bits of `channel` of a packed token's value; `first` is the first word of its head in the block.
fn value_element(first: u32, token: u32, channel: u32) -> u32 {
    let row = first + VALUE_CODES + token * VALUE_ROW_WORDS;
    let word = slab[row + channel / VALUE_CODES_PER_WORD];
    if (VALUE_BITS == 16u) {
        return element_bits(PACKED_FORMAT, word, channel);
    }
    var code = (word >> ((channel % VALUE_CODES_PER_WORD) * VALUE_LOW_BITS)) & ((1u << VALUE_LOW_BITS) - 1u);
    if (VALUE_BITS > VALUE_LOW_BITS) {
        code |= ((slab[row + VALUE_LOW_WORDS + channel / 32u] >> (channel % 32u)) & 1u) << VALUE_LOW_BITS;
    }
    let group = select(token * VALUE_GROUPS + channel / CHANNEL_GROUP, channel, VALUES_PER_CHANNEL);
    return dequantized(first + VALUE_PARAMS, group, VALUE_COMPACT, code);
}

// The same for its key.
fn key_element(first: u32, token: u32, channel: u32) -> u32 {
    let word = slab[first + (channel / KEY_CODES_PER_WORD) * GROUP + token];
    if (KEY_BITS == 16u) {
        return element_bits(PACKED_FORMAT, word, channel);
    }
    var code = (word >> ((channel % KEY_CODES_PER_WORD) * KEY_LOW_BITS)) & ((1u << KEY_LOW_BITS) - 1u);
    if (KEY_BITS > KEY_LOW_BITS) {
        code |= ((slab[first + (KEY_LOW_WORDS + channel / 32u) * GROUP + token] >> (channel % 32u)) & 1u) << KEY_LOW_BITS;
    }
    let group = select(channel, token * KEY_GROUPS + channel / CHANNEL_GROUP, KEYS_PER_TOKEN);
    return dequantized(first + KEY_PARAMS, group, KEY_COMPACT, code);
}
