//! How keys or values are packed.

use super::quantizer::ends;
use super::{Bits, Param, ZeroPoint, clipped_param, param};

/// How keys or values are packed. One description for the oracle, the shaders, the accounting and the files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct TensorFormat {
    /// Width of a code.
    pub bits: Bits,
    /// How the minimum of a group is stored.
    pub zero_point: ZeroPoint,
    /// Whether a group's range may leave out its extremes, where that makes the sum of squared errors smaller. It costs time when blocks are packed, none when
    /// they are read. Good for values; for keys only if sink tokens are exempt (their outliers are what attention looks for).
    pub clipping: bool,
    /// Whether rows are rotated before they are packed ([`rotate`](super::rotate)), and back once per head where their weighted sums are joined. For quantized
    /// values only. Rows whose values are all alike and in the thousands are clamped.
    pub rotated: bool,
}

impl TensorFormat {
    /// Codes of this width, by the rules of KIVI.
    pub fn new(bits: Bits) -> TensorFormat {
        TensorFormat { bits, zero_point: ZeroPoint::Min, clipping: false, rotated: false }
    }

    /// Sets [`Self::zero_point`].
    #[must_use]
    pub fn with_zero_point(mut self, zero_point: ZeroPoint) -> Self {
        self.zero_point = zero_point;
        self
    }

    /// Turns [`Self::clipping`] on.
    #[must_use]
    pub fn with_clipping(mut self) -> Self {
        self.clipping = true;
        self
    }

    /// Turns [`Self::rotated`] on.
    #[must_use]
    pub fn with_rotation(mut self) -> Self {
        self.rotated = true;
        self
    }

    /// The parameters of a group of values, each of which has entered the cache.
    pub fn fit(self, group: &[f32]) -> Param {
        if self.clipping {
            return clipped_param(self.bits, self.zero_point, group);
        }
        let (min, max) = ends(group);
        param(self.bits, self.zero_point, min, max)
    }
}
