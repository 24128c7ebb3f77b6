//! GGUF files: what a model is, and its tensors. Parsing and dequantizing are candle's.

use anyhow::{Context, Result, bail};
use candle_core::Device;
use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::{Content, Value};
use half::f16;
use std::collections::HashMap;
use std::fs::File;
use std::io::BufReader;
use std::path::Path;

/// An open file, its header read.
pub struct Gguf {
    content: Content,
    file: BufReader<File>,
}

/// Which channels of a head RoPE turns together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopePairs {
    /// 2i and 2i + 1: `llama`, whose query and key rows the converter has put in that order.
    Neighbours,
    /// i and i + D/2: `qwen2`.
    Halves,
}

/// The shape of a model.
#[derive(Debug, Clone)]
pub struct Shape {
    /// As the file calls itself.
    pub name: String,
    pub layers: u32,
    /// Width of the residual stream.
    pub hidden: u32,
    pub query_heads: u32,
    pub kv_heads: u32,
    pub head_dim: u32,
    pub feed_forward: u32,
    pub vocabulary: u32,
    /// Tokens that the model was trained for.
    pub context: u32,
    pub epsilon: f32,
    pub rope_pairs: RopePairs,
    /// Radians per position, of each pair of channels.
    pub frequencies: Vec<f32>,
}

