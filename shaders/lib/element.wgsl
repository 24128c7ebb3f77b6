// Elements of the host's tensors and of unpacked tokens, by integer operations: drivers differ in how
// their float conversions treat subnormals and in how they round.
//
// Constants: BF16, F16, F32.

// A host's tensor: offset and strides in elements.
struct View {
    offset: u32,
    token_stride: u32,
    head_stride: u32,
    dtype: u32,
}

struct Io {
    k: View,
    v: View,
    q: View,
    out: View,
    sinks: View,
    lse: View,
}

// f32 bits of an f16. Exact, for every input.
fn f16_to_f32_bits(half: u32) -> u32 {
    let sign = (half & 0x8000u) << 16u;
    let magnitude = half & 0x7fffu;
    if (magnitude >= 0x7c00u) {
        return sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13u);
    }
    if (magnitude >= 0x0400u) {
        return sign | ((magnitude << 13u) + (112u << 23u));
    }
    // A subnormal is an integer number of 2^-24; the product is a normal f32 or zero.
    return sign | bitcast<u32>(f32(magnitude) * 5.9604644775390625e-8);
}

// f32 bits of element `index` of a tensor whose words hold two 16-bit elements each; `word` is the one that
// holds it.
fn element_bits(dtype: u32, word: u32, index: u32) -> u32 {
    if (dtype == F32) {
        return word;
    }
    let half = (word >> (16u * (index & 1u))) & 0xffffu;
    if (dtype == F16) {
        return f16_to_f32_bits(half);
    }
    return half << 16u;
}

// A logit that a row does not see. Finite: infinities are not dependable under fast math.
const UNSEEN: f32 = -3.0e38;
// The maximum of a row whose attention is not a number, because of its query, its learned sink or a logit
// beyond f32: above all logits.
const NOT_A_NUMBER: f32 = 3.2e38;
// f32 bits of 3e38: a magnitude from here on is no logit.
const BEYOND: u32 = 0x7f61b1e6u;
const QUIET_NAN: u32 = 0x7fc00000u;

// Bits of a number as they are, of an infinity or NaN those of the one quiet NaN: each of its products is
// NaN, whatever it meets. By integers, since fast math may assume that there are neither.
fn finite_or_nan(bits: u32) -> u32 {
    return select(bits, QUIET_NAN, (bits & 0x7f800000u) == 0x7f800000u);
}

// Index of the word that holds element `index`.
fn element_word(dtype: u32, index: u32) -> u32 {
    return select(index >> 1u, index, dtype == F32);
}

// Adds what makes a truncation of the low `shift` bits round to nearest, ties to even.
fn round_even(magnitude: u32, shift: u32) -> u32 {
    return magnitude + (1u << (shift - 1u)) - 1u + ((magnitude >> shift) & 1u);
}

// Bits of an element in `format` from those of an f32, as it enters the cache: NaN becomes +0, the magnitude
// is clamped, what lies below the smallest normal becomes +0, then round to nearest even.
fn enter(format: u32, bits: u32) -> u32 {
    let sign = bits & 0x80000000u;
    var magnitude = bits & 0x7fffffffu;
    var largest = 0x477fe000u;
    var smallest = 0x00800000u;
    if (format == F16) {
        smallest = 0x38800000u;
    }
    if (format == BF16) {
        largest = 0x477f0000u;
    }
    if (magnitude > 0x7f800000u || magnitude < smallest) {
        return 0u;
    }
    magnitude = min(magnitude, largest);
    if (format == F16) {
        return (sign >> 16u) | ((round_even(magnitude, 13u) >> 13u) - (112u << 10u));
    }
    if (format == BF16) {
        return (sign | round_even(magnitude, 16u)) >> 16u;
    }
    return sign | magnitude;
}

// The two elements of a word of the cache's own, which are zero or normal, so that the built-in conversion is
// exact.
fn pair(format: u32, word: u32) -> vec2<f32> {
    if (format == F16) {
        return unpack2x16float(word);
    }
    return vec2<f32>(bitcast<f32>(word << 16u), bitcast<f32>(word & 0xffff0000u));
}
