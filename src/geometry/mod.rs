//! Every size that follows from a configuration, in one place.

mod attention;
mod classes;
mod pool;

use crate::config::{CacheConfig, LayerAttention, Mask};
use crate::error::Error;
use crate::format::{BlockLayout, Dtype, Tensor};

/// Largest length of a sequence: positions stay exact in a signed 32-bit integer.
pub(crate) const MAX_TOKENS: u32 = 1 << 30;
/// Largest buffer whose bytes shaders can index on every backend.
const MAX_SHADER_BYTES: u64 = i32::MAX as u64 & !15;

/// Distance in bytes of two passes' parameters in a plan buffer: the largest uniform offset alignment that WebGPU allows a device.
pub(crate) const PLAN_PARAMS_STRIDE: u32 = 256;

/// Words of a tile, of an attention item or run, and of a split in a plan buffer.
pub(crate) const TILE_WORDS: u32 = 8;
pub(crate) const ITEM_WORDS: u32 = 5;
pub(crate) const SPLIT_WORDS: u32 = 3;

/// Upload buffers that a cache always has.
pub(crate) const UPLOADS: u64 = 3;

/// Tokens or channels of a group.
const GROUPS: [u32; 4] = [16, 32, 64, 128];

/// The binding size that WebGPU guarantees.
pub(crate) const DEFAULT_MAX_BINDING: u64 = 128 << 20;

/// Every size derived from a configuration, in one place, for a class of layers: those that agree on their [`LayerFormat`](crate::LayerFormat).
#[derive(Debug, Clone, PartialEq)]
pub struct Geometry {
    /// The layers of the model that it is for.
    pub layer_ids: Vec<u32>,
    /// Their number.
    pub layers: u32,
    /// Query heads per layer.
    pub query_heads: u32,
    /// Query heads per KV head.
    pub heads_per_group: u32,
    /// The packed block.
    pub layout: BlockLayout,
    /// W.
    pub window: u32,
    /// S.
    pub sinks: u32,
    /// Tokens up to which sequences keep their history.
    pub history_limit: Option<u32>,
    /// Element type of unpacked tokens.
    pub window_format: Dtype,
    /// Sequences at a time.
    pub max_sequences: u32,
    /// New tokens of one sequence in a step.
    pub max_step: u32,
    /// New tokens of all sequences in a step.
    pub max_batch_tokens: u32,
    /// Operations that can be discarded.
    pub max_undo: u32,
    /// Factor of the logits.
    pub softmax_scale: f32,
    /// The different ways in which layers attend. Each has its own part of a step's plan.
    pub attention_classes: Vec<LayerAttention>,
    /// Index in `attention_classes` of each layer.
    pub layer_classes: Vec<u32>,
    /// Tokens of the ring of one sequence.
    pub ring_tokens: u32,
    /// Tokens of the staging buffer; 0 if every step fits the rings.
    pub staging_tokens: u32,
    /// Pages of each slab of the pool, 0 for one that has been given back. It changes as the pool grows and shrinks.
    pub slab_pages: Vec<u32>,
    /// Pages of one slab, at most.
    pub pages_per_slab: u32,
    /// Pages up to which the pool grows.
    pub max_pages: u32,
    /// Pages that sequences may have, all together, beyond those of the pool, because forks share them: plans and scratch are made for it.
    pub shared_pages: u32,
    /// Partial results (of one row of one head over one split) that the attention scratch holds.
    pub scratch_cells: u32,
    /// Bytes of the longest plan at the size that the configuration promises.
    pub(crate) promised_plan_bytes: u64,
    /// The largest binding of the device, in bytes.
    pub(crate) max_binding: u64,
    /// What the configuration grants the scratch, in bytes.
    max_scratch_bytes: u64,
}

fn check(ok: bool, name: &'static str, got: u32, allowed: &'static str) -> Result<(), Error> {
    if ok { Ok(()) } else { Err(Error::Unsupported { name, got: got.into(), allowed }) }
}

