//! What a user chooses.

use crate::format::{Bits, Dtype, TensorFormat, ZeroPoint};
use std::collections::BTreeMap;

/// How a layer attends.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[non_exhaustive]
pub struct LayerAttention {
    /// A query sees its own position and the `n - 1` before it; `None`: everything before it. The cache keeps
    /// older tokens all the same.
    pub sliding_window: Option<u32>,
    /// Logits become `cap * tanh(logit / cap)`, as in Gemma.
    pub soft_cap: Option<f32>,
}

impl LayerAttention {
    /// Sets [`Self::sliding_window`].
    #[must_use]
    pub fn with_sliding_window(mut self, tokens: u32) -> Self {
        self.sliding_window = Some(tokens);
        self
    }

    /// Sets [`Self::soft_cap`].
    #[must_use]
    pub fn with_soft_cap(mut self, cap: f32) -> Self {
        self.soft_cap = Some(cap);
        self
    }
}

/// How a layer's keys and values are packed, and which of its tokens stay unpacked.
///
/// Layers that agree on all of it form a class: they share plans, which cost time per step, and buffers for
/// them. A few classes are cheap, one per layer is not.
///
/// ```
/// use kivi_wgpu::{CacheConfig, Preset};
/// // The first two layers and the last in 4 bits, the others in 2.25.
/// let wide = Preset::Bits4_5.format();
/// let config = CacheConfig::new(32, 32, 8, 128).with_preset(Preset::Bits2_25).with_layer_format([0, 1, 31],
/// wide); assert_eq!(config.format_of(31).keys, wide.keys); assert_eq!(config.format_of(2),
/// Preset::Bits2_25.format());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct LayerFormat {
    /// How keys are packed. Default 2 bits, by the rules of KIVI.
    pub keys: TensorFormat,
    /// How values are packed. Default 2 bits, by the rules of KIVI.
    pub values: TensorFormat,
    /// Tokens in a block, and in a group of what is quantized per channel: 16, 32, 64 or 128. Default 32.
    pub group_size: u32,
    /// Channels in a group of what is quantized per token: 16, 32, 64, 128 or `head_dim`. Default:
    /// `group_size`.
    pub value_group_size: Option<u32>,
    /// W: the newest tokens that are always kept unpacked. Default 128; may be 0.
    pub residual_window: u32,
    /// S: the first positions, kept unpacked for ever. Default 0.
    pub sink_tokens: u32,
    /// Tokens up to which a sequence keeps its history, counted back from its newest: after a step, packed
    /// blocks all of whose tokens are older are dropped, and a page is free once all of its blocks are. Sinks
    /// stay. Default `None`: everything is kept.
    ///
    /// It is the sliding-window-with-sinks baseline of the literature, for comparison and for models that
    /// were trained with such a window. Tokens keep their original positions: keys are not re-rotated, as
    /// StreamingLLM (Xiao et al., 2024) does. Queries of one step see what was there when it began.
    pub history_limit: Option<u32>,
}

impl Default for LayerFormat {
    /// The format of KIVI's paper: 2 bits in groups of 32, a window of 128.
    fn default() -> LayerFormat {
        LayerFormat {
            keys: TensorFormat::new(Bits::Two),
            values: TensorFormat::new(Bits::Two),
            group_size: 32,
            value_group_size: None,
            residual_window: 128,
            sink_tokens: 0,
            history_limit: None,
        }
    }
}

/// Configuration of a cache.
///
/// ```
/// use kivi_wgpu::{Bits, CacheConfig};
/// // 32 layers, 32 query heads, 8 KV heads, head_dim 128
/// let config = CacheConfig::new(32, 32, 8, 128)
///     .with_bits(Bits::Two, Bits::Two)
///     .with_capacity(32768);
/// assert_eq!(config.format.residual_window, 128);
/// ```
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct CacheConfig {
    /// Layers of the model.
    pub layers: u32,
    /// Query heads per layer.
    pub query_heads: u32,
    /// KV heads per layer; each serves `query_heads / kv_heads` query heads (1 to 16).
    pub kv_heads: u32,
    /// Elements per head: a multiple of 8 up to 512.
    pub head_dim: u32,
    /// How layers are packed that have no format of their own.
    pub format: LayerFormat,
    /// Layers with a format of their own.
    pub layer_formats: BTreeMap<u32, LayerFormat>,
    /// Element type of the residual window and the sinks. Default f16.
    pub window_format: Dtype,
    /// Tokens that the pool holds at first, over all sequences. Default 4096. It grows by slabs, of half as
    /// much again as there is; nothing is copied.
    pub capacity: u32,
    /// Tokens up to which the pool grows. Default `None`: while there is memory.
    pub max_capacity: Option<u32>,
    /// Sequences at a time. Default 1.
    pub max_sequences: u32,
    /// New tokens of one sequence in a step. Default 512.
    pub max_step: u32,
    /// New tokens of all sequences in a step. Default: the larger of `max_step` and `max_sequences`.
    pub max_batch_tokens: Option<u32>,
    /// Finished operations that can be discarded, newest first. Default 8.
    pub max_undo: u32,
    /// Factor of the logits. Default `1/sqrt(head_dim)`.
    pub softmax_scale: Option<f32>,
    /// How each layer attends, one entry per layer; empty: every layer sees everything, without a cap.
    pub layer_attention: Vec<LayerAttention>,
    /// Upper bound of one slab (a buffer of packed pages) in bytes. Default: what the device allows in one
    /// binding.
    pub max_slab_bytes: Option<u64>,
    /// Upper bound of the attention scratch, which all layers share (each class of layers a part), in bytes.
    /// Attention that needs more runs in rounds, with the same results. Default 32 MiB; one row tile over the
    /// longest sequence must fit, else it is larger.
    pub max_scratch_bytes: u64,
}

