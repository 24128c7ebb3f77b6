//! 16-bit rounding by integer operations: how a value enters the cache, and how f16 parameters round.
//!
//! Nothing here uses a float operation, so that a shader which does the same gives the same bits
//! whatever its compiler does with subnormals, conversions or rounding modes.

/// Type of an element of a host's tensor, or of the residual window.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// 32-bit IEEE float.
    F32,
    /// 16-bit IEEE float.
    F16,
    /// The upper half of a 32-bit float.
    Bf16,
}

impl Dtype {
    /// All types.
    pub const ALL: &'static [Dtype] = &[Dtype::F32, Dtype::F16, Dtype::Bf16];

    /// Bytes of one element.
    pub const fn bytes(self) -> u32 {
        match self {
            Dtype::F32 => 4,
            Dtype::F16 | Dtype::Bf16 => 2,
        }
    }

    /// Words of `n` elements; `n` must be even for the 16-bit types.
    pub const fn words(self, n: u32) -> u32 {
        n * self.bytes() / 4
    }

    /// The number by which shaders know this type.
    pub const fn index(self) -> u32 {
        match self {
            Dtype::F32 => 0,
            Dtype::F16 => 1,
            Dtype::Bf16 => 2,
        }
    }
}

/// 65504, the largest f16.
const F16_MAX: u32 = 0x477f_e000;
/// 65280, the largest bf16 that is no larger.
const BF16_MAX: u32 = 0x477f_0000;
/// 2⁻¹⁴, the smallest normal f16.
const F16_MIN_NORMAL: u32 = 0x3880_0000;
/// 2⁻¹²⁶, the smallest normal f32 and bf16.
const F32_MIN_NORMAL: u32 = 0x0080_0000;
/// Difference of the exponent biases of f32 and f16, in place.
const BIAS: u32 = 112;

/// The entry function: sanitizes `x` and rounds it once to `format`; returns the bits.
///
/// NaN becomes +0; the magnitude is clamped to 65504 (bf16: 65280); what lies below the smallest normal of
/// the format, and −0, becomes +0; then round to nearest, ties to even.
pub fn enter(x: f32, format: Dtype) -> u32 {
    let bits = x.to_bits();
    let sign = bits & 0x8000_0000;
    let magnitude = bits & 0x7fff_ffff;
    let (largest, smallest) = match format {
        Dtype::F32 => (F16_MAX, F32_MIN_NORMAL),
        Dtype::F16 => (F16_MAX, F16_MIN_NORMAL),
        Dtype::Bf16 => (BF16_MAX, F32_MIN_NORMAL),
    };
    if magnitude > 0x7f80_0000 || magnitude < smallest {
        return 0;
    }
    let magnitude = magnitude.min(largest);
    match format {
        Dtype::F32 => sign | magnitude,
        Dtype::F16 => (sign >> 16) | ((round_even(magnitude, 13) >> 13) - (BIAS << 10)),
        Dtype::Bf16 => (sign | round_even(magnitude, 16)) >> 16,
    }
}

/// Adds what makes a truncation of the low `shift` bits round to nearest, ties to even.
fn round_even(magnitude: u32, shift: u32) -> u32 {
    magnitude + (1 << (shift - 1)) - 1 + ((magnitude >> shift) & 1)
}

/// The f32 with the value of the element `bits` of `format`. Exact.
pub fn widen(bits: u32, format: Dtype) -> f32 {
    match format {
        Dtype::F32 => f32::from_bits(bits),
        Dtype::F16 => f16_to_f32(bits as u16),
        Dtype::Bf16 => bf16_to_f32(bits as u16),
    }
}

/// Exact value of an f16, subnormals, infinities and NaN included.
pub fn f16_to_f32(h: u16) -> f32 {
    let h = u32::from(h);
    let sign = (h & 0x8000) << 16;
    let magnitude = h & 0x7fff;
    if magnitude >= 0x7c00 {
        return f32::from_bits(sign | 0x7f80_0000 | ((magnitude & 0x3ff) << 13));
    }
    if magnitude >= 0x0400 {
        return f32::from_bits(sign | ((magnitude << 13) + (BIAS << 23)));
    }
    // A subnormal is an integer number of 2⁻²⁴.
    let value = magnitude as f32 * f32::from_bits(0x3380_0000);
    f32::from_bits(sign | value.to_bits())
}

/// Exact value of a bf16.
pub fn bf16_to_f32(h: u16) -> f32 {
    f32::from_bits(u32::from(h) << 16)
}

/// Rounds an attention output to `format`, to nearest even; unlike [`enter`] it keeps subnormals, infinities
/// and NaN.
pub fn round_to(x: f32, format: Dtype) -> u32 {
    let bits = x.to_bits();
    let sign = bits & 0x8000_0000;
    let magnitude = bits & 0x7fff_ffff;
    let nan = magnitude > 0x7f80_0000;
    match format {
        Dtype::F32 => bits,
        Dtype::Bf16 if nan => (bits >> 16) | 0x40,
        Dtype::Bf16 => (sign | round_even(magnitude, 16)) >> 16,
        Dtype::F16 => {
            let rounded = if nan {
                0x7e00
            } else if magnitude >= 0x477f_f000 {
                0x7c00
            } else if magnitude >= F16_MIN_NORMAL {
                (round_even(magnitude, 13) >> 13) - (BIAS << 10)
            } else {
                // Multiples of 2⁻²⁴: adding 0.5 leaves them, rounded to nearest even, in the low bits of the
                // sum.
                (f32::from_bits(magnitude) + 0.5).to_bits() - 0.5f32.to_bits()
            };
            (sign >> 16) | rounded
        }
    }
}

/// The largest storable f16 that is ≤ `x`, as bits. Storable are the normal f16 values and +0.
///
/// `x` must be finite with |x| ≤ 65504, as every value that has entered a cache is.
pub fn floor_to_f16(x: f32) -> u16 {
    let bits = x.to_bits();
    let magnitude = bits & 0x7fff_ffff;
    let negative = bits >> 31 == 1;
    if magnitude < F16_MIN_NORMAL {
        return if negative && magnitude != 0 { 0x8400 } else { 0 };
    }
    // Towards −∞: truncate the magnitude of a positive value, round that of a negative one up.
    let up = if negative { 0x1fff } else { 0 };
    let half = ((magnitude + up) >> 13) - (BIAS << 10);
    (half | (bits >> 31 << 15)) as u16
}
