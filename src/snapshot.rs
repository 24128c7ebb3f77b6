//! Save and load: one sequence as a safetensors file.
//!
//! A file holds, for each layer `l`, in the words of the [block format](crate::format):
//!
//! | tensor | type | shape |
//! |---|---|---|
//! | `layers.l.sinks.keys`, `layers.l.sinks.values` | the window's | tokens, KV heads, head_dim |
//! | `layers.l.blocks` | U32 | blocks, KV heads, words of a head's block |
//! | `layers.l.window.keys`, `layers.l.window.values` | the window's | tokens, KV heads, head_dim |
//!
//! The metadata has one entry, `kivi_wgpu`: JSON with the format version, all of the configuration that affects the meaning of the words, the lengths, and
//! the CRC-32 of the whole file with eight zeros in the place of the checksum. Equal states give equal bytes on every backend. `examples/decode_snapshot.py`
//! reads a file with numpy.

use crate::config::CacheConfig;
use crate::error::Error;
use crate::format::{Bits, Dtype, TensorFormat, ZeroPoint, enter, widen};
use crate::geometry::{Geometry, MAX_TOKENS};
use crate::state::{LayerState, UnpackedTokens};
use safetensors::tensor::{Dtype as FileDtype, SafeTensors, TensorView};
use std::collections::HashMap;

/// The version of the files that are written, and that can be read.
pub const SNAPSHOT_VERSION: u32 = 1;

/// The metadata's key.
const KEY: &str = "kivi_wgpu";
/// What stands before the checksum in a file: a string of JSON within a string of JSON.
const BEFORE_CHECKSUM: &[u8] = br#"\"checksum\":\""#;
const NO_CHECKSUM: &str = "00000000";

/// The metadata. The order of the fields is part of the format.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
struct Header {
    version: u32,
    layers: u32,
    kv_heads: u32,
    head_dim: u32,
    keys: TensorHeader,
    values: TensorHeader,
    group_size: u32,
    value_group_size: u32,
    residual_window: u32,
    sink_tokens: u32,
    window_format: String,
    tokens: u32,
    blocks: u32,
    /// Only a file has one.
    checksum: String,
}

/// How keys or values are packed.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
struct TensorHeader {
    bits: u32,
    zero_point: String,
    clipping: bool,
    rotated: bool,
}

/// What every version of the metadata has.
#[derive(serde::Deserialize)]
struct Version {
    version: u32,
}

/// A sequence outside any cache: bit for bit what every layer holds of it.
///
/// ```
/// use kivi_wgpu::{CacheConfig, SequenceStep, Snapshot, oracle::{CpuCache, LayerInput}};
/// let config = CacheConfig::new(1, 2, 1, 64);
/// let mut cache = CpuCache::new(&config)?;
/// let sequence = cache.create_sequence()?;
/// let row = [0.5; 64 * 300];
/// cache.step(&[SequenceStep::append(sequence, 300)], &[LayerInput { k: &row, v: &row, ..Default::default() }])?;
///
/// let file = cache.save(sequence)?.to_bytes()?;
/// let mut other = CpuCache::new(&config)?;
/// let (loaded, _) = other.load(&Snapshot::from_bytes(&file)?)?;
/// assert_eq!(other.state(0, loaded)?, cache.state(0, sequence)?);
/// # Ok::<(), kivi_wgpu::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Snapshot {
    header: Header,
    layers: Vec<LayerState>,
}

impl Snapshot {
    /// Of layers that all hold the same tokens of one sequence.
    pub(crate) fn new(g: &Geometry, layers: Vec<LayerState>) -> Snapshot {
        let blocks = layers.first().map_or(0, |layer| layer.blocks.len() as u32 / g.layout.block_words());
        let tokens = layers.first().map_or(0, |layer| layer.tokens);
        Snapshot { header: Header::new(g, tokens, blocks), layers }
    }

    /// Tokens of the sequence.
    pub fn tokens(&self) -> u32 {
        self.header.tokens
    }

    /// Packed blocks of the sequence.
    pub fn blocks(&self) -> u32 {
        self.header.blocks
    }

