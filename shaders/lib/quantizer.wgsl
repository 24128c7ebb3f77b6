// Numbers as the bit-exact min-max quantizer stores them. Twins: src/format/{param,quantizer}.rs.
//
// Every backend must write the same words, so this uses only integers, products that are exact in f32, and
// single f32 sums. No division; every comparison is made on integer keys, because Metal's fast math may move
// terms across a float comparison.

// Order-preserving key of a float's bits.
fn order_key(bits: u32) -> u32 {
    return select(bits | 0x80000000u, ~bits, (bits >> 31u) == 1u);
}

fn key_to_bits(key: u32) -> u32 {
    return select(~key, key & 0x7fffffffu, (key >> 31u) == 1u);
}

// f32 bits of a storable f16: normal, or +0.
fn storable_to_f32(half: u32) -> f32 {
    let magnitude = half & 0x7fffu;
    let bits = ((half & 0x8000u) << 16u) | ((magnitude << 13u) + (112u << 23u));
    return bitcast<f32>(select(bits, 0u, magnitude == 0u));
}

// Scale and minimum of a parameter: two f16, or in 16 bits an f16 without most of its mantissa, a number of
// seven bits with a sign, and the bit that tells its unit.
fn param_scale(param: u32, compact: bool) -> f32 {
    return storable_to_f32(select(param & 0xffffu, (param & 0xffu) << 7u, compact));
}

// Of a compact minimum, in scales.
fn compact_unit(param: u32) -> f32 {
    return select(0.25, 4.0, (param & 0x8000u) != 0u);
}

fn param_min(param: u32, compact: bool) -> f32 {
    if (compact) {
        return f32(i32(param << 17u) >> 25u) * (compact_unit(param) * param_scale(param, true));
    }
    return storable_to_f32(param >> 16u);
}
