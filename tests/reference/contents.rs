//! What a cache should hold of named tokens, word for word, and what its attention should give.

use super::{NaiveSequence, Rules, TokenData, attend, seen};
use kivi_wgpu::SequenceLengths;
use kivi_wgpu::format::enter;
use kivi_wgpu::internals::block_of;
use kivi_wgpu::{CacheConfig, Dtype, LayerState, SequenceStep, Shape, UnpackedTokens};
use std::collections::HashMap;

/// The values of every token that has a name, and the blocks that they make. All layers are given the same.
pub struct Contents {
    pub config: CacheConfig,
    shape: Shape,
    rules: Rules,
    data: TokenData,
    blocks: HashMap<Vec<u64>, Vec<u32>>,
}

/// Noise of which each number depends on a seed alone (SplitMix64).
fn noise(seed: u64, n: usize) -> impl Iterator<Item = f32> {
    (0..n as u64).map(move |i| {
        let mut z = seed.wrapping_add((i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 40) as f32 / 8_388_608.0 - 1.0
    })
}

impl Contents {
    pub fn new(config: &CacheConfig) -> Contents {
        Contents {
            shape: Shape::new(config).unwrap(),
            rules: Rules::of(config),
            config: config.clone(),
            data: TokenData::default(),
            blocks: HashMap::new(),
        }
    }

    /// Keys, values and queries of a step whose new tokens have these names.
    pub fn tensors(&mut self, steps: &[SequenceStep], names: &[u64]) -> [Vec<f32>; 3] {
        let row = (self.config.kv_heads * self.config.head_dim) as usize;
        let (mut k, mut v) = (Vec::new(), Vec::new());
        for &name in names {
            // Channel outliers in keys, token outliers in values.
            let outlier = |i| if i % 17 == 3 { 8.0 } else { 1.0 };
            let keys: Vec<f32> = noise(2 * name, row).enumerate().map(|(i, x)| x * outlier(i)).collect();
            let values: Vec<f32> = noise(2 * name + 1, row).map(|x| x * outlier(name as usize)).collect();
            k.extend(&keys);
            v.extend(&values);
            self.data.keys.insert(name, keys);
            self.data.values.insert(name, values);
        }
        let queries: u32 = steps.iter().map(|s| s.attend).sum();
        let seed = names.first().map_or(1, |name| name.wrapping_mul(3).wrapping_add(1 << 40));
        let q = noise(seed, (queries * self.config.query_heads * self.config.head_dim) as usize);
        [k, v, q.map(|x| 2.0 * x).collect()]
    }

    /// Learns the names that tokens get when a sequence is cut.
    pub fn truncate(&mut self, before: &NaiveSequence, tokens: u32) {
        let sinks = before.sinks(&self.rules).len();
        let tokens = tokens as usize;
        let (kept, group) = (tokens.saturating_sub(sinks), self.rules.group);
        if kept < before.packed && kept % group > 0 {
            let cut = before.blocks(&self.rules)[(kept - before.evicted) / group].clone();
            for i in 0..kept % group {
                self.data.add_returned(&self.config, &cut, i);
            }
        }
    }

    /// Keys and values of one KV head after quantization, `[token][head_dim]`.
    pub fn seen(&self, naive: &NaiveSequence, head: usize) -> (Vec<Vec<f64>>, Vec<Vec<f64>>) {
        seen(&self.config, &self.data, naive, head)
    }

    /// What a layer holds of a sequence.
    pub fn state(&mut self, naive: &NaiveSequence) -> LayerState {
        let mut blocks = Vec::new();
        for block in naive.blocks(&self.rules) {
            let rows =
                |map: &HashMap<u64, Vec<f32>>| block.iter().flat_map(|t| map[t].clone()).collect::<Vec<_>>();
            let make = || block_of(&self.shape, &rows(&self.data.keys), &rows(&self.data.values));
            let words = match self.blocks.get(&block) {
                Some(words) => words.clone(),
                None => make(),
            };
            blocks.extend(&words);
            self.blocks.insert(block, words);
        }
        let format = self.config.window_format;
        let words = |x: &[f32]| -> Vec<u32> {
            let bits: Vec<u32> = x.iter().map(|&x| enter(x, format)).collect();
            if format == Dtype::F32 { bits } else { bits.chunks(2).map(|b| b[0] | (b[1] << 16)).collect() }
        };
        let unpacked = |tokens: &[u64]| UnpackedTokens {
            keys: tokens.iter().flat_map(|t| words(&self.data.keys[t])).collect(),
            values: tokens.iter().flat_map(|t| words(&self.data.values[t])).collect(),
        };
        let lengths = SequenceLengths {
            tokens: naive.tokens.len() as u32,
            blocks: (naive.packed / self.rules.group) as u32,
            evicted: (naive.evicted / self.rules.group) as u32,
        };
        LayerState {
            lengths,
            sinks: unpacked(naive.sinks(&self.rules)),
            blocks,
            window: unpacked(naive.window(&self.rules)),
        }
    }

    /// Compares the attention of a step (`[query][query head][head_dim]`) with the textbook's: per row, the
    /// error relative to the row's norm is at most `bound`. Of long chunks the first and the last queries are
    /// looked at.
    pub fn check_attention(
        &self,
        steps: &[SequenceStep],
        during: &[NaiveSequence],
        q: &[f32],
        out: &[f64],
        bound: f64,
    ) {
        let (dim, heads) = (self.config.head_dim as usize, self.config.query_heads as usize);
        let mut query = 0;
        for (step, during) in steps.iter().zip(during) {
            let attended = step.attend as usize;
            for head in (0..heads).filter(|_| attended > 0) {
                let kv_head = head / (heads / self.config.kv_heads as usize);
                let (keys, values) = seen(&self.config, &self.data, during, kv_head);
                for i in (0..attended).filter(|i| *i < 2 || *i + 2 > attended) {
                    let at = ((query + i) * heads + head) * dim;
                    let visible = during.tokens.len() - (attended - 1 - i);
                    let expected =
                        attend(&self.config, &q[at..at + dim], &keys, &values, visible, during.evicted);
                    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
                    let error = norm(&mut expected.iter().zip(&out[at..]).map(|(a, b)| a - b));
                    let scale = norm(&mut expected.iter().copied());
                    assert!(
                        error <= bound * scale,
                        "head {head}, query {i}: error {:e} of {scale:e}",
                        error / scale
                    );
                }
            }
            query += attended;
        }
    }
}
