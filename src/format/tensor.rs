//! How keys or values are packed.

use super::clipping::clipped;
use super::compact::compact_param;
use super::quantizer::ends;
use super::{Bits, Param, ZeroPoint, param};

/// Keys or values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Tensor {
    /// Keys.
    Keys,
    /// Values.
    Values,
}

/// What the elements that share a scale and a minimum have in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Axis {
    /// A channel: a group is one channel of the tokens of a block. KIVI's choice for keys, of which a few
    /// channels are large in every token.
    PerChannel,
    /// A token: a group is some channels of one token. KIVI's choice for values, and that of most other
    /// caches for both.
    PerToken,
}

/// How keys or values are packed. One description for the oracle, the shaders, the accounting and the files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct TensorFormat {
    /// Width of a code.
    pub bits: Bits,
    /// What a group is; `None`: KIVI's choice, keys per channel and values per token. The other choices are
    /// for comparison: attention reads them by slower kernels.
    pub axis: Option<Axis>,
    /// How the minimum of a group is stored.
    pub zero_point: ZeroPoint,
    /// Whether a group's scale and minimum take 16 bits together instead of 32: the scale has four
    /// significant bits, and the minimum is a whole number of quarters of it, or of four of it ([`Param`]).
    /// Nothing is clipped by it. With [`ZeroPoint::Min`] only.
    pub compact: bool,
    /// Whether a group's range may leave out its extremes, where that makes the sum of squared errors
    /// smaller. It costs time when blocks are packed, none when they are read. Good for values; for keys only
    /// if sink tokens are exempt (their outliers are what attention looks for).
    pub clipping: bool,
    /// Whether rows are rotated before they are packed ([`rotate`](super::rotate)); not with 16 bits. Values
    /// are rotated back once per head, where their weighted sums are joined, and this nearly always helps.
    /// For keys the queries are rotated instead, and whether that helps depends on the layer: where a few
    /// channels carry a large constant, as in the first layer of Qwen2.5 whose key projections have biases,
    /// rotation spreads it over all channels and ruins the layer. Try it per layer
    /// ([`CacheConfig::with_layer_format`](crate::CacheConfig::with_layer_format)) and measure. Rows whose
    /// elements are all alike and in the thousands are clamped.
    pub rotated: bool,
}

impl TensorFormat {
    /// Codes of this width, by the rules of KIVI.
    pub fn new(bits: Bits) -> TensorFormat {
        TensorFormat {
            bits,
            axis: None,
            zero_point: ZeroPoint::Min,
            compact: false,
            clipping: false,
            rotated: false,
        }
    }

    /// Sets [`Self::axis`].
    #[must_use]
    pub fn with_axis(mut self, axis: Axis) -> Self {
        self.axis = Some(axis);
        self
    }

    /// Sets [`Self::zero_point`].
    #[must_use]
    pub fn with_zero_point(mut self, zero_point: ZeroPoint) -> Self {
        self.zero_point = zero_point;
        self
    }

    /// Turns [`Self::compact`] on.
    #[must_use]
    pub fn with_compact_parameters(mut self) -> Self {
        self.compact = true;
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

    /// What a group of this tensor is.
    pub fn axis_of(self, tensor: Tensor) -> Axis {
        self.axis.unwrap_or(match tensor {
            Tensor::Keys => Axis::PerChannel,
            Tensor::Values => Axis::PerToken,
        })
    }

    /// The parameters of a group of values, each of which has entered the cache.
    pub fn fit(self, group: &[f32]) -> Param {
        if self.clipping {
            return clipped(self.bits, group, |min, max| self.fit_ends(min, max));
        }
        let (min, max) = ends(group);
        self.fit_ends(min, max)
    }

    /// The parameters of a group whose smallest and largest values are `min` and `max`, without clipping.
    fn fit_ends(self, min: f32, max: f32) -> Param {
        if self.compact {
            compact_param(self.bits, min, max)
        } else {
            param(self.bits, self.zero_point, min, max)
        }
    }

    /// The parameter whose stored bits are `word`.
    pub fn param(self, word: u32) -> Param {
        if self.compact { Param::from_compact(word as u16) } else { Param::from_word(word) }
    }
}
