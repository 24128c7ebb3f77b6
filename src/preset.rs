//! Ready choices of a format, named by what they cost.

use crate::config::{CacheConfig, LayerFormat};
use crate::format::{Bits, TensorFormat};

/// A format, group size, window and sinks that go together, named by format bits per element where head_dim
/// is a multiple of 64 (others pay for padding).
///
/// Errors are of attention outputs against exact keys and values, relative to their norm, on the four layers
/// of `tests/data` (Qwen2.5-Coder-0.5B layers 0 and 23, SmolLM2-135M layers 0 and 29; the last 8 of 1024
/// tokens). A test holds them to what is said here.
///
/// Losses are those of SmolLM2-135M-Instruct, a model that 2 bits hit much harder than large ones, on 4096
/// tokens of a novel: perplexity above that with 16 bits (30.85), and mean KL divergence of next-token
/// distributions from those with 16 bits, in nats. `cargo run --release -p llama -- perplexity` measures
/// them, with any other Llama or Qwen2 model too (`--model FILE`); standard errors, machine and other formats
/// are in `examples/llama/results`.
///
/// Models with many query heads per KV head, or with biases in their key projections, want wider keys
/// ([`Self::Bits2_75`], [`Self::Bits3`], [`Self::Bits4_5`]); others do well with [`Self::Bits2_25`]. First
/// and last layers are often kept wider: [`CacheConfig::with_layer_format`]. The README has the numbers
/// behind this.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Preset {
    /// 3.0 bits: the format of KIVI's paper, 2 bits in groups of 32, without sinks. Its window differs: KIVI
    /// flushes keys 128 at a time and values one by one; here both are packed 32 at a time, and the newest
    /// 128 are always unpacked. Errors 0.288, 0.307, 0.186, 0.132. Loss +14.0 %, 0.142 nats.
    Kivi2,
    /// 5.0 bits: the same with 4-bit codes. Errors 0.062, 0.045, 0.026, 0.029. Loss +0.3 %, 0.0027 nats.
    Kivi4,
    /// 3.0 bits, better spent: 3-bit keys, 2-bit values that are rotated and clipped, groups of 64, 4 sinks.
    /// Errors 0.115, 0.106, 0.065, 0.027. Loss +0.6 %, 0.014 nats.
    Bits3,
    /// 2.75 bits: as [`Self::Bits3`], with parameters in 16 bits and clipped keys. Errors 0.117, 0.102,
    /// 0.064, 0.027. Loss +1.9 %, 0.015 nats.
    Bits2_75,
    /// 2.25 bits: 2-bit keys and rotated values, both clipped, groups of 64, parameters in 16 bits, 4 sinks.
    /// Errors 0.166, 0.145, 0.071, 0.034. Loss +4.6 %, 0.042 nats.
    Bits2_25,
    /// 4.5 bits: 4-bit keys and rotated values, groups of 64, 4 sinks. Errors 0.052, 0.032, 0.014, 0.006.
    /// Loss +0.1 %, 0.0016 nats.
    Bits4_5,
}

impl Preset {
    /// All presets.
    pub const ALL: &'static [Preset] =
        &[Preset::Kivi2, Preset::Kivi4, Preset::Bits2_25, Preset::Bits2_75, Preset::Bits3, Preset::Bits4_5];

    /// The format, for a layer or for all of them.
    pub fn format(self) -> LayerFormat {
        let plain = TensorFormat::new;
        let clipped = |bits| plain(bits).with_clipping();
        let rotated = |bits| plain(bits).with_rotation();
        let compact = TensorFormat::with_compact_parameters;
        let (keys, values, group_size, sink_tokens) = match self {
            Preset::Kivi2 => (plain(Bits::Two), plain(Bits::Two), 32, 0),
            Preset::Kivi4 => (plain(Bits::Four), plain(Bits::Four), 32, 0),
            Preset::Bits2_25 => {
                (compact(clipped(Bits::Two)), compact(rotated(Bits::Two).with_clipping()), 64, 4)
            }
            Preset::Bits2_75 => {
                (compact(clipped(Bits::Three)), compact(rotated(Bits::Two).with_clipping()), 64, 4)
            }
            Preset::Bits3 => (plain(Bits::Three), rotated(Bits::Two).with_clipping(), 64, 4),
            Preset::Bits4_5 => (plain(Bits::Four), rotated(Bits::Four), 64, 4),
        };
        LayerFormat { keys, values, group_size, sink_tokens, ..LayerFormat::default() }
    }
}

impl CacheConfig {
    /// Sets formats, group sizes, window and sinks to those of a preset, for all layers that have no format
    /// of their own. The limit of history stays.
    #[must_use]
    pub fn with_preset(self, preset: Preset) -> Self {
        let history_limit = self.format.history_limit;
        self.with_format(LayerFormat { history_limit, ..preset.format() })
    }
}
