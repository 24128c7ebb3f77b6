//! Every size that follows from a configuration and never changes: nothing of a device, nothing of a pool.

mod checks;
mod classes;

use crate::config::{CacheConfig, LayerAttention, LayerFormat};
use crate::error::Error;
use crate::format::{BlockLayout, Dtype, Tensor};

/// Largest length of a sequence: positions stay exact in a signed 32-bit integer.
pub(crate) const MAX_TOKENS: u32 = 1 << 30;

/// Tokens or channels of a group.
const GROUPS: [u32; 4] = [16, 32, 64, 128];

/// The sizes of a format class: layers that agree on their whole [`LayerFormat`](crate::LayerFormat).
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Shape {
    /// The layers of the model that it is for.
    pub layers: Vec<u32>,
    /// Query heads per layer.
    pub query_heads: u32,
    /// Query heads per KV head.
    pub heads_per_kv: u32,
    /// The packed block.
    pub layout: BlockLayout,
    /// W, the tokens of the residual window that are always unpacked.
    pub window: u32,
    /// S, the first positions, which are never packed.
    pub sinks: u32,
    /// Tokens up to which sequences keep their packed history.
    pub history_limit: Option<u32>,
    /// Element type of unpacked tokens.
    pub window_format: Dtype,
    /// Sequences at a time.
    pub max_sequences: u32,
    /// New tokens of one sequence in a step.
    pub max_step: u32,
    /// New tokens of all sequences in a step.
    pub max_batch_tokens: u32,
    /// Factor of the logits.
    pub softmax_scale: f32,
    /// The different ways in which the layers attend. Each has its own part of a step's schedule.
    pub attention: Vec<LayerAttention>,
    /// Index in `attention` of each layer.
    pub layer_attention: Vec<u32>,
    /// Tokens of the ring of one sequence.
    pub ring_tokens: u32,
    /// Tokens of the staging buffer; 0 if every step fits the rings.
    pub staging_tokens: u32,
    /// Bytes that partial results of attention may take.
    pub max_scratch_bytes: u64,
}

/// The sizes of a cache.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct CacheShape {
    /// Its format classes, that of the first layer first.
    pub classes: Vec<Shape>,
    /// Of each layer of the model: its class, and its index there.
    pub places: Vec<(usize, usize)>,
    /// Operations that can be discarded.
    pub max_undo: u32,
}

impl CacheShape {
    /// Validates `config`.
    ///
    /// # Errors
    /// [`Error::Unsupported`], [`Error::Contradiction`], [`Error::LayerOutOfRange`] for a format of a layer
    /// that is not there, [`Error::HeadsDoNotDivide`], [`Error::SinksBeyondCapacity`],
    /// [`Error::SoftmaxScale`], [`Error::SoftCap`].
    pub fn new(config: &CacheConfig) -> Result<CacheShape, Error> {
        let classes =
            classes::classes(config)?.into_iter().map(Shape::of_class).collect::<Result<Vec<_>, _>>()?;
        let mut places = vec![(0, 0); config.layers as usize];
        for (class, shape) in classes.iter().enumerate() {
            for (index, &layer) in shape.layers.iter().enumerate() {
                places[layer as usize] = (class, index);
            }
        }
        Ok(CacheShape { classes, places, max_undo: config.max_undo })
    }

    /// Of a cache that holds a sequence in these formats, by layer: what the meaning of its words depends on.
    /// What is for steps is as small as it can be.
    pub(crate) fn of_formats(
        kv_heads: u32,
        head_dim: u32,
        window_format: Dtype,
        formats: &[LayerFormat],
    ) -> Result<CacheShape, Error> {
        let mut config = CacheConfig::new(formats.len() as u32, kv_heads, kv_heads, head_dim)
            .with_window_format(window_format)
            .with_max_step(1);
        for (layer, format) in (0..).zip(formats) {
            config.capacity = config.capacity.max(format.sink_tokens);
            config = config.with_layer_format([layer], *format);
        }
        CacheShape::new(&config)
    }

    /// Layers of the model.
    pub fn layers(&self) -> u32 {
        self.places.len() as u32
    }

    /// What all classes agree on, and the first has.
    pub fn first(&self) -> &Shape {
        &self.classes[0]
    }

    /// The sizes of a layer.
    ///
    /// # Errors
    /// [`Error::LayerOutOfRange`].
    pub fn of_layer(&self, layer: u32) -> Result<&Shape, Error> {
        Ok(&self.classes[self.place(layer)?.0])
    }

    /// The class of a layer and its index there.
    ///
    /// # Errors
    /// [`Error::LayerOutOfRange`].
    pub fn place(&self, layer: u32) -> Result<(usize, usize), Error> {
        let error = Error::LayerOutOfRange { got: layer, layers: self.layers() };
        self.places.get(layer as usize).copied().ok_or(error)
    }
}