    /// What each layer holds.
    pub fn layers(&self) -> &[LayerState] {
        &self.layers
    }

    /// The file: equal for equal states.
    ///
    /// # Errors
    /// [`Error::SnapshotCorrupt`] if safetensors refuses to write the file, which no snapshot of a cache gives it reason to.
    pub fn to_bytes(&self) -> Result<Vec<u8>, Error> {
        let g = self.header.geometry()?;
        let mut data = Vec::new();
        for (layer, state) in self.layers.iter().enumerate() {
            for (tensor, words) in
                ["sinks.keys", "sinks.values", "blocks", "window.keys", "window.values"].into_iter().zip([
                    &state.sinks.keys,
                    &state.sinks.values,
                    &state.blocks,
                    &state.window.keys,
                    &state.window.values,
                ])
            {
                let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
                data.push((format!("layers.{layer}.{tensor}"), self.header.tensor(&g, tensor), bytes));
            }
        }
        let views: Result<Vec<_>, _> = data
            .iter()
            .map(|(name, (dtype, shape), bytes)| Ok((name, TensorView::new(*dtype, shape.clone(), bytes)?)))
            .collect();
        let text = serde_json::to_string(&self.header).map_err(corrupt)?;
        let metadata = HashMap::from([(KEY.to_string(), text)]);
        let views = views.map_err(|error: safetensors::SafeTensorError| corrupt(error))?;
        let mut file = safetensors::serialize(views, Some(metadata)).map_err(corrupt)?;
        let at = checksum_at(&file)?;
        let checksum = format!("{:08x}", crc32fast::hash(&file));
        file[at..at + checksum.len()].copy_from_slice(checksum.as_bytes());
        Ok(file)
    }

    /// Reads and checks a file.
    ///
    /// # Errors
    /// [`Error::SnapshotCorrupt`] if it is none, or was cut or altered; [`Error::SnapshotVersion`].
    pub fn from_bytes(file: &[u8]) -> Result<Snapshot, Error> {
        let (_, metadata) = SafeTensors::read_metadata(file).map_err(corrupt)?;
        let tensors = SafeTensors::deserialize(file).map_err(corrupt)?;
        let text = metadata.metadata().as_ref().and_then(|entries| entries.get(KEY));
        let text = text.ok_or_else(|| corrupt("it has no metadata of this library"))?;
        let Version { version } = serde_json::from_str(text).map_err(corrupt)?;
        if version != SNAPSHOT_VERSION {
            return Err(Error::SnapshotVersion { found: version, supported: SNAPSHOT_VERSION });
        }
        let header: Header = serde_json::from_str(text).map_err(corrupt)?;
        let at = checksum_at(file)?;
        let mut crc = crc32fast::Hasher::new();
        let after = at + NO_CHECKSUM.len();
        crc.update(&file[..at]);
        crc.update(NO_CHECKSUM.as_bytes());
        crc.update(file.get(after..).unwrap_or_default());
        if header.checksum != format!("{:08x}", crc.finalize()) {
            return Err(corrupt("its checksum is wrong"));
        }
        let header = Header { checksum: NO_CHECKSUM.into(), ..header };
        let g = header.geometry()?;
        if tensors.len() as u64 != 5 * u64::from(header.layers) {
            return Err(corrupt("it does not have five tensors per layer"));
        }
        let words = |layer: u32, tensor: &str| -> Result<Vec<u32>, Error> {
            let name = format!("layers.{layer}.{tensor}");
            let view = tensors.tensor(&name).map_err(corrupt)?;
            let (dtype, shape) = header.tensor(&g, tensor);
            if view.dtype() != dtype || view.shape() != shape {
                return Err(corrupt(format!("{name} has another type or shape than its metadata say")));
            }
            let word = |bytes: &[u8]| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
            Ok(view.data().chunks_exact(4).map(word).collect())
        };
        let unpacked = |layer, tensor: &str| -> Result<UnpackedTokens, Error> {
            let keys = words(layer, &format!("{tensor}.keys"))?;
            Ok(UnpackedTokens { keys, values: words(layer, &format!("{tensor}.values"))? })
        };
        let layer = |layer| -> Result<LayerState, Error> {
            Ok(LayerState {
                tokens: header.tokens,
                sinks: unpacked(layer, "sinks")?,
                blocks: words(layer, "blocks")?,
                window: unpacked(layer, "window")?,
            })
        };
        let layers: Vec<LayerState> = (0..header.layers).map(layer).collect::<Result<_, Error>>()?;
        if !layers.iter().all(|layer| is_writable(&g, layer)) {
            return Err(corrupt("it holds words that no cache writes"));
        }
        Ok(Snapshot { layers, header })
    }

