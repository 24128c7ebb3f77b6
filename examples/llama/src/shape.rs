//! What a model is: the sizes in a GGUF file's metadata, each checked for what this example and the cache can
//! run.

use crate::gguf::Gguf;
use anyhow::{Context, Result, bail, ensure};

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

/// Rows of a matrix that one dispatch multiplies: 65535 workgroups of 32.
const MOST_ROWS: u32 = 65535 * 32;

impl Shape {
    /// That of a file.
    pub fn of(file: &mut Gguf) -> Result<Shape> {
        let architecture =
            file.string("general.architecture")?.context("the file has no general.architecture")?;
        let rope_pairs = match architecture {
            "llama" => RopePairs::Neighbours,
            "qwen2" => RopePairs::Halves,
            other => bail!("general.architecture = {other}: this example runs llama and qwen2"),
        };
        let architecture = architecture.to_string();
        let of = |key: &str| format!("{architecture}.{key}");
        if file.whole(&of("expert_count"), 0..=u32::MAX)?.is_some_and(|experts| experts > 0) {
            bail!("{}: mixtures of experts are not supported", of("expert_count"));
        }
        let layers = file.needed(&of("block_count"), 1..=4096)?;
        let hidden = file.needed(&of("embedding_length"), 32..=1 << 20)?;
        let heads = of("attention.head_count");
        let query_heads =
            file.of_layers(&heads, layers, 1..=4096)?.with_context(|| format!("the file has no {heads}"))?;
        let kv_heads =
            file.of_layers(&of("attention.head_count_kv"), layers, 1..=query_heads)?.unwrap_or(query_heads);
        ensure!(
            query_heads.is_multiple_of(kv_heads),
            "{} = {query_heads} is no multiple of {} = {kv_heads}",
            heads,
            of("attention.head_count_kv")
        );
        let head_dim = file.whole(&of("attention.key_length"), 8..=512)?.unwrap_or(hidden / query_heads);
        ensure!(
            (8..=512).contains(&head_dim) && head_dim.is_multiple_of(8),
            "{} or {} / {heads}: heads of {head_dim} channels are not supported: a multiple of 8 from 8 to 512",
            of("attention.key_length"),
            of("embedding_length")
        );
        let value_length = of("attention.value_length");
        if file.whole(&value_length, 1..=u32::MAX)?.is_some_and(|length| length != head_dim) {
            bail!("{value_length}: values of another length than keys, {head_dim}, are not supported");
        }
        let wide = of("feed_forward_length");
        let feed_forward = file.of_layers(&wide, layers, 32..=MOST_ROWS / 2)?;
        let feed_forward = feed_forward.with_context(|| format!("the file has no {wide}"))?;
        let epsilon = of("attention.layer_norm_rms_epsilon");
        let epsilon = file.real(&epsilon, 0.0, 1.0)?.with_context(|| format!("the file has no {epsilon}"))?;
        let vocabulary = file.length("tokenizer.ggml.tokens")?;
        for tensor in ["attn_output.bias", "ffn_gate.bias", "ffn_up.bias", "ffn_down.bias"] {
            if file.has(&format!("blk.0.{tensor}")) {
                bail!("{tensor}: biases other than those of queries, keys and values are not supported");
            }
        }
        let shape = Shape {
            name: file.string("general.name")?.unwrap_or("a model without a name").to_string(),
            layers,
            hidden,
            query_heads,
            kv_heads,
            head_dim,
            feed_forward,
            vocabulary,
            context: file.needed(&of("context_length"), 1..=1 << 30)?,
            epsilon: epsilon as f32,
            rope_pairs,
            frequencies: frequencies(file, &of, head_dim)?,
        };
        for (key, columns) in [
            (of("embedding_length"), hidden),
            (of("feed_forward_length"), feed_forward),
            (heads, query_heads * head_dim),
        ] {
            ensure!(
                columns.is_multiple_of(32),
                "{key}: a width of {columns} is not supported: a multiple of 32"
            );
        }
        ensure!(
            (4..=MOST_ROWS).contains(&vocabulary) && vocabulary.is_multiple_of(4),
            "tokenizer.ggml.tokens: a vocabulary of {vocabulary} is not supported: a multiple of 4 up to {MOST_ROWS}"
        );
        ensure!(
            shape.qkv() <= MOST_ROWS,
            "{} rows of queries, keys and values: at most {MOST_ROWS}",
            shape.qkv()
        );
        Ok(shape)
    }
}

/// RoPE's radians per position, of each pair of channels.
fn frequencies(file: &mut Gguf, of: &impl Fn(&str) -> String, head_dim: u32) -> Result<Vec<f32>> {
    let turned = of("rope.dimension_count");
    if file.whole(&turned, 1..=u32::MAX)?.is_some_and(|dims| dims != head_dim) {
        bail!("{turned}: RoPE over a part of the head, of {head_dim} channels, is not supported");
    }
    let base = file.real(&of("rope.freq_base"), 1.0, 1e12)?.unwrap_or(10_000.0);
    // 0 stands for none.
    let factor =
        |key: &str| Ok::<_, anyhow::Error>(file.real(&of(key), -1e-9, 1e9)?.filter(|factor| *factor > 0.0));
    let scaling = match file.string(&of("rope.scaling.type"))? {
        Some("none") => 1.0,
        // Old files do not say which, and mean linear.
        Some("linear") | None => match factor("rope.scaling.factor")? {
            Some(factor) => factor,
            None => factor("rope.scale_linear")?.unwrap_or(1.0),
        },
        Some(other) => bail!("{} = {other} is not supported", of("rope.scaling.type")),
    };
    let frequency = |pair: u32| (base.powf(-2.0 * f64::from(pair) / f64::from(head_dim)) / scaling) as f32;
    let mut frequencies: Vec<f32> = (0..head_dim / 2).map(frequency).collect();
    // Llama 3 divides each frequency by a factor of its own.
    if file.has("rope_freqs.weight") {
        let factors = file.floats("rope_freqs.weight", head_dim / 2)?;
        ensure!(
            factors.iter().all(|factor| *factor > 0.0),
            "rope_freqs.weight has factors that are not positive"
        );
        frequencies.iter_mut().zip(factors).for_each(|(frequency, factor)| *frequency /= factor);
    }
    Ok(frequencies)
}