/// The distinct entries of `layer_attention`, and the index of each layer's.
fn attention_classes(c: &CacheConfig) -> Result<(Vec<LayerAttention>, Vec<u32>), Error> {
    let entries = c.layer_attention.len() as u32;
    check([0, c.layers].contains(&entries), "layer_attention entries", entries, "none, or one per layer")?;
    let mut classes: Vec<LayerAttention> = Vec::new();
    let mut layers = Vec::new();
    for attention in
        c.layer_attention.iter().copied().chain((entries..c.layers).map(|_| LayerAttention::default()))
    {
        if attention.mask != Mask::Causal {
            return Err(Error::UnsupportedMask { mask: attention.mask });
        }
        if let Some(window) = attention.sliding_window {
            check(window > 0, "sliding_window", window, "1 or more tokens, or None")?;
        }
        if let Some(got) = attention.soft_cap
            && !(got.is_finite() && got > 0.0)
        {
            return Err(Error::SoftCap { got });
        }
        let known = classes.iter().position(|class| *class == attention);
        layers.push(known.unwrap_or(classes.len()) as u32);
        if known.is_none() {
            classes.push(attention);
        }
    }
    Ok((classes, layers))
}

impl Geometry {
    /// Validates `config` for a device whose storage bindings hold up to `max_binding` bytes; the geometry of the class of its first layer.
    ///
    /// # Errors
    /// As [`Self::all`].
    pub fn new(config: &CacheConfig, max_binding: u64) -> Result<Geometry, Error> {
        Ok(Geometry::all(config, max_binding)?.swap_remove(0))
    }

    /// Validates `config` for a device whose storage bindings hold up to `max_binding` bytes; the geometry of each class of its layers, that of the first
    /// layer first.
    ///
    /// # Errors
    /// [`Error::Unsupported`], [`Error::Contradiction`], [`Error::LayerOutOfRange`] for a format of a layer that is not there, [`Error::HeadsDoNotDivide`], [`Error::SinksBeyondCapacity`], [`Error::SoftmaxScale`], [`Error::SoftCap`], [`Error::UnsupportedMask`],
    /// [`Error::LimitTooLow`].
    pub fn all(config: &CacheConfig, max_binding: u64) -> Result<Vec<Geometry>, Error> {
        let classes = classes::classes(config)?;
        classes.into_iter().map(|class| Geometry::of_class(class, max_binding)).collect()
    }

