//! Parameters in 16 bits.

use super::Param;
use super::bits::Bits;
use super::quantizer::{order_key, smallest_that};

/// Scales that are stored: those of f16 from 2⁻¹⁴ to 61440 with four significant bits.
const SCALES: std::ops::RangeInclusive<i32> = 0x08..=0xf7;
/// The most units that a minimum is from zero.
const MOST: i32 = 63;
/// The units of minima in scales, by the bit that tells them apart: the one is fine enough for any group, the
/// other reaches groups far from zero.
const UNITS: [f32; 2] = [0.25, 4.0];

/// The compact parameter of a group whose smallest and largest values are `min` and `max`.
///
/// The minimum is a whole number of quarters of the scale, or of four scales, and no larger than `min`. The
/// scale is the smallest of those with four significant bits for which, in one of the units, every value of
/// the group is covered: nothing is ever left out, but a group that is narrow and hundreds of steps from
/// zero, as keys of a biased projection are, may get a larger scale than its range needs. Levels and
/// thresholds are exact in f32, so every |x − x̂| ≤ scale/2. All products here are exact; the only rounding
/// is that of the range, and that of a quotient which comparisons correct.
pub(super) fn compact_param(bits: Bits, min: f32, max: f32) -> Param {
    if min == 0.0 && max == 0.0 {
        return Param::from_compact(0);
    }
    let levels = bits.max_code() as i32;
    let scale_of = |scale: i32| Param::from_compact(scale as u16).scale();
    let at_least = |a: f32, b: f32| order_key(a) >= order_key(b);
    let range = max - min;
    // What a scale must be able to do whatever the minimum becomes; true of all scales from some one on.
    let may_do = |scale: i32| {
        let scale = scale_of(scale);
        let farthest = MOST as f32 * UNITS[1] * scale;
        at_least(levels as f32 * scale, range)
            && at_least(levels as f32 * scale + farthest, max)
            && at_least(min, -farthest)
    };
    let first = smallest_that(*SCALES.start(), *SCALES.end(), may_do);
    for code in first..=*SCALES.end() {
        let scale = scale_of(code);
        for (coarse, unit) in [(0, UNITS[0] * scale), (1, UNITS[1] * scale)] {
            // The largest number of units that is no larger than the minimum, from a quotient that may be a
            // little off.
            let mut n = (min / unit).floor().clamp(-128.0, 128.0) as i32;
            if !at_least(min, n as f32 * unit) {
                n -= 1;
            }
            if at_least(min, (n + 1) as f32 * unit) {
                n += 1;
            }
            let n = n.min(MOST);
            if n >= -MOST && at_least(n as f32 * unit + levels as f32 * scale, max) {
                return Param::from_compact((code | (n & 0x7f) << 8 | coarse << 15) as u16);
            }
        }
    }
    // The largest scale covers every group of values that have entered.
    Param::from_compact(*SCALES.end() as u16)
}
