//! The naive model: every token of every sequence in a `Vec`, and the textbook rules. It shares no code with the plan.

#![allow(dead_code)]

pub mod contents;
pub mod program;

use kivi_wgpu::format::{code, dequantize, enter, rotate, unrotate, unrotate_exactly, widen};
use kivi_wgpu::{Bits, CacheConfig, Dtype, TensorFormat};
use std::collections::HashMap;

/// One sequence of tokens, which are only names.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NaiveSequence {
    /// All tokens, in order of position.
    pub tokens: Vec<u64>,
    /// Tokens that are packed, after the sinks.
    pub packed: usize,
}

/// The rules that matter for where a token is.
#[derive(Debug, Clone, Copy)]
pub struct Rules {
    pub sinks: usize,
    pub window: usize,
    pub group: usize,
}

impl Rules {
    pub fn of(config: &CacheConfig) -> Rules {
        Rules {
            sinks: config.sink_tokens as usize,
            window: config.residual_window as usize,
            group: config.group_size as usize,
        }
    }
}

impl NaiveSequence {
    pub fn sinks(&self, r: &Rules) -> &[u64] {
        &self.tokens[..r.sinks.min(self.tokens.len())]
    }

    pub fn blocks(&self, r: &Rules) -> Vec<Vec<u64>> {
        let start = self.sinks(r).len();
        self.tokens[start..start + self.packed].chunks(r.group).map(<[u64]>::to_vec).collect()
    }

    pub fn window(&self, r: &Rules) -> &[u64] {
        &self.tokens[self.sinks(r).len() + self.packed..]
    }

    /// Only the first `n` tokens are left. Of a block that is cut, what remains returns to the window.
    pub fn truncate(&mut self, n: usize, r: &Rules) {
        let sinks = self.sinks(r).len();
        if self.packed > 0 && n < sinks + self.packed {
            let kept = n.saturating_sub(sinks);
            let whole = kept / r.group * r.group;
            let cut = self.blocks(r)[whole / r.group].clone();
            for i in 0..kept % r.group {
                self.tokens[sinks + whole + i] = returned(&cut, i);
            }
            self.packed = whole;
        }
        self.tokens.truncate(n);
    }

    /// New tokens enter; nothing is packed yet.
    pub fn enter(&mut self, tokens: impl IntoIterator<Item = u64>) {
        self.tokens.extend(tokens);
    }

    /// While the window holds W + G tokens or more, its oldest G become a block.
    pub fn pack(&mut self, r: &Rules) {
        while self.window(r).len() >= r.window + r.group {
            self.packed += r.group;
        }
    }
}

/// The name of what token `index` of a block is after it has returned to the window: its values are those of the block.
pub fn returned(block: &[u64], index: usize) -> u64 {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let mut hasher = DefaultHasher::new();
    (block, index).hash(&mut hasher);
    hasher.finish() | 1 << 63
}

/// Keys and values of every token of one layer, `[kv head][head_dim]` each.
#[derive(Debug, Default)]
pub struct TokenData {
    pub keys: HashMap<u64, Vec<f32>>,
    pub values: HashMap<u64, Vec<f32>>,
}

fn quantized(format: TensorFormat, config: &CacheConfig, x: &[f32]) -> Vec<f64> {
    let bits = format.bits;
    if bits == Bits::Sixteen {
        // Tokens of the window, which only an f32 window holds in more than 16 bits.
        return x
            .iter()
            .map(|&x| match config.window_format {
                Dtype::F32 => f64::from(widen(enter(x, Dtype::F16), Dtype::F16)),
                _ => f64::from(x),
            })
            .collect();
    }
    let p = format.fit(x);
    x.iter().map(|&x| f64::from(dequantize(p, code(bits, p, x)))).collect()
}

/// Keys and values of one head's block after quantization, `[token][head_dim]` each; values are rotated if the configuration says so.
pub fn dequantized(
    config: &CacheConfig,
    keys: &[Vec<f32>],
    values: &[Vec<f32>],
) -> (Vec<Vec<f64>>, Vec<Vec<f64>>) {
    let dim = config.head_dim as usize;
    let mut out = vec![vec![0.0; dim]; keys.len()];
    for channel in 0..dim {
        let group: Vec<f32> = keys.iter().map(|row| row[channel]).collect();
        for (t, x) in quantized(config.keys, config, &group).into_iter().enumerate() {
            out[t][channel] = x;
        }
    }
    let width = config.value_group_size.unwrap_or(config.group_size) as usize;
    let row = |row: &Vec<f32>| -> Vec<f64> {
        let mut row = row.clone();
        if config.values.rotated {
            rotate(&mut row);
        }
        row.chunks(width).flat_map(|g| quantized(config.values, config, g)).collect()
    };
    (out, values.iter().map(row).collect())
}