    /// Of layers that agree on their format, which is that of the configuration.
    fn of_class(class: classes::Class, max_binding: u64) -> Result<Geometry, Error> {
        let classes::Class { layers: layer_ids, config } = class;
        let c = &config;
        let positive = "1 or more";
        let max_binding = max_binding.min(MAX_SHADER_BYTES);
        check((1..=4096).contains(&c.kv_heads), "kv_heads", c.kv_heads, "1 to 4096")?;
        check(c.query_heads > 0, "query_heads", c.query_heads, positive)?;
        if !c.query_heads.is_multiple_of(c.kv_heads) {
            return Err(Error::HeadsDoNotDivide { query_heads: c.query_heads, kv_heads: c.kv_heads });
        }
        let heads_per_group = c.query_heads / c.kv_heads;
        check(heads_per_group <= 16, "query_heads / kv_heads", heads_per_group, "a ratio from 1 to 16")?;
        check(
            c.head_dim.is_multiple_of(8) && (8..=512).contains(&c.head_dim),
            "head_dim",
            c.head_dim,
            "a multiple of 8 from 8 to 512",
        )?;
        let value_head_dim = c.value_head_dim.unwrap_or(c.head_dim);
        check(value_head_dim == c.head_dim, "value_head_dim", value_head_dim, "head_dim, or None")?;
        let row = c.kv_heads * c.head_dim;
        check(row <= 1 << 20, "kv_heads * head_dim", row, "at most 1048576")?;
        check(GROUPS.contains(&c.format.group_size), "group_size", c.format.group_size, "16, 32, 64 or 128")?;
        let value_group = c.format.value_group_size.unwrap_or(c.format.group_size);
        check(
            GROUPS.contains(&value_group) || value_group == c.head_dim,
            "value_group_size",
            value_group,
            "16, 32, 64, 128 or head_dim",
        )?;
        check(
            c.format.residual_window <= 1 << 20,
            "residual_window",
            c.format.residual_window,
            "at most 1048576",
        )?;
        check((1..=MAX_TOKENS).contains(&c.capacity), "capacity", c.capacity, "1 to 2^30 tokens")?;
        if let Some(most) = c.max_capacity {
            let sequences = u64::from(c.max_sequences.max(1)) * u64::from(MAX_TOKENS);
            if !(u64::from(c.capacity)..=sequences).contains(&most.into()) {
                let allowed = "capacity to 2^30 tokens per sequence, or None to grow while there is memory";
                return Err(Error::Unsupported { name: "max_capacity", got: most.into(), allowed });
            }
        }
        if c.format.sink_tokens > c.capacity {
            return Err(Error::SinksBeyondCapacity {
                sink_tokens: c.format.sink_tokens,
                capacity: c.capacity,
            });
        }
        if let Some(limit) = c.format.history_limit.filter(|limit| *limit < c.format.residual_window) {
            return Err(Error::Contradiction {
                a: format!("history_limit = {limit}"),
                b: format!("residual_window = {}", c.format.residual_window),
                instead: "tokens of the window are never dropped: raise history_limit or lower residual_window",
            });
        }
        check((1..=65535).contains(&c.max_sequences), "max_sequences", c.max_sequences, "1 to 65535")?;
        check((1..=1 << 20).contains(&c.max_step), "max_step", c.max_step, "1 to 1048576")?;
        let max_batch_tokens = c.max_batch_tokens.unwrap_or(c.max_step.max(c.max_sequences));
        check(
            (c.max_step..=1 << 20).contains(&max_batch_tokens),
            "max_batch_tokens",
            max_batch_tokens,
            "max_step to 1048576",
        )?;
        let softmax_scale = c.softmax_scale.unwrap_or(1.0 / (c.head_dim as f32).sqrt());
        if !(softmax_scale.is_finite() && softmax_scale > 0.0) {
            return Err(Error::SoftmaxScale { got: softmax_scale });
        }

        let (attention_classes, layer_classes) = attention_classes(c)?;

        let layout = BlockLayout {
            head_dim: c.head_dim,
            kv_heads: c.kv_heads,
            group: c.format.group_size,
            channel_group: value_group,
            keys: c.format.keys,
            values: c.format.values,
        };
        let held = c.format.residual_window + c.format.group_size - 1;
        let ring_tokens = held + c.max_step.min(held);
        let staging_tokens = if c.max_step > held { max_batch_tokens } else { 0 };

        let pages = pool::pages_for_tokens(c, c.capacity);
        let max_pages = pool::pages_for_tokens(c, c.max_capacity.unwrap_or(u32::MAX));
        let page_bytes = layout.page_words() * 4;
        let chosen = c.max_slab_bytes.unwrap_or(u64::MAX);
        let slab_limit = max_binding.min(chosen);
        if page_bytes > slab_limit {
            return Err(Error::LimitTooLow {
                limit: if chosen < max_binding {
                    "max_slab_bytes"
                } else {
                    "max_storage_buffer_binding_size"
                },
                available: slab_limit,
                needed: page_bytes,
                what: "one page of 256 packed tokens, which a slab must hold",
                instead: "use fewer bits or larger groups",
            });
        }
        let pages_per_slab = u32::try_from(slab_limit / page_bytes).unwrap_or(u32::MAX);

        let mut g = Geometry {
            layer_ids,
            layers: c.layers,
            query_heads: c.query_heads,
            heads_per_group,
            layout,
            window: c.format.residual_window,
            sinks: c.format.sink_tokens,
            history_limit: c.format.history_limit,
            window_format: c.window_format,
            max_sequences: c.max_sequences,
            max_step: c.max_step,
            max_batch_tokens,
            max_undo: c.max_undo,
            softmax_scale,
            attention_classes,
            layer_classes,
            ring_tokens,
            staging_tokens,
            slab_pages: pool::slabs_of(pages, pages_per_slab),
            pages_per_slab,
            max_pages,
            shared_pages: 0,
            scratch_cells: 0,
            promised_plan_bytes: 0,
            max_binding,
            max_scratch_bytes: c.max_scratch_bytes,
        };
        for (what, bytes) in [
            ("the sink slots and rings of one layer", g.unpacked_bytes()),
            ("the staging buffer", g.staging_bytes()),
            ("rotated queries and keys", g.rotated_bytes()),
        ] {
            if bytes > max_binding {
                return Err(Error::LimitTooLow {
                    limit: "max_storage_buffer_binding_size",
                    available: max_binding,
                    needed: bytes,
                    what,
                    instead: "lower max_sequences, max_step, max_batch_tokens, sink_tokens or residual_window",
                });
            }
        }
        if c.max_capacity.is_some() {
            // What cannot work when the pool is as large as it may get is refused now.
            g.promised_plan_bytes = g.fully_grown()?.plan_bytes();
        }
        let slabs = std::mem::take(&mut g.slab_pages);
        g.with_slabs(slabs)
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

    /// Bytes of the buffer for what is rotated before a kernel reads it: queries of layers with rotated keys, and rows that are about to be packed per channel.
    pub fn rotated_bytes(&self) -> u64 {
        let row = 4 * u64::from(self.layout.head_dim);
        let queries = u64::from(self.max_batch_tokens) * u64::from(self.query_heads) * row;
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