impl Shape {
    /// The class of the first layer of a configuration.
    ///
    /// # Errors
    /// As [`CacheShape::new`].
    pub fn new(config: &CacheConfig) -> Result<Shape, Error> {
        Ok(CacheShape::new(config)?.classes.swap_remove(0))
    }

    /// Of layers that agree on their format, which is that of the configuration.
    fn of_class(class: classes::Class) -> Result<Shape, Error> {
        let classes::Class { layers, config } = class;
        let c = &config;
        checks::heads(c)?;
        checks::sizes(c)?;
        checks::limits(c)?;
        let softmax_scale = c.softmax_scale.unwrap_or(1.0 / (c.head_dim as f32).sqrt());
        if !(softmax_scale.is_finite() && softmax_scale > 0.0) {
            return Err(Error::SoftmaxScale { got: softmax_scale });
        }
        let (attention, layer_attention) = checks::attention(c)?;
        let held = c.format.residual_window + c.format.group_size - 1;
        let max_batch_tokens = checks::max_batch_tokens(c);
        Ok(Shape {
            layers,
            query_heads: c.query_heads,
            heads_per_kv: c.query_heads / c.kv_heads,
            layout: BlockLayout {
                head_dim: c.head_dim,
                kv_heads: c.kv_heads,
                group: c.format.group_size,
                channel_group: c.format.value_group_size.unwrap_or(c.format.group_size),
                keys: c.format.keys,
                values: c.format.values,
            },
            window: c.format.residual_window,
            sinks: c.format.sink_tokens,
            history_limit: c.format.history_limit,
            window_format: c.window_format,
            max_sequences: c.max_sequences,
            max_step: c.max_step,
            max_batch_tokens,
            softmax_scale,
            attention,
            layer_attention,
            ring_tokens: held + c.max_step.min(held),
            staging_tokens: if c.max_step > held { max_batch_tokens } else { 0 },
            max_scratch_bytes: c.max_scratch_bytes,
        })
    }

    /// Whether any layer caps its logits.
    pub fn has_soft_caps(&self) -> bool {
        self.attention.iter().any(|attention| attention.soft_cap.is_some())
    }

    /// The most tokens that a window holds between steps, W + G − 1.
    pub fn held_tokens(&self) -> u32 {
        self.window + self.layout.group - 1
    }

    /// Unpacked slots of one sequence: its sinks, then its ring.
    pub fn sequence_slots(&self) -> u32 {
        self.sinks + self.ring_tokens
    }

    /// Unpacked slots of a layer.
    pub fn unpacked_slots(&self) -> u32 {
        self.max_sequences * self.sequence_slots()
    }

    /// Element type of tensors that are packed in 16 bits.
    pub fn sixteen_bit_format(&self) -> Dtype {
        if self.window_format == Dtype::F32 { Dtype::F16 } else { self.window_format }
    }

    /// Words of one unpacked token's keys (or values) of all heads.
    pub fn token_words(&self) -> u32 {
        self.window_format.words(self.layout.kv_heads * self.layout.head_dim)
    }

    /// Words of one head's row of an unpacked token.
    pub fn row_words(&self) -> u32 {
        self.window_format.words(self.layout.head_dim)
    }

    /// Bytes of a layer's sink slots and rings, keys and values.
    pub fn unpacked_bytes(&self) -> u64 {
        // Sizes that overflow are beyond any limit.
        let slots = u64::from(self.max_sequences) * u64::from(self.sequence_slots());
        slots.saturating_mul(u64::from(self.token_words()) * 8)
    }

    /// Bytes of the buffer for what is rotated before a kernel reads it: queries of layers with rotated keys,
    /// and rows that are about to be packed, unless workgroup memory holds them.
    pub fn rotated_bytes(&self) -> u64 {
        let row = 4 * u64::from(self.layout.head_dim);
        // Each rotated, and as it is.
        let queries = 2 * u64::from(self.max_batch_tokens) * u64::from(self.query_heads) * row;
        // A step packs less than a group of what the window held besides new tokens.
        let held = u64::from(self.max_sequences) * u64::from(self.layout.group - 1);
        let packed = (u64::from(self.max_batch_tokens) + held) * u64::from(self.layout.kv_heads) * row;
        let stored =
            [Tensor::Keys, Tensor::Values].into_iter().any(|t| self.layout.tensor(t).rotates_apart());
        let needed = [(self.layout.keys.rotated, queries), (stored, packed)];
        needed.into_iter().map(|(is_needed, bytes)| if is_needed { bytes } else { 0 }).max().unwrap_or(0)
    }

    /// Bytes of the staging buffer.
    pub fn staging_bytes(&self) -> u64 {
        // A binding needs a buffer, even if no step is ever staged.
        (u64::from(self.staging_tokens) * u64::from(self.token_words()) * 8).max(16)
    }
}
