//! The naive model: every token of every sequence in a `Vec`, and the textbook rules. It shares no code with
//! the plan.

#![allow(dead_code)]

pub mod contents;
pub mod program;
pub mod recorded;

use kivi_wgpu::format::{code, dequantize, enter, rotate, unrotate, unrotate_exactly, widen};
use kivi_wgpu::{Axis, Bits, CacheConfig, Dtype, TensorFormat};
use std::collections::HashMap;

/// One sequence of tokens, which are only names.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NaiveSequence {
    /// All tokens, in order of position.
    pub tokens: Vec<u64>,
    /// Tokens that are packed, after the sinks.
    pub packed: usize,
    /// The first of those that are gone.
    pub evicted: usize,
}

/// The rules that matter for where a token is.
#[derive(Debug, Clone, Copy)]
pub struct Rules {
    pub sinks: usize,
    pub window: usize,
    pub group: usize,
    /// Tokens up to which history is kept.
    pub limit: Option<usize>,
}

impl Rules {
    pub fn of(config: &CacheConfig) -> Rules {
        Rules {
            sinks: config.format.sink_tokens as usize,
            window: config.format.residual_window as usize,
            group: config.format.group_size as usize,
            limit: config.format.history_limit.map(|limit| limit as usize),
        }
    }
}

impl NaiveSequence {
    pub fn sinks(&self, r: &Rules) -> &[u64] {
        &self.tokens[..r.sinks.min(self.tokens.len())]
    }

    pub fn blocks(&self, r: &Rules) -> Vec<Vec<u64>> {
        let start = self.sinks(r).len();
        self.tokens[start + self.evicted..start + self.packed].chunks(r.group).map(<[u64]>::to_vec).collect()
    }

    pub fn window(&self, r: &Rules) -> &[u64] {
        &self.tokens[self.sinks(r).len() + self.packed..]
    }

    /// A length to which the sequence cannot be cut, because tokens before it are gone.
    pub fn first_gone(&self, r: &Rules) -> Option<u32> {
        (self.evicted > 0).then(|| (self.sinks(r).len() + self.evicted - 1) as u32)
    }

    /// Only the first `n` tokens are left. Of a block that is cut, what remains returns to the window.
    pub fn truncate(&mut self, n: usize, r: &Rules) {
        let sinks = self.sinks(r).len();
        if self.packed > 0 && n < sinks + self.packed {
            let kept = n.saturating_sub(sinks);
            let whole = kept / r.group * r.group;
            self.evicted = self.evicted.min(whole);
            let cut = self.blocks(r)[(whole - self.evicted) / r.group].clone();
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

    /// While the window holds W + G tokens or more, its oldest G become a block. Then blocks go all of whose
    /// tokens are too old.
    pub fn pack(&mut self, r: &Rules) {
        while self.window(r).len() >= r.window + r.group {
            self.packed += r.group;
        }
        if let Some(limit) = r.limit {
            let kept_from = self.tokens.len().saturating_sub(limit);
            while self.evicted < self.packed && r.sinks + self.evicted + r.group <= kept_from {
                self.evicted += r.group;
            }
        }
    }
}

/// The name of what token `index` of a block is after it has returned to the window: its values are those of
/// the block.
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

/// How keys or values are packed, and whether a group is a channel.
#[derive(Clone, Copy)]
pub struct Packing(TensorFormat, bool);

impl Packing {
    pub fn keys(config: &CacheConfig) -> Packing {
        Packing(config.format.keys, config.format.keys.axis != Some(Axis::PerToken))
    }

    pub fn values(config: &CacheConfig) -> Packing {
        Packing(config.format.values, config.format.values.axis == Some(Axis::PerChannel))
    }

    /// One head's block after quantization, `[token][head_dim]`; rotated if the format says so.
    pub fn dequantized(self, config: &CacheConfig, rows: &[Vec<f32>]) -> Vec<Vec<f64>> {
        let Packing(format, per_channel) = self;
        let mut rows = rows.to_vec();
        if format.rotated {
            rows.iter_mut().for_each(|row| rotate(row));
        }
        if per_channel {
            let mut out = vec![Vec::new(); rows.len()];
            for channel in 0..config.head_dim as usize {
                let group: Vec<f32> = rows.iter().map(|row| row[channel]).collect();
                for (row, x) in out.iter_mut().zip(quantized(format, config, &group)) {
                    row.push(x);
                }
            }
            return out;
        }
        let width = config.format.value_group_size.unwrap_or(config.format.group_size) as usize;
        let row = |row: &Vec<f32>| row.chunks(width).flat_map(|g| quantized(format, config, g)).collect();
        rows.iter().map(row).collect()
    }

    /// What attention sees of such a block.
    pub fn seen(self, config: &CacheConfig, rows: &[Vec<f32>]) -> Vec<Vec<f64>> {
        let mut rows = self.dequantized(config, rows);
        if self.0.rotated {
            rows.iter_mut().for_each(|row| unrotate_exactly(row));
        }
        rows
    }

    /// What returns to the window of token `index` of such a block.
    pub fn returned(self, config: &CacheConfig, rows: &[Vec<f32>], index: usize) -> Vec<f32> {
        let mut row: Vec<f32> = self.dequantized(config, rows)[index].iter().map(|x| *x as f32).collect();
        if self.0.rotated {
            unrotate(&mut row);
        }
        row
    }
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
            keys.extend(Packing::keys(config).returned(config, &rows(&self.keys), index));
            values.extend(Packing::values(config).returned(config, &rows(&self.values), index));
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
        keys.extend(Packing::keys(config).seen(config, &rows(&data.keys)));
        values.extend(Packing::values(config).seen(config, &rows(&data.values)));
    }
    for &token in sequence.window(&r) {
        keys.push(exact(&data.keys, token));
        values.push(exact(&data.values, token));
    }
    (keys, values)
}

/// Textbook attention of one query at the last of the first `visible` tokens, in layer 0; after the sinks,
/// `evicted` tokens are not among the keys and values.
pub fn attend(
    config: &CacheConfig,
    query: &[f32],
    keys: &[Vec<f64>],
    values: &[Vec<f64>],
    visible: usize,
    evicted: usize,
) -> Vec<f64> {
    let scale = config.softmax_scale.unwrap_or(1.0 / (config.head_dim as f32).sqrt());
    let attention = config.layer_attention.first().copied().unwrap_or_default();
    let oldest = attention.sliding_window.map_or(0, |n| visible.saturating_sub(n as usize));
    // Where the token at a position is, or the first after it.
    let sinks = (config.format.sink_tokens as usize).min(visible);
    let index = |position: usize| position.min(sinks).max(position.saturating_sub(evicted));
    let (oldest, visible) = (index(oldest), index(visible));
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
