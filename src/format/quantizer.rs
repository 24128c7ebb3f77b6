//! The bit-exact min–max quantizer.
//!
//! Asymmetric uniform quantization of a group as in KIVI (Liu et al., 2024), with its rounding pinned down so
//! that every backend writes the same words: it relies only on integers, on products that are exact in f32,
//! and on single f32 sums.

use super::{Bits, Param, f16_to_f32, floor_to_f16};

/// How the minimum of a group is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum ZeroPoint {
    /// The f16 floor of the group's smallest value. Every |x − x̂| ≤ scale/2 + one f32 ulp, but for values
    /// that clipping leaves out.
    #[default]
    Min,
    /// The textbook rule: an integer zero point `z`, stored as `−z·scale`, so that zero is (nearly) a level.
    /// Every |x − x̂| ≤ scale/2 + one f16 ulp of the minimum + one f32 ulp. Groups where that is not exact
    /// (|z| > 4095) use [`ZeroPoint::Min`].
    Rounded,
}

/// Smallest normal f16, 2⁻¹⁴.
const SMALLEST: u16 = 0x0400;
/// Largest finite f16, 65504.
const LARGEST: u16 = 0x7bff;
/// `|z|` above this would make `(2z − 1)·scale` inexact.
const MAX_ZERO: i32 = 4095;

/// The order-preserving key of a float: `x < y` exactly if `order_key(x) < order_key(y)` (for values without
/// −0 and NaN).
pub fn order_key(x: f32) -> u32 {
    let bits = x.to_bits();
    if bits >> 31 == 1 { !bits } else { bits | 0x8000_0000 }
}

/// The smallest `v` in `lo..=hi` for which `holds` is true, where it is false, then true; `hi` is taken to
/// hold.
pub(super) fn smallest_that(mut lo: i32, mut hi: i32, holds: impl Fn(i32) -> bool) -> i32 {
    while lo < hi {
        let mid = (lo + hi) >> 1;
        if holds(mid) {
            hi = mid;
        } else {
            lo = mid + 1;
        }
    }
    hi
}

/// Parameters in 32 bits of a group whose smallest and largest values are `min` and `max` (both entered, see
/// [`super::enter`]).
pub fn param(bits: Bits, rule: ZeroPoint, min: f32, max: f32) -> Param {
    let min16 = floor_to_f16(min);
    let low = f16_to_f32(min16);
    let range = max - low;
    if range <= 0.0 {
        return Param::from_halves(0, min16);
    }
    // 8 + 11 bits: the product is exact. Comparing positive floats as integers keeps compilers from rewriting
    // the comparison.
    let levels = bits.max_code() as f32;
    let covers = |h: i32| (levels * f16_to_f32(h as u16)).to_bits() >= range.to_bits();
    let scale16 = smallest_that(i32::from(SMALLEST), i32::from(LARGEST), covers) as u16;
    let min16 = match rule {
        ZeroPoint::Min => min16,
        ZeroPoint::Rounded => rounded_min(low, f16_to_f32(scale16)).unwrap_or(min16),
    };
    Param::from_halves(scale16, min16)
}

/// The smallest and the largest value of a group.
pub(super) fn ends(group: &[f32]) -> (f32, f32) {
    let min = group.iter().copied().fold(f32::INFINITY, f32::min);
    let max = group.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    (min, max)
}

/// The stored minimum of the textbook rule, or `None` where the group must use the other rule.
fn rounded_min(low: f32, scale: f32) -> Option<u16> {
    // z is the largest integer with (2z − 1)·scale ≤ −2·low; both sides are exact for |z| ≤ 4096.
    let twice = order_key(-2.0 * low);
    let beyond = |z: i32| order_key((2 * z - 1) as f32 * scale) > twice;
    if !beyond(MAX_ZERO + 1) || beyond(-MAX_ZERO) {
        return None;
    }
    let z = smallest_that(-MAX_ZERO, MAX_ZERO + 1, beyond) - 1;
    if z == 0 {
        return Some(0);
    }
    let exact = -(z as f32) * scale;
    (exact >= -65504.0).then(|| floor_to_f16(exact))
}

/// The code of `x`: how many of the thresholds `min + (i − ½)·scale` lie strictly below it.
pub fn code(bits: Bits, param: Param, x: f32) -> u32 {
    let (scale, min) = (param.scale(), param.min());
    if scale == 0.0 {
        return 0;
    }
    let x = order_key(x);
    let mut code = 0;
    let mut step = 1 << (bits.get() - 1);
    while step > 0 {
        let trial = code + step;
        let threshold = min + (trial as f32 - 0.5) * scale;
        if order_key(threshold) < x {
            code = trial;
        }
        step >>= 1;
    }
    code
}

/// The value of a code: one exact product and one sum rounded to nearest.
pub fn dequantize(param: Param, code: u32) -> f32 {
    code as f32 * param.scale() + param.min()
}