    /// Whether a cache of this geometry can hold it.
    pub(crate) fn check(&self, g: &Geometry) -> Result<(), Error> {
        let own = Header::new(g, self.header.tokens, self.header.blocks);
        for ((field, saved), (_, own)) in self.header.fields().into_iter().zip(own.fields()) {
            if saved != own {
                return Err(Error::SnapshotMismatch { field, saved, own });
            }
        }
        Ok(())
    }
}

impl TensorHeader {
    fn new(format: TensorFormat) -> TensorHeader {
        let zero_point = match format.zero_point {
            ZeroPoint::Min => "min",
            ZeroPoint::Rounded => "rounded",
        };
        let TensorFormat { bits, clipping, rotated, .. } = format;
        TensorHeader { bits: bits.get(), zero_point: zero_point.into(), clipping, rotated }
    }

    fn format(&self) -> Option<TensorFormat> {
        let zero_point = match self.zero_point.as_str() {
            "min" => ZeroPoint::Min,
            "rounded" => ZeroPoint::Rounded,
            _ => return None,
        };
        let format = TensorFormat::new(Bits::from_u32(self.bits)?).with_zero_point(zero_point);
        Some(TensorFormat { clipping: self.clipping, rotated: self.rotated, ..format })
    }
}

impl Header {
    fn new(g: &Geometry, tokens: u32, blocks: u32) -> Header {
        Header {
            version: SNAPSHOT_VERSION,
            layers: g.layers,
            kv_heads: g.layout.kv_heads,
            head_dim: g.layout.head_dim,
            keys: TensorHeader::new(g.keys),
            values: TensorHeader::new(g.values),
            group_size: g.layout.group,
            value_group_size: g.layout.value_group,
            residual_window: g.window,
            sink_tokens: g.sinks,
            window_format: match g.window_format {
                Dtype::F16 => "f16",
                Dtype::Bf16 => "bf16",
                Dtype::F32 => "f32",
            }
            .into(),
            tokens,
            blocks,
            checksum: NO_CHECKSUM.into(),
        }
    }

