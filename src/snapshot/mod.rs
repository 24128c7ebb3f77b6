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
//! The metadata has one entry, `kivi_wgpu`: JSON with the format version, all of the configuration that
//! affects the meaning of the words, the lengths, and the CRC-32 of the whole file with eight zeros in the
//! place of the checksum. Equal states give equal bytes on every backend. `docs/format.md` is the whole
//! description; `examples/decode_snapshot.py` reads a file with numpy.

mod header;

use crate::error::Error;
use crate::format::{Dtype, Param, Tensor, TensorLayout, enter, widen};
use crate::plan::SequenceLengths;
use crate::shape::Shape;
use crate::state::{LayerState, UnpackedTokens};
use header::{Classes, Header};
use safetensors::tensor::{SafeTensors, TensorView};
use std::collections::HashMap;

/// The version of the files that are written, and that can be read.
pub const SNAPSHOT_VERSION: u32 = 1;

/// The metadata's key.
const KEY: &str = "kivi_wgpu";
/// What stands before the checksum in a file: a string of JSON within a string of JSON.
const BEFORE_CHECKSUM: &[u8] = br#"\"checksum\":\""#;
const NO_CHECKSUM: &str = "00000000";

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
/// cache.step(&[SequenceStep::append(sequence, 300)], &[LayerInput { k: &row, v: &row, ..Default::default()
/// }])?;
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
    /// Of layers, each of one of the classes, that all hold the same tokens of one sequence.
    pub(crate) fn new(classes: &[Shape], layers: Vec<LayerState>) -> Snapshot {
        Snapshot { header: Header::new(classes, |layer| layers[layer as usize].lengths), layers }
    }

    /// Tokens of the sequence.
    pub fn tokens(&self) -> u32 {
        self.header.tokens
    }

    /// How long the sequence is in the layers of a class.
    pub(crate) fn lengths_of(&self, s: &Shape) -> SequenceLengths {
        self.layers[s.layers[0] as usize].lengths
    }

    /// What each layer holds.
    pub fn layers(&self) -> &[LayerState] {
        &self.layers
    }

    /// The file: equal for equal states.
    ///
    /// # Errors
    /// [`Error::SnapshotCorrupt`] if safetensors refuses to write the file, which no snapshot of a cache
    /// gives it reason to.
    pub fn to_bytes(&self) -> Result<Vec<u8>, Error> {
        let classes = Classes::new(&self.header)?;
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
                data.push((format!("layers.{layer}.{tensor}"), classes.tensor(layer, tensor), bytes));
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
        let mut header: Header = serde_json::from_str(text).map_err(corrupt)?;
        let at = checksum_at(file)?;
        let mut crc = crc32fast::Hasher::new();
        let after = at + NO_CHECKSUM.len();
        crc.update(&file[..at]);
        crc.update(NO_CHECKSUM.as_bytes());
        crc.update(file.get(after..).unwrap_or_default());
        if header.checksum != format!("{:08x}", crc.finalize()) {
            return Err(corrupt("its checksum is wrong"));
        }
        header.checksum = NO_CHECKSUM.into();
        if tensors.len() != 5 * header.layers.len() {
            return Err(corrupt("it does not have five tensors per layer"));
        }
        let classes = Classes::new(&header)?;
        let words = |layer: usize, tensor: &str| -> Result<Vec<u32>, Error> {
            let name = format!("layers.{layer}.{tensor}");
            let view = tensors.tensor(&name).map_err(corrupt)?;
            let (dtype, shape) = classes.tensor(layer, tensor);
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
                lengths: classes.lengths(layer),
                sinks: unpacked(layer, "sinks")?,
                blocks: words(layer, "blocks")?,
                window: unpacked(layer, "window")?,
            })
        };
        let layers: Vec<LayerState> = (0..header.layers.len()).map(layer).collect::<Result<_, Error>>()?;
        if !layers.iter().enumerate().all(|(at, layer)| is_writable(classes.shape(at), layer)) {
            return Err(corrupt("it holds words that no cache writes"));
        }
        Ok(Snapshot { layers, header })
    }

    /// Whether a cache of these classes of layers can hold it.
    pub(crate) fn check(&self, classes: &[Shape]) -> Result<(), Error> {
        let own = Header::new(classes, |_| SequenceLengths::default());
        for ((field, saved), (_, own)) in self.header.fields().into_iter().zip(own.fields()) {
            if saved != own {
                return Err(Error::SnapshotMismatch { field, saved, own });
            }
        }
        for layer in 0..self.header.layers.len() {
            let (saved, own) = (self.header.format_fields(layer), own.format_fields(layer));
            for ((field, saved), (_, own)) in saved.into_iter().zip(own) {
                if saved != own {
                    let (saved, own) = (format!("{saved} in layer {layer}"), format!("{own} there"));
                    return Err(Error::SnapshotMismatch { field, saved, own });
                }
            }
        }
        Ok(())
    }
}

/// Whether every element and parameter is one that enters or is made in a cache: no NaN, no infinity, nothing
/// subnormal.
fn is_writable(s: &Shape, state: &LayerState) -> bool {
    let layout = &s.layout;
    let elements = |words: &[u32], format: Dtype| {
        let entered = |bits: u32| enter(widen(bits, format), format) == bits;
        words.iter().all(|&word| match format {
            Dtype::F32 => entered(word),
            _ => entered(word & 0xffff) && entered(word >> 16),
        })
    };
    let tokens = [&state.sinks, &state.window];
    let unpacked =
        tokens.iter().flat_map(|t| [&t.keys, &t.values]).all(|words| elements(words, s.window_format));
    let tensor = |head: &[u32], tensor| {
        let layout = layout.tensor(tensor);
        let words = &head[layout.first as usize..][..layout.words() as usize];
        let (codes, params) = words.split_at(layout.code_words() as usize);
        let compact = layout.format.compact;
        let storable = |word: &u32| match compact {
            true => [word & 0xffff, word >> 16].into_iter().all(|half| Param::is_storable(half, true)),
            false => Param::is_storable(*word, false),
        };
        let plain = layout.format.bits.is_quantized() || elements(codes, s.sixteen_bit_format());
        plain && params.iter().all(storable) && codes_are_writable(&layout, head)
    };
    let head = |words: &[u32]| [Tensor::Keys, Tensor::Values].into_iter().all(|t| tensor(words, t));
    unpacked && state.blocks.chunks(layout.head_words() as usize).all(head)
}

/// Whether the codes of one head's keys or values are zero where the scale is, and what is beyond a line's
/// codes is zero.
fn codes_are_writable(layout: &TensorLayout, head: &[u32]) -> bool {
    let format = layout.format;
    if !format.bits.is_quantized() {
        return true;
    }
    let mut used = vec![0u32; layout.line_words() as usize];
    for code in 0..layout.line_codes() {
        for part in format.bits.parts(layout.line_codes(), code) {
            used[part.word as usize] |= ((1 << part.width) - 1) << part.shift;
        }
    }
    let in_line = |line: u32| {
        used.iter().zip(0..).all(|(mask, word)| head[layout.code(line, word) as usize] & !mask == 0)
    };
    let flat = |param: u32| {
        let (word, shift) = layout.param(param);
        format.param(head[word as usize] >> shift).scale() == 0.0
    };
    let is_zero = |(token, channel): (u32, u32)| {
        let mut parts = layout.parts(token, channel);
        parts.all(|part| (head[part.word as usize] >> part.shift) & ((1 << part.width) - 1) == 0)
    };
    (0..layout.lines()).all(in_line)
        && (0..layout.params()).filter(|param| flat(*param)).all(|param| layout.elements(param).all(is_zero))
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