impl Shape {
    /// Width of the fused queries, keys and values of a token.
    pub fn qkv(&self) -> u32 {
        (self.query_heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Bytes of a token's keys and values in 16 bits, of all layers.
    pub fn token_bytes(&self) -> u64 {
        4 * u64::from(self.layers * self.kv_heads * self.head_dim)
    }
}

/// The rows of a matrix `[rows][columns]`, as the kernels multiply it.
#[derive(Debug, Clone, PartialEq)]
pub enum Weights {
    /// Blocks of 32 columns: a word with scale (low half) and minimum in f16, then 16 bytes; byte j holds columns j (low nibble) and j + 16.
    Four(Vec<u32>),
    /// f16, two columns to a word.
    Sixteen(Vec<u32>),
}

impl Gguf {
    pub fn open(path: &Path) -> Result<Gguf> {
        let file = File::open(path).with_context(|| {
            format!("{}: `cargo xtask model` fetches one, --model takes a path", path.display())
        })?;
        let mut file = BufReader::new(file);
        let content = Content::read(&mut file).with_context(|| format!("{}", path.display()))?;
        Ok(Gguf { content, file })
    }

    pub fn metadata(&self) -> &HashMap<String, Value> {
        &self.content.metadata
    }

    fn value(&self, key: &str) -> Result<&Value> {
        self.content.metadata.get(key).with_context(|| format!("the file has no {key}"))
    }

    /// A string of the metadata.
    pub fn string(&self, key: &str) -> Result<&str> {
        Ok(self.value(key)?.to_string()?)
    }

    /// A number of the metadata. Files disagree on the integer's width.
    pub fn number(&self, key: &str) -> Result<f64> {
        Ok(match self.value(key)? {
            Value::F32(x) => f64::from(*x),
            Value::F64(x) => *x,
            Value::I32(x) => f64::from(*x),
            Value::U32(x) => f64::from(*x),
            other => other.to_u64().map(|x| x as f64)?,
        })
    }

    /// A list of the metadata.
    pub fn list(&self, key: &str) -> Result<&[Value]> {
        Ok(self.value(key)?.to_vec()?)
    }

    pub fn has(&self, tensor: &str) -> bool {
        self.content.tensor_infos.contains_key(tensor)
    }

    /// The model's shape.
    pub fn shape(&mut self) -> Result<Shape> {
        let architecture = self.string("general.architecture")?.to_string();
        let rope_pairs = match architecture.as_str() {
            "llama" => RopePairs::Neighbours,
            "qwen2" => RopePairs::Halves,
            other => bail!("architecture {other}: this example runs llama and qwen2"),
        };
        let of = |key: &str| format!("{architecture}.{key}");
        let number = |key: &str| self.number(&of(key));
        let size = |key: &str| number(key).map(|x| x as u32);
        if number("expert_count").is_ok_and(|experts| experts > 0.0) {
            bail!("mixtures of experts are not supported");
        }
        let (hidden, query_heads) = (size("embedding_length")?, size("attention.head_count")?);
        let head_dim = size("attention.key_length").unwrap_or(hidden / query_heads);
        let base = number("rope.freq_base").unwrap_or(10_000.0);
        let scaling = match self.string(&of("rope.scaling.type")) {
            Ok("none") => 1.0,
            // Old files do not say which, and mean linear; 0 stands for none.
            Ok("linear") | Err(_) => {
                let factor = number("rope.scaling.factor").or_else(|_| number("rope.scale_linear"));
                factor.ok().filter(|factor| *factor != 0.0).unwrap_or(1.0)
            }
            Ok(other) => bail!("RoPE scaling {other} is not supported"),
        };
        for tensor in ["attn_output.bias", "ffn_gate.bias", "ffn_up.bias", "ffn_down.bias"] {
            if self.has(&format!("blk.0.{tensor}")) {
                bail!("{tensor}: biases other than those of queries, keys and values are not supported");
            }
        }
        if size("rope.dimension_count").unwrap_or(head_dim) != head_dim {
            bail!("RoPE over a part of the head is not supported");
        }
        let frequency =
            |pair: u32| (base.powf(-2.0 * f64::from(pair) / f64::from(head_dim)) / scaling) as f32;
        let mut shape = Shape {
            name: self.string("general.name").unwrap_or("a model without a name").to_string(),
            layers: size("block_count")?,
            hidden,
            query_heads,
            kv_heads: size("attention.head_count_kv").unwrap_or(query_heads),
            head_dim,
            feed_forward: size("feed_forward_length")?,
            vocabulary: self.list("tokenizer.ggml.tokens")?.len() as u32,
            context: size("context_length")?,
            epsilon: number("attention.layer_norm_rms_epsilon")? as f32,
            rope_pairs,
            frequencies: (0..head_dim / 2).map(frequency).collect(),
        };
        // Llama 3 divides each frequency by a factor of its own.
        if self.has("rope_freqs.weight") {
            let factors = self.floats("rope_freqs.weight", head_dim / 2)?;
            shape.frequencies.iter_mut().zip(factors).for_each(|(frequency, factor)| *frequency /= factor);
        }
        for (what, columns) in [
            ("embedding", hidden),
            ("feed-forward", shape.feed_forward),
            ("attention", query_heads * head_dim),
        ] {
            if !columns.is_multiple_of(32) {
                bail!("a width that is no multiple of 32 is not supported: {what} of {columns}");
            }
        }
        if !shape.vocabulary.is_multiple_of(4) {
            bail!("a vocabulary of {} tokens, no multiple of 4, is not supported", shape.vocabulary);
        }
        Ok(shape)
    }

    /// A tensor of so many numbers, in f32.
    pub fn floats(&mut self, name: &str, count: u32) -> Result<Vec<f32>> {
        let tensor = self.content.tensor(&mut self.file, name, &Device::Cpu)?;
        if tensor.shape().elem_count() != count as usize {
            bail!("{name} has the shape {:?}, {count} numbers are expected", tensor.shape());
        }
        Ok(tensor.dequantize(&Device::Cpu)?.flatten_all()?.to_vec1()?)
    }

    /// The rows of several matrices with so many columns, one after the other: in 4 bits if all of them are blocks of 4 bits, else in f16.
    pub fn rows(&mut self, names: &[String], columns: u32) -> Result<Weights> {
        let mut tensors = Vec::with_capacity(names.len());
        for name in names {
            let tensor = self.content.tensor(&mut self.file, name, &Device::Cpu)?;
            match tensor.shape().dims() {
                [_, width] if *width == columns as usize => tensors.push(tensor),
                other => bail!("{name} has the shape {other:?}, rows of {columns} columns are expected"),
            }
        }
        if tensors.iter().all(|t| matches!(t.dtype(), GgmlDType::Q4_0 | GgmlDType::Q4_1)) {
            let mut words = Vec::new();
            for tensor in &tensors {
                let bytes = tensor.data()?;
                let (size, zero) =
                    if tensor.dtype() == GgmlDType::Q4_1 { (20, None) } else { (18, Some(8.0)) };
                words.extend(bytes.chunks_exact(size).flat_map(|block| four_bit_block(block, zero)));
            }
            return Ok(Weights::Four(words));
        }
        let mut words = Vec::new();
        for tensor in &tensors {
            let values: Vec<f32> = tensor.dequantize(&Device::Cpu)?.flatten_all()?.to_vec1()?;
            words.extend(values.chunks_exact(2).map(|pair| {
                let half = |x: f32| u32::from(f16::from_f32(x).to_bits());
                half(pair[0]) | half(pair[1]) << 16
            }));
        }
        Ok(Weights::Sixteen(words))
    }
}

/// The five words of a Q4_1 block (scale, minimum, 16 bytes), or of a Q4_0 block (scale, 16 bytes), whose minimum is `-zero` scales.
fn four_bit_block(block: &[u8], zero: Option<f32>) -> [u32; 5] {
    let half = |at: usize| u32::from(u16::from_le_bytes([block[at], block[at + 1]]));
    let minimum = match zero {
        None => half(2),
        Some(zero) => {
            let scale = f16::from_bits(half(0) as u16).to_f32();
            u32::from(f16::from_f32(-zero * scale).to_bits())
        }
    };
    let codes = &block[block.len() - 16..];
    let word = |w: usize| u32::from_le_bytes([0, 1, 2, 3].map(|byte| codes[4 * w + byte]));
    [half(0) | minimum << 16, word(0), word(1), word(2), word(3)]
}