    /// The configuration, by the names of [`CacheConfig`](crate::CacheConfig).
    fn fields(&self) -> [(&'static str, String); 15] {
        [
            ("layers", self.layers.to_string()),
            ("kv_heads", self.kv_heads.to_string()),
            ("head_dim", self.head_dim.to_string()),
            ("keys.bits", self.keys.bits.to_string()),
            ("keys.zero_point", self.keys.zero_point.clone()),
            ("keys.clipping", self.keys.clipping.to_string()),
            ("values.bits", self.values.bits.to_string()),
            ("values.zero_point", self.values.zero_point.clone()),
            ("values.clipping", self.values.clipping.to_string()),
            ("values.rotated", self.values.rotated.to_string()),
            ("group_size", self.group_size.to_string()),
            ("value_group_size", self.value_group_size.to_string()),
            ("residual_window", self.residual_window.to_string()),
            ("sink_tokens", self.sink_tokens.to_string()),
            ("window_format", self.window_format.clone()),
        ]
    }

    /// The geometry of a cache that can hold the sequence. Every number is checked here.
    fn geometry(&self) -> Result<Geometry, Error> {
        let format = match self.window_format.as_str() {
            "f16" => Some(Dtype::F16),
            "bf16" => Some(Dtype::Bf16),
            "f32" => Some(Dtype::F32),
            _ => None,
        };
        let (Some(keys), Some(values), Some(format)) = (self.keys.format(), self.values.format(), format)
        else {
            return Err(corrupt("it names a format that does not exist"));
        };
        let config = CacheConfig::new(self.layers, self.kv_heads, self.kv_heads, self.head_dim)
            .with_formats(keys, values)
            .with_group_size(self.group_size)
            .with_value_group_size(self.value_group_size)
            .with_residual_window(self.residual_window)
            .with_sink_tokens(self.sink_tokens)
            .with_window_format(format)
            .with_capacity(self.sink_tokens.max(1))
            .with_max_step(1);
        let g = Geometry::new(&config, u64::MAX).map_err(corrupt)?;
        let packed = u64::from(self.blocks) * u64::from(g.layout.group);
        let window = u64::from(self.tokens.saturating_sub(g.sinks)).checked_sub(packed);
        if self.tokens > MAX_TOKENS || window.is_none_or(|n| n > u64::from(g.held_tokens())) {
            return Err(corrupt(Error::SequenceLengths { tokens: self.tokens, blocks: self.blocks }));
        }
        Ok(g)
    }

    /// Type and shape of a tensor.
    fn tensor(&self, g: &Geometry, tensor: &str) -> (FileDtype, Vec<usize>) {
        let heads = g.layout.kv_heads as usize;
        if tensor == "blocks" {
            return (FileDtype::U32, vec![self.blocks as usize, heads, g.layout.head_words() as usize]);
        }
        let sinks = self.tokens.min(g.sinks);
        let window = self.tokens - sinks - self.blocks * g.layout.group;
        let tokens = if tensor.starts_with("sinks") { sinks } else { window };
        let dtype = match g.window_format {
            Dtype::F16 => FileDtype::F16,
            Dtype::Bf16 => FileDtype::BF16,
            Dtype::F32 => FileDtype::F32,
        };
        (dtype, vec![tokens as usize, heads, g.layout.head_dim as usize])
    }
}

/// Whether every element and parameter is one that enters or is made in a cache: no NaN, no infinity, nothing subnormal.
fn is_writable(g: &Geometry, state: &LayerState) -> bool {
    let layout = &g.layout;
    let elements = |words: &[u32], format: Dtype| {
        let entered = |bits: u32| enter(widen(bits, format), format) == bits;
        words.iter().all(|&word| match format {
            Dtype::F32 => entered(word),
            _ => entered(word & 0xffff) && entered(word >> 16),
        })
    };
    let params = |words: &[u32]| {
        let storable = |half: u32| half == 0 || (1..=30).contains(&(half >> 10 & 31));
        words.iter().all(|word| storable(word & 0xffff) && storable(word >> 16) && word & 0x8000 == 0)
    };
    let tokens = [&state.sinks, &state.window];
    let unpacked =
        tokens.iter().flat_map(|t| [&t.keys, &t.values]).all(|words| elements(words, g.window_format));
    let head = |words: &[u32]| {
        let (keys, rest) = words.split_at(layout.key_param(0) as usize);
        let (key_params, rest) = rest.split_at(layout.key_params() as usize);
        let (values, value_params) = rest.split_at((layout.value_row_words() * layout.group) as usize);
        let plain = |bits: Bits, words| bits.is_quantized() || elements(words, g.sixteen_bit_format());
        params(key_params)
            && params(value_params)
            && plain(layout.key_bits, keys)
            && plain(layout.value_bits, values)
    };
    unpacked && state.blocks.chunks(layout.head_words() as usize).all(head)
}

/// Where the checksum's eight digits stand in a file.
fn checksum_at(file: &[u8]) -> Result<usize, Error> {
    // It is in the first field of the header, which the caller knows to be whole.
    let at = file.windows(BEFORE_CHECKSUM.len()).position(|window| window == BEFORE_CHECKSUM);
    let at = at.map(|at| at + BEFORE_CHECKSUM.len());
    let at = at.filter(|at| at + NO_CHECKSUM.len() <= file.len());
    at.ok_or_else(|| corrupt("it has no checksum"))
}

fn corrupt(detail: impl ToString) -> Error {
    Error::SnapshotCorrupt { detail: detail.to_string() }
}
