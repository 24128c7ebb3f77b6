//! The naive model: every token of every sequence in a `Vec`, and the textbook rules. It shares no code with the plan.

#![allow(dead_code)]

use kivi_wgpu::format::{code, dequantize, enter, param, widen};
use kivi_wgpu::{Bits, CacheConfig, Dtype};
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

/// Keys and values of every token of one layer, `[kv head][head_dim]` each.
#[derive(Debug, Default)]
pub struct TokenData {
    pub keys: HashMap<u64, Vec<f32>>,
    pub values: HashMap<u64, Vec<f32>>,
}

fn quantized(bits: Bits, config: &CacheConfig, x: &[f32]) -> Vec<f64> {
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
    let min = x.iter().copied().fold(f32::INFINITY, f32::min);
    let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let p = param(bits, config.zero_point, min, max);
    x.iter().map(|&x| f64::from(dequantize(p, code(bits, p, x)))).collect()
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
        let rows: Vec<Vec<f32>> = block.iter().map(|&t| entered(&data.keys, t)).collect();
        let mut block_keys = vec![vec![0.0; dim]; block.len()];
        for channel in 0..dim {
            let group: Vec<f32> = rows.iter().map(|row| row[channel]).collect();
            for (t, x) in quantized(config.key_bits, config, &group).into_iter().enumerate() {
                block_keys[t][channel] = x;
            }
        }
        keys.extend(block_keys);
        let width = config.value_group_size.unwrap_or(config.group_size) as usize;
        for &token in &block {
            let row = entered(&data.values, token);
            values.push(row.chunks(width).flat_map(|g| quantized(config.value_bits, config, g)).collect());
        }
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
