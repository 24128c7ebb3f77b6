//! The parameters of a group, and how they are stored.

use super::f16_to_f32;

/// The scale and the minimum of a group: `x̂ = code·scale + min`.
///
/// In 32 bits they are two f16, each normal or +0. In 16 bits (compact) the scale is an f16 of which only the
/// exponent and three bits of the mantissa are kept, and the minimum a whole number of quarters of the scale,
/// or of four scales.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Param {
    scale: f32,
    min: f32,
    word: u32,
}

impl Param {
    /// Of the f16 `scale` in the low half of a word and the f16 `min` in the high half.
    pub fn from_word(word: u32) -> Param {
        Param { scale: f16_to_f32(word as u16), min: f16_to_f32((word >> 16) as u16), word }
    }

    /// Of f16 bits of the scale and the minimum.
    pub(super) fn from_halves(scale: u16, min: u16) -> Param {
        Param::from_word(u32::from(scale) | (u32::from(min) << 16))
    }

    /// Of the 16 bits of a compact parameter: the scale's in the low byte; above them the minimum, seven bits
    /// with a sign; at the top whether its unit is four scales instead of a quarter of one.
    pub fn from_compact(bits: u16) -> Param {
        let scale = f16_to_f32((bits & 0xff) << 7);
        let number = ((bits << 1) as i16) >> 9;
        let unit = if bits >> 15 == 1 { 4.0 } else { 0.25 };
        Param { scale, min: f32::from(number) * (unit * scale), word: bits.into() }
    }

    /// Step between neighbouring levels.
    pub fn scale(self) -> f32 {
        self.scale
    }

    /// The lowest level.
    pub fn min(self) -> f32 {
        self.min
    }

    /// As stored: 32 bits, or 16 if it is compact.
    pub fn word(self) -> u32 {
        self.word
    }

    /// Whether the quantizer may have made what is stored in `word`.
    pub(crate) fn is_storable(word: u32, compact: bool) -> bool {
        let half = |half: u32| half == 0 || (1..=30).contains(&(half >> 10 & 31));
        if compact {
            let scale = word & 0xff;
            return word >> 8 & 0x7f != 0x40 && ((8..=0xf7).contains(&scale) || word == 0);
        }
        half(word & 0xffff) && half(word >> 16) && word & 0x8000 == 0
    }
}