macro_rules! setters {
    ($($(#[$doc:meta])* $name:ident($field:ident $(in $part:ident)?: $type:ty);)*) => {
        $($(#[$doc])*
        #[must_use]
        pub fn $name(mut self, $field: $type) -> Self {
            self.$($part.)?$field = $field.into();
            self
        })*
    };
}

impl CacheConfig {
    /// A 2-bit cache with groups of 32 and a window of 128, for 4096 tokens of one sequence.
    pub fn new(layers: u32, query_heads: u32, kv_heads: u32, head_dim: u32) -> Self {
        CacheConfig {
            layers,
            query_heads,
            kv_heads,
            head_dim,
            format: LayerFormat::default(),
            layer_formats: BTreeMap::new(),
            window_format: Dtype::F16,
            capacity: 4096,
            max_capacity: None,
            max_sequences: 1,
            max_step: 512,
            max_batch_tokens: None,
            max_undo: 8,
            softmax_scale: None,
            layer_attention: Vec::new(),
            max_slab_bytes: None,
            max_scratch_bytes: 32 << 20,
        }
    }

    /// The format of a layer.
    pub fn format_of(&self, layer: u32) -> LayerFormat {
        self.layer_formats.get(&layer).copied().unwrap_or(self.format)
    }

    /// Sets the format of all layers that have none of their own.
    #[must_use]
    pub fn with_format(mut self, format: LayerFormat) -> Self {
        self.format = format;
        self
    }

    /// Gives some layers a format of their own.
    #[must_use]
    pub fn with_layer_format(mut self, layers: impl IntoIterator<Item = u32>, format: LayerFormat) -> Self {
        self.layer_formats.extend(layers.into_iter().map(|layer| (layer, format)));
        self
    }

    /// Sets the widths of key and value codes.
    #[must_use]
    pub fn with_bits(mut self, key_bits: Bits, value_bits: Bits) -> Self {
        self.format.keys.bits = key_bits;
        self.format.values.bits = value_bits;
        self
    }

    /// Sets how keys and values are packed.
    #[must_use]
    pub fn with_formats(mut self, keys: TensorFormat, values: TensorFormat) -> Self {
        (self.format.keys, self.format.values) = (keys, values);
        self
    }

    /// Sets how the minimum of a group is stored, of keys and of values.
    #[must_use]
    pub fn with_zero_point(mut self, zero_point: ZeroPoint) -> Self {
        self.format.keys.zero_point = zero_point;
        self.format.values.zero_point = zero_point;
        self
    }

    /// Sets how every layer attends.
    #[must_use]
    pub fn with_attention(mut self, attention: LayerAttention) -> Self {
        self.layer_attention = vec![attention; self.layers as usize];
        self
    }

    setters! {
        /// Sets [`Self::layer_attention`].
        with_layer_attention(layer_attention: Vec<LayerAttention>);
        /// Sets [`LayerFormat::group_size`].
        with_group_size(group_size in format: u32);
        /// Sets [`LayerFormat::value_group_size`].
        with_value_group_size(value_group_size in format: u32);
        /// Sets [`LayerFormat::residual_window`].
        with_residual_window(residual_window in format: u32);
        /// Sets [`LayerFormat::sink_tokens`].
        with_sink_tokens(sink_tokens in format: u32);
        /// Sets [`LayerFormat::history_limit`].
        with_history_limit(history_limit in format: u32);
        /// Sets [`Self::window_format`].
        with_window_format(window_format: Dtype);
        /// Sets [`Self::capacity`].
        with_capacity(capacity: u32);
        /// Sets [`Self::max_capacity`]. With as much as `capacity`, the pool does not grow.
        with_max_capacity(max_capacity: u32);
        /// Sets [`Self::max_sequences`].
        with_max_sequences(max_sequences: u32);
        /// Sets [`Self::max_step`].
        with_max_step(max_step: u32);
        /// Sets [`Self::max_batch_tokens`].
        with_max_batch_tokens(max_batch_tokens: u32);
        /// Sets [`Self::max_undo`].
        with_max_undo(max_undo: u32);
        /// Sets [`Self::softmax_scale`].
        with_softmax_scale(softmax_scale: f32);
        /// Sets [`Self::max_slab_bytes`].
        with_max_slab_bytes(max_slab_bytes: u64);
        /// Sets [`Self::max_scratch_bytes`].
        with_max_scratch_bytes(max_scratch_bytes: u64);
    }
}
