// The bit-exact min-max quantizer. Twin: src/format/quantizer.rs.
//
// Every backend must write the same words, so this uses only integers, products that are exact in f32, and single f32 sums. No
// division; every comparison is made on integer keys, because Metal's fast math may move terms across a float comparison.

const F16_SMALLEST: u32 = 0x0400u;
const F16_LARGEST: u32 = 0x7bffu;
const MAX_ZERO: i32 = 4095;

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

// The largest storable f16 that is no larger than the value of `bits`.
fn floor_to_f16(bits: u32) -> u32 {
    let magnitude = bits & 0x7fffffffu;
    let negative = bits >> 31u;
    if (magnitude < 0x38800000u) {
        return select(0u, 0x8400u, negative == 1u && magnitude != 0u);
    }
    let half = ((magnitude + negative * 0x1fffu) >> 13u) - (112u << 10u);
    return half | (negative << 15u);
}

// Whether (2z - 1) * scale exceeds the value whose key is `twice`.
fn zero_is_beyond(z: i32, scale: f32, twice: u32) -> bool {
    return order_key(bitcast<u32>(f32(2 * z - 1) * scale)) > twice;
}

// The textbook rule's stored minimum, or `fallback` where it would not be exact.
fn rounded_min(low: f32, scale: f32, fallback: u32) -> u32 {
    // + 0.0: twice a zero must be +0, whose key differs from that of -0.
    let twice = order_key(bitcast<u32>(-2.0 * low + 0.0));
    if (!zero_is_beyond(MAX_ZERO + 1, scale, twice) || zero_is_beyond(-MAX_ZERO, scale, twice)) {
        return fallback;
    }
    var lo = -MAX_ZERO;
    var hi = MAX_ZERO + 1;
    // 13 halvings of 8192 candidates.
    for (var i = 0u; i < 13u; i++) {
        let mid = (lo + hi) >> 1u;
        if (lo < hi) {
            if (zero_is_beyond(mid, scale, twice)) {
                hi = mid;
            } else {
                lo = mid + 1;
            }
        }
    }
    let z = hi - 1;
    if (z == 0) {
        return 0u;
    }
    let bits = bitcast<u32>(f32(-z) * scale);
    // Below -65504.
    if ((bits >> 31u) == 1u && (bits & 0x7fffffffu) > 0x477fe000u) {
        return fallback;
    }
    return floor_to_f16(bits);
}

// The (scale, min) word of a group, from the order keys of its smallest and largest value.
fn group_param(bits: u32, zero_point_rounded: bool, min_key: u32, max_key: u32) -> u32 {
    let min16 = floor_to_f16(key_to_bits(min_key));
    let low = storable_to_f32(min16);
    let range = bitcast<u32>(bitcast<f32>(key_to_bits(max_key)) - low);
    if ((range & 0x7fffffffu) == 0u) {
        return min16 << 16u;
    }
    // The smallest f16 scale that covers the range, by halving the 2^15 candidates: (2^b - 1) * scale is exact.
    let levels = f32((1u << bits) - 1u);
    var lo = F16_SMALLEST;
    var hi = F16_LARGEST;
    for (var i = 0u; i < 15u; i++) {
        let mid = (lo + hi) >> 1u;
        if (lo < hi) {
            if (bitcast<u32>(levels * storable_to_f32(mid)) >= range) {
                hi = mid;
            } else {
                lo = mid + 1u;
            }
        }
    }
    var stored = min16;
    if (zero_point_rounded) {
        stored = rounded_min(low, storable_to_f32(hi), min16);
    }
    return hi | (stored << 16u);
}

// How many of the thresholds min + (i - 1/2) * scale lie strictly below the value of `x` (f32 bits).
fn code_of(bits: u32, param: u32, x: u32) -> u32 {
    let scale = storable_to_f32(param & 0xffffu);
    let low = storable_to_f32(param >> 16u);
    let key = order_key(x);
    var code = 0u;
    if ((param & 0xffffu) != 0u) {
        for (var step = 1u << (bits - 1u); step > 0u; step >>= 1u) {
            let trial = code + step;
            let threshold = low + (f32(trial) - 0.5) * scale;
            if (order_key(bitcast<u32>(threshold)) < key) {
                code = trial;
            }
        }
    }
    return code;
}

// What a row word holds: `codes` codes from `channel` on, of each the bits from `code_shift` on that `mask` covers, `width` bits apart.
struct PlaneWord {
    channel: u32,
    codes: u32,
    code_shift: u32,
    mask: u32,
    width: u32,
}

// Row word `word` of codes whose low bits are in a plane of `low_words` words, and of which a bit that remains is in the plane behind it.
fn plane_word(bits: u32, low_bits: u32, low_words: u32, word: u32) -> PlaneWord {
    if (word < low_words) {
        return PlaneWord(word * (32u / low_bits), 32u / low_bits, 0u, (1u << low_bits) - 1u, low_bits);
    }
    return PlaneWord((word - low_words) * 32u, 32u, low_bits, 1u, 1u);
}
