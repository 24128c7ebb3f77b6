// Codes of a packed page, 16 of each of four neighbouring lines at a time: 16 channels of the keys of four
// tokens, or 16 tokens of four channels of the values. lib/packed.wgsl, lib/products.wgsl and
// lib/field_*.wgsl come before.
//
// Constants: PACKED_FORMAT.

// The words of 16 codes of four lines, a line per component: one word of a line in 2 and 3 bits, two in 4 and
// four in 8. In 3 bits the others have the high bits, where `part` finds those of the word's lower and upper
// half. In 16 bits they are those of 8 elements.
struct Words {
    w0: vec4<u32>,
    w1: vec4<u32>,
    w2: vec4<u32>,
    w3: vec4<u32>,
}

// Words of codes 16 * `unit` on. The lines' first words are vector `at`, the next ones lie `stride` vectors
// further each.
fn load_words(at: u32, stride: u32, bits: u32, low_bits: u32, low_words: u32, unit: u32) -> Words {
    let first = at + unit * (low_bits / 2u) * stride;
    var words = Words();
    words.w0 = slab4[first];
    if (bits == 3u) {
        let high = slab4[at + (low_words + unit / 2u) * stride];
        words.w1 = high << vec4<u32>(2u - unit % 2u);
        words.w2 = high >> vec4<u32>(14u + unit % 2u);
    }
    if (low_bits > 2u) {
        words.w1 = slab4[first + stride];
    }
    if (low_bits > 4u) {
        words.w2 = slab4[first + 2u * stride];
        words.w3 = slab4[first + 3u * stride];
    }
    return words;
}

// The codes that begin at bit `bit` of words whose upper half is not needed.
fn codes_at(low: vec4<u32>, high: vec4<u32>, bit: u32, bits: u32) -> vec4<f32> {
    if (bits == 3u) {
        return field((low & vec4<u32>(3u << bit)) | (high & vec4<u32>(4u << bit)), bit);
    }
    return field(low & vec4<u32>(((1u << bits) - 1u) << bit), bit);
}

// Four codes of each line, which begin at bit `bit` of the bytes of the words `low`. In 3 bits the others
// have their high bits.
fn four_codes(low: vec4<u32>, high: vec4<u32>, upper_high: vec4<u32>, bit: u32, bits: u32) -> Parts {
    let upper = low >> vec4<u32>(16u);
    return Parts(
        codes_at(low, high, bit, bits),
        codes_at(low, high, 8u + bit, bits),
        codes_at(upper, upper_high, bit, bits),
        codes_at(upper, upper_high, 8u + bit, bits),
    );
}

// Codes 4 * `j` to 4 * `j` + 3 of each line, a vector per code. In 16 bits `j` is 0 or 1.
fn part(words: Words, j: u32, bits: u32) -> Parts {
    if (bits == 16u) {
        if (j == 0u) {
            return element_pairs(PACKED_FORMAT, words.w0, words.w1);
        }
        return element_pairs(PACKED_FORMAT, words.w2, words.w3);
    }
    if (bits < 4u) {
        return four_codes(words.w0, words.w1, words.w2, 2u * j, bits);
    }
    if (bits == 4u) {
        if (j < 2u) {
            return four_codes(words.w0, words.w0, words.w0, 4u * j, bits);
        }
        return four_codes(words.w1, words.w1, words.w1, 4u * (j - 2u), bits);
    }
    if (j == 0u) {
        return four_codes(words.w0, words.w0, words.w0, 0u, bits);
    }
    if (j == 1u) {
        return four_codes(words.w1, words.w1, words.w1, 0u, bits);
    }
    if (j == 2u) {
        return four_codes(words.w2, words.w2, words.w2, 0u, bits);
    }
    return four_codes(words.w3, words.w3, words.w3, 0u, bits);
}

// What a code of part `j` counts as, by its place among the four: 1, or less where `field` does not bring it
// to the low end of a number.
fn code_units(j: u32, bits: u32) -> vec4<f32> {
    if (bits == 16u) {
        return vec4<f32>(1.0);
    }
    let bit = select(select(0u, 4u * (j % 2u), bits == 4u), 2u * j, bits < 4u);
    let low = field_unit(bit);
    let high = field_unit(8u + bit);
    return vec4<f32>(low, high, low, high);
}
