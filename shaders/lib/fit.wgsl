// The bit-exact min-max quantizer, for lib/groups.wgsl. Twins: src/format/{quantizer,compact}.rs.
// lib/quantizer.wgsl comes before.
//
// Constants: PACK_BITS, PACK_COMPACT, PACK_ROUNDED.

const F16_SMALLEST: u32 = 0x0400u;
const F16_LARGEST: u32 = 0x7bffu;
const MAX_ZERO: i32 = 4095;
// The scales of compact parameters, and the most units of their minima.
const COMPACT_SMALLEST: u32 = 0x08u;
const COMPACT_LARGEST: u32 = 0xf7u;
const COMPACT_MOST: i32 = 63;

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
fn full_param(min_key: u32, max_key: u32) -> u32 {
    let min16 = floor_to_f16(key_to_bits(min_key));
    let low = storable_to_f32(min16);
    let range = bitcast<u32>(bitcast<f32>(key_to_bits(max_key)) - low);
    if ((range & 0x7fffffffu) == 0u) {
        return min16 << 16u;
    }
    // The smallest f16 scale that covers the range, by halving the 2^15 candidates: (2^b - 1) * scale is
    // exact.
    let levels = f32((1u << PACK_BITS) - 1u);
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
    if (PACK_ROUNDED) {
        stored = rounded_min(low, storable_to_f32(hi), min16);
    }
    return hi | (stored << 16u);
}

// Whether `x` is at least the value of `key`.
fn reaches(x: f32, key: u32) -> bool {
    return order_key(bitcast<u32>(x)) >= key;
}

// Whether `x` is larger than the value of `key`.
fn is_beyond(x: f32, key: u32) -> bool {
    return order_key(bitcast<u32>(x)) > key;
}

// The same in 16 bits: the smallest scale of four significant bits that covers the group from a minimum that
// is a whole number of quarters of it, or of four scales.
fn compact_param(min_key: u32, max_key: u32) -> u32 {
    if (min_key == 0x80000000u && max_key == 0x80000000u) {
        return 0u;
    }
    let levels = f32((1u << PACK_BITS) - 1u);
    let low = bitcast<f32>(key_to_bits(min_key));
    let range = order_key(bitcast<u32>(bitcast<f32>(key_to_bits(max_key)) - low));
    // What a scale must be able to do whatever the minimum becomes, by halving the 240 candidates.
    var lo = COMPACT_SMALLEST;
    var hi = COMPACT_LARGEST;
    for (var i = 0u; i < 8u; i++) {
        let mid = (lo + hi) >> 1u;
        if (lo < hi) {
            let scale = param_scale(mid, true);
            let farthest = f32(COMPACT_MOST) * 4.0 * scale;
            if (reaches(levels * scale, range) && reaches(levels * scale + farthest, max_key) && !is_beyond(-farthest, min_key)) {
                hi = mid;
            } else {
                lo = mid + 1u;
            }
        }
    }
    // From there on, at most some thirty.
    for (var code = hi; code <= COMPACT_LARGEST; code++) {
        let scale = param_scale(code, true);
        for (var coarse = 0u; coarse < 2u; coarse++) {
            let unit = compact_unit(coarse << 15u) * scale;
            // The largest number of units that is no larger than the minimum, from a quotient that may be a
            // little off.
            var n = i32(clamp(floor(low / unit), -128.0, 128.0));
            if (is_beyond(f32(n) * unit, min_key)) {
                n -= 1;
            }
            if (!is_beyond(f32(n + 1) * unit, min_key)) {
                n += 1;
            }
            n = min(n, COMPACT_MOST);
            if (n >= -COMPACT_MOST && reaches(f32(n) * unit + levels * scale, max_key)) {
                return code | ((u32(n) & 0x7fu) << 8u) | (coarse << 15u);
            }
        }
    }
    return COMPACT_LARGEST;
}

fn group_param(min_key: u32, max_key: u32) -> u32 {
    if (PACK_COMPACT) {
        return compact_param(min_key, max_key);
    }
    return full_param(min_key, max_key);
}

// How many of the thresholds min + (i - 1/2) * scale lie strictly below the value of `x` (f32 bits).
fn code_of(param: u32, x: u32) -> u32 {
    let scale = param_scale(param, PACK_COMPACT);
    let low = param_min(param, PACK_COMPACT);
    let key = order_key(x);
    var code = 0u;
    if (scale != 0.0) {
        for (var step = 1u << (PACK_BITS - 1u); step > 0u; step >>= 1u) {
            let trial = code + step;
            let threshold = low + (f32(trial) - 0.5) * scale;
            if (order_key(bitcast<u32>(threshold)) < key) {
                code = trial;
            }
        }
    }
    return code;
}

// What a word of a line holds: `codes` codes from `first` on, of each the bits from `code_shift` on that
// `mask` covers, at `code_bit` of their `width`.
struct PlaneWord {
    first: u32,
    codes: u32,
    code_shift: u32,
    mask: u32,
    width: u32,
}

// Word `word` of a line of codes whose low bits are in a plane of `low_words` words, and of which a bit that
// remains is in the plane behind it.
fn plane_word(bits: u32, low_bits: u32, low_words: u32, word: u32) -> PlaneWord {
    if (word < low_words) {
        return PlaneWord(word * (32u / low_bits), 32u / low_bits, 0u, (1u << low_bits) - 1u, low_bits);
    }
    return PlaneWord((word - low_words) * 32u, 32u, low_bits, 1u, 1u);
}
