//! The metadata of a snapshot.

use super::{NO_CHECKSUM, SNAPSHOT_VERSION, corrupt};
use crate::config::LayerFormat;
use crate::error::Error;
use crate::format::{Axis, Bits, Dtype, Tensor, TensorFormat, ZeroPoint};
use crate::plan::SequenceLengths;
use crate::shape::{CacheShape, Shape};
use safetensors::tensor::Dtype as FileDtype;

/// The metadata. The order of the fields is part of the format.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub(super) struct Header {
    pub(super) version: u32,
    kv_heads: u32,
    head_dim: u32,
    window_format: String,
    pub(super) tokens: u32,
    /// The classes of layers, in order of their first layers.
    formats: Vec<FormatHeader>,
    /// Of each layer: which of the formats is its own.
    pub(super) layers: Vec<u32>,
    /// Only a file has one.
    pub(super) checksum: String,
}

/// What the layers of a class agree on.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
struct FormatHeader {
    keys: TensorHeader,
    values: TensorHeader,
    group_size: u32,
    value_group_size: u32,
    residual_window: u32,
    sink_tokens: u32,
    history_limit: Option<u32>,
    /// Blocks that have been packed, and how many of them are gone.
    blocks: u32,
    evicted: u32,
}

/// How keys or values are packed.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
struct TensorHeader {
    bits: u32,
    axis: String,
    zero_point: String,
    compact: bool,
    clipping: bool,
    rotated: bool,
}

impl TensorHeader {
    fn new(tensor: Tensor, format: TensorFormat) -> TensorHeader {
        let axis = match format.axis_of(tensor) {
            Axis::PerChannel => "per_channel",
            Axis::PerToken => "per_token",
        };
        let zero_point = match format.zero_point {
            ZeroPoint::Min => "min",
            ZeroPoint::Rounded => "rounded",
        };
        let TensorFormat { bits, compact, clipping, rotated, .. } = format;
        let (axis, zero_point) = (axis.into(), zero_point.into());
        TensorHeader { bits: bits.get(), axis, zero_point, compact, clipping, rotated }
    }

    fn format(&self) -> Option<TensorFormat> {
        let zero_point = match self.zero_point.as_str() {
            "min" => ZeroPoint::Min,
            "rounded" => ZeroPoint::Rounded,
            _ => return None,
        };
        let axis = match self.axis.as_str() {
            "per_channel" => Axis::PerChannel,
            "per_token" => Axis::PerToken,
            _ => return None,
        };
        let format =
            TensorFormat::new(Bits::from_u32(self.bits)?).with_zero_point(zero_point).with_axis(axis);
        let (compact, clipping, rotated) = (self.compact, self.clipping, self.rotated);
        Some(TensorFormat { compact, clipping, rotated, ..format })
    }
}

impl FormatHeader {
    fn lengths(&self, tokens: u32) -> SequenceLengths {
        SequenceLengths { tokens, blocks: self.blocks, evicted: self.evicted }
    }

    fn format(&self) -> Option<LayerFormat> {
        Some(LayerFormat {
            keys: self.keys.format()?,
            values: self.values.format()?,
            group_size: self.group_size,
            value_group_size: Some(self.value_group_size),
            residual_window: self.residual_window,
            sink_tokens: self.sink_tokens,
            history_limit: self.history_limit,
        })
    }
}

impl Header {
    /// Of a sequence whose lengths in each layer `lengths` gives.
    pub(super) fn new(classes: &[Shape], lengths: impl Fn(u32) -> SequenceLengths) -> Header {
        let formats = classes.iter().map(|g| {
            let SequenceLengths { blocks, evicted, .. } = lengths(g.layers[0]);
            FormatHeader {
                keys: TensorHeader::new(Tensor::Keys, g.layout.keys),
                values: TensorHeader::new(Tensor::Values, g.layout.values),
                group_size: g.layout.group,
                value_group_size: g.layout.channel_group,
                residual_window: g.window,
                sink_tokens: g.sinks,
                history_limit: g.history_limit,
                blocks,
                evicted,
            }
        });
        let formats = formats.collect();
        let mut layers = vec![0; classes.iter().map(|g| g.layers.len()).sum()];
        for (class, g) in (0..).zip(classes) {
            g.layers.iter().for_each(|layer| layers[*layer as usize] = class);
        }
        let g = &classes[0];
        Header {
            version: SNAPSHOT_VERSION,
            kv_heads: g.layout.kv_heads,
            head_dim: g.layout.head_dim,
            window_format: match g.window_format {
                Dtype::F16 => "f16",
                Dtype::Bf16 => "bf16",
                Dtype::F32 => "f32",
            }
            .into(),
            tokens: lengths(0).tokens,
            formats,
            layers,
            checksum: NO_CHECKSUM.into(),
        }
    }

