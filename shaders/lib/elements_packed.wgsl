// Elements of packed tokens, one at a time, by their definition. The pass file has the slab.

// f32 bits of the value that a code stands for: an exact product and one rounded sum.
fn dequantized(param: u32, code: u32) -> u32 {
    return bitcast<u32>(f32(code) * storable_to_f32(param & 0xffffu) + storable_to_f32(param >> 16u));
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
    return dequantized(slab[first + VALUE_PARAMS + token * VALUE_GROUPS + channel / VALUE_GROUP], code);
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
    return dequantized(slab[first + KEY_PARAMS + channel], code);
}