impl TokenData {
    /// Adds what token `index` of a block is after it has returned to the window, under its new name.
    pub fn add_returned(&mut self, config: &CacheConfig, block: &[u64], index: usize) {
        let dim = config.head_dim as usize;
        let format = config.window_format;
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        for head in 0..config.kv_heads as usize {
            let rows = |map: &HashMap<u64, Vec<f32>>| {
                let entered = |x: &f32| widen(enter(*x, format), format);
                let row = |t: &u64| map[t][head * dim..][..dim].iter().map(entered).collect();
                block.iter().map(row).collect::<Vec<Vec<f32>>>()
            };
            let (k, v) = dequantized(config, &rows(&self.keys), &rows(&self.values));
            keys.extend(k[index].iter().map(|x| *x as f32));
            let mut row: Vec<f32> = v[index].iter().map(|x| *x as f32).collect();
            if config.values.rotated {
                unrotate(&mut row);
            }
            values.extend(row);
        }
        let name = returned(block, index);
        self.keys.insert(name, keys);
        self.values.insert(name, values);
    }
}

/// What attention sees of a sequence for one KV head: keys and values, `[token][head_dim]`.
pub fn seen(
    config: &CacheConfig,
    data: &TokenData,
    sequence: &NaiveSequence,
    head: usize,
) -> (Vec<Vec<f64>>, Vec<Vec<f64>>) {
    let r = Rules::of(config);
    let dim = config.head_dim as usize;
    let entered = |map: &HashMap<u64, Vec<f32>>, token: u64| -> Vec<f32> {
        let row = &map[&token][head * dim..][..dim];
        row.iter().map(|&x| widen(enter(x, config.window_format), config.window_format)).collect()
    };
    let exact = |map, token| entered(map, token).into_iter().map(f64::from).collect::<Vec<f64>>();
    let mut keys = Vec::new();
    let mut values = Vec::new();
    for &token in sequence.sinks(&r) {
        keys.push(exact(&data.keys, token));
        values.push(exact(&data.values, token));
    }
    for block in sequence.blocks(&r) {
        let rows = |map| block.iter().map(|&t| entered(map, t)).collect::<Vec<_>>();
        let (block_keys, block_values) = dequantized(config, &rows(&data.keys), &rows(&data.values));
        keys.extend(block_keys);
        values.extend(block_values.into_iter().map(|mut row| {
            if config.values.rotated {
                unrotate_exactly(&mut row);
            }
            row
        }));
    }
    for &token in sequence.window(&r) {
        keys.push(exact(&data.keys, token));
        values.push(exact(&data.values, token));
    }
    (keys, values)
}

/// Textbook attention of one query at the last of the first `visible` tokens, in layer 0.
pub fn attend(
    config: &CacheConfig,
    query: &[f32],
    keys: &[Vec<f64>],
    values: &[Vec<f64>],
    visible: usize,
) -> Vec<f64> {
    let scale = config.softmax_scale.unwrap_or(1.0 / (config.head_dim as f32).sqrt());
    let attention = config.layer_attention.first().copied().unwrap_or_default();
    let oldest = attention.sliding_window.map_or(0, |n| visible.saturating_sub(n as usize));
    let mut logits: Vec<f64> = keys[oldest..visible]
        .iter()
        .map(|k| k.iter().zip(query).map(|(k, &q)| k * f64::from(q)).sum::<f64>() * f64::from(scale))
        .collect();
    if let Some(cap) = attention.soft_cap {
        logits.iter_mut().for_each(|l| *l = f64::from(cap) * (*l / f64::from(cap)).tanh());
    }
    let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = logits.iter().map(|l| (l - max).exp()).collect();
    let sum: f64 = weights.iter().sum();
    (0..config.head_dim as usize)
        .map(|c| weights.iter().zip(&values[oldest..]).map(|(w, v)| w * v[c]).sum::<f64>() / sum)
        .collect()
}
