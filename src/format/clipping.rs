//! Ranges that leave out a group's extremes.

use super::Param;
use super::bits::Bits;
use super::quantizer::{code, ends};

/// Positions of each end of a group's range that clipping tries.
pub const CLIP_STEPS: u32 = 6;
/// Distance of two positions, in ranges: ends move up to a fifth of the range towards the middle, by products
/// that are exact in f32.
pub const CLIP_STEP: f32 = 5.0 / 128.0;
/// Groups whose range is below two to this power are not clipped.
pub const CLIP_LEAST_EXPONENT: i32 = -60;

/// Parameters of a group by the clipping rule: of all pairs of ends, each moved up to [`CLIP_STEPS`] − 1
/// steps towards the middle, those of the smallest sum of squared errors, the first if there are several;
/// `fit` gives the parameter for a pair of ends. Errors are integers in units of 2⁻¹² of the range or so, at
/// most 2047 each.
pub(super) fn clipped(bits: Bits, group: &[f32], fit: impl Fn(f32, f32) -> Param) -> Param {
    let (min, max) = ends(group);
    let range = max - min;
    let exponent = (range.to_bits() >> 23) as i32 - 127;
    if exponent < CLIP_LEAST_EXPONENT {
        return fit(min, max);
    }
    let coarse = f32::from_bits(range.to_bits() & 0xffff_0000) * CLIP_STEP;
    let unit = f32::from_bits(((127 + 12 - exponent) as u32) << 23);
    let error = |p: Param| -> u32 {
        let square = |&x: &f32| {
            let above = ((x - p.min()) * unit).clamp(-1_048_576.0, 1_048_576.0);
            let level = (code(bits, p, x) as f32 * p.scale() * unit).min(1_048_576.0);
            (above as i32 - level as i32).unsigned_abs().min(2047).pow(2)
        };
        group.iter().map(square).sum()
    };
    let candidate = |n: u32| {
        let (i, j) = ((n / CLIP_STEPS) as f32, (n % CLIP_STEPS) as f32);
        fit(min + i * coarse, max - j * coarse)
    };
    let tried = (0..CLIP_STEPS * CLIP_STEPS).map(candidate);
    tried.min_by_key(|p| error(*p)).unwrap_or(fit(min, max))
}
