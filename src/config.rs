//! What a user chooses.

use crate::format::{Bits, Dtype, TensorFormat, ZeroPoint};

/// Which of a step's new tokens a query sees besides the tokens before them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Mask {
    /// Those up to its own position.
    #[default]
    Causal,
    /// All of them, as in encoders and prefix language models. Not supported: [`Error::UnsupportedMask`](crate::Error::UnsupportedMask).
    Bidirectional,
    /// Its ancestors in a tree of drafted tokens. Not supported: [`Error::UnsupportedMask`](crate::Error::UnsupportedMask).
    Tree,
}

/// How a layer attends.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct LayerAttention {
    /// Which new tokens a query sees.
    pub mask: Mask,
    /// A query sees its own position and the `n - 1` before it; `None`: everything before it. The cache keeps older tokens all the same.
    pub sliding_window: Option<u32>,
    /// Logits become `cap * tanh(logit / cap)`, as in Gemma.
    pub soft_cap: Option<f32>,
}

/// Configuration of a cache. All layers share it.
///
/// ```
/// use kivi_wgpu::{Bits, CacheConfig};
/// // 32 layers, 32 query heads, 8 KV heads, head_dim 128
/// let config = CacheConfig::new(32, 32, 8, 128)
///     .with_bits(Bits::Two, Bits::Two)
///     .with_capacity(32768);
/// assert_eq!(config.residual_window, 128);
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
    /// Elements per head of the values; `None`: `head_dim`. Nothing else is supported, so models with multi-head latent attention are not.
    pub value_head_dim: Option<u32>,
    /// How keys are packed. Default 2 bits, by the rules of KIVI.
    pub keys: TensorFormat,
    /// How values are packed. Default 2 bits, by the rules of KIVI.
    pub values: TensorFormat,
    /// Tokens in a group of keys, and in a block: 16, 32, 64 or 128. Default 32.
    pub group_size: u32,
    /// Channels in a group of values: 16, 32, 64, 128 or `head_dim`. Default: `group_size`.
    pub value_group_size: Option<u32>,
    /// W: the newest tokens that are always kept unpacked. Default 128; may be 0.
    pub residual_window: u32,
    /// S: the first positions, kept unpacked for ever. Default 0.
    pub sink_tokens: u32,
    /// Element type of the residual window and the sinks. Default f16.
    pub window_format: Dtype,
    /// Tokens that the pool holds at first, over all sequences. Default 4096. It grows by slabs, of half as much again as there is; nothing is copied.
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
    /// Upper bound of one slab (a buffer of packed pages) in bytes. Default: what the device allows in one binding.
    pub max_slab_bytes: Option<u64>,
    /// Upper bound of the attention scratch, which all layers share, in bytes. Attention that needs more runs in rounds, with the same results.
    /// Default 32 MiB; one row tile over the longest sequence must fit, else it is larger.
    pub max_scratch_bytes: u64,
}

macro_rules! setters {
    ($($(#[$doc:meta])* $name:ident($field:ident: $type:ty);)*) => {
        $($(#[$doc])*
        #[must_use]
        pub fn $name(mut self, $field: $type) -> Self {
            self.$field = $field.into();
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
            value_head_dim: None,
            keys: TensorFormat::new(Bits::Two),
            values: TensorFormat::new(Bits::Two),
            group_size: 32,
            value_group_size: None,
            residual_window: 128,
            sink_tokens: 0,
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

    /// Sets the widths of key and value codes.
    #[must_use]
    pub fn with_bits(mut self, key_bits: Bits, value_bits: Bits) -> Self {
        self.keys.bits = key_bits;
        self.values.bits = value_bits;
        self
    }

    /// Sets how keys and values are packed.
    #[must_use]
    pub fn with_formats(mut self, keys: TensorFormat, values: TensorFormat) -> Self {
        (self.keys, self.values) = (keys, values);
        self
    }

    /// Sets how the minimum of a group is stored, of keys and of values.
    #[must_use]
    pub fn with_zero_point(mut self, zero_point: ZeroPoint) -> Self {
        self.keys.zero_point = zero_point;
        self.values.zero_point = zero_point;
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
        /// Sets [`Self::value_head_dim`].
        with_value_head_dim(value_head_dim: u32);
        /// Sets [`Self::group_size`].
        with_group_size(group_size: u32);
        /// Sets [`Self::value_group_size`].
        with_value_group_size(value_group_size: u32);
        /// Sets [`Self::residual_window`].
        with_residual_window(residual_window: u32);
        /// Sets [`Self::sink_tokens`].
        with_sink_tokens(sink_tokens: u32);
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