    /// What all layers agree on, by the names of [`CacheConfig`].
    pub(super) fn fields(&self) -> [(&'static str, String); 4] {
        [
            ("layers", self.layers.len().to_string()),
            ("kv_heads", self.kv_heads.to_string()),
            ("head_dim", self.head_dim.to_string()),
            ("window_format", self.window_format.clone()),
        ]
    }

    /// The format of a layer, by the names of [`LayerFormat`].
    pub(super) fn format_fields(&self, layer: usize) -> Vec<(&'static str, String)> {
        let f = &self.formats[self.layers[layer] as usize];
        let limit = f.history_limit.map_or("none".into(), |limit| limit.to_string());
        vec![
            ("keys.bits", f.keys.bits.to_string()),
            ("keys.axis", f.keys.axis.clone()),
            ("keys.zero_point", f.keys.zero_point.clone()),
            ("keys.compact", f.keys.compact.to_string()),
            ("keys.clipping", f.keys.clipping.to_string()),
            ("keys.rotated", f.keys.rotated.to_string()),
            ("values.bits", f.values.bits.to_string()),
            ("values.axis", f.values.axis.clone()),
            ("values.zero_point", f.values.zero_point.clone()),
            ("values.compact", f.values.compact.to_string()),
            ("values.clipping", f.values.clipping.to_string()),
            ("values.rotated", f.values.rotated.to_string()),
            ("group_size", f.group_size.to_string()),
            ("value_group_size", f.value_group_size.to_string()),
            ("residual_window", f.residual_window.to_string()),
            ("sink_tokens", f.sink_tokens.to_string()),
            ("history_limit", limit),
        ]
    }
}

/// What follows from a header.
pub(super) struct Classes<'a> {
    header: &'a Header,
    classes: Vec<Shape>,
}

impl Classes<'_> {
    /// The shapes of a cache that can hold the sequence. Every number is checked here.
    pub(super) fn new(header: &Header) -> Result<Classes<'_>, Error> {
        let window_format = match header.window_format.as_str() {
            "f16" => Some(Dtype::F16),
            "bf16" => Some(Dtype::Bf16),
            "f32" => Some(Dtype::F32),
            _ => None,
        };
        let formats: Option<Vec<LayerFormat>> = header.formats.iter().map(FormatHeader::format).collect();
        let (Some(formats), Some(window_format)) = (formats, window_format) else {
            return Err(corrupt("it names a format that does not exist"));
        };
        let by_layer: Option<Vec<LayerFormat>> =
            header.layers.iter().map(|class| formats.get(*class as usize).copied()).collect();
        let by_layer = by_layer.ok_or_else(|| corrupt("a layer names a format that is not there"))?;
        let shape = CacheShape::of_formats(header.kv_heads, header.head_dim, window_format, &by_layer);
        let CacheShape { classes, places, .. } = shape.map_err(corrupt)?;
        // Written as it would be again.
        let by_layer: Vec<u32> = places.iter().map(|(class, _)| *class as u32).collect();
        if by_layer != header.layers || classes.len() != formats.len() {
            return Err(corrupt("its formats are not in order of their first layers, each once"));
        }
        for (g, format) in classes.iter().zip(&header.formats) {
            format.lengths(header.tokens).check(g).map_err(corrupt)?;
        }
        Ok(Classes { header, classes })
    }

    pub(super) fn shape(&self, layer: usize) -> &Shape {
        &self.classes[self.header.layers[layer] as usize]
    }

    pub(super) fn lengths(&self, layer: usize) -> SequenceLengths {
        self.header.formats[self.header.layers[layer] as usize].lengths(self.header.tokens)
    }

    /// Type and shape of a tensor.
    pub(super) fn tensor(&self, layer: usize, tensor: &str) -> (FileDtype, Vec<usize>) {
        let (s, lengths) = (self.shape(layer), self.lengths(layer));
        let heads = s.layout.kv_heads as usize;
        if tensor == "blocks" {
            let blocks = (lengths.blocks - lengths.evicted) as usize;
            return (FileDtype::U32, vec![blocks, heads, s.layout.head_words() as usize]);
        }
        let tokens = if tensor.starts_with("sinks") { lengths.sinks(s) } else { lengths.window(s) };
        let dtype = match s.window_format {
            Dtype::F16 => FileDtype::F16,
            Dtype::Bf16 => FileDtype::BF16,
            Dtype::F32 => FileDtype::F32,
        };
        (dtype, vec![tokens as usize, heads, s.layout.head_dim as usize])
    }
}
