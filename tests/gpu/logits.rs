//! What layers do to logits, and logits of every size: sliding windows, soft caps, learned sinks.

use crate::support::Pair;
use kivi_wgpu::{Bits, CacheConfig, LayerAttention, SequenceStep};

fn config(query_heads: u32, kv_heads: u32, head_dim: u32) -> CacheConfig {
    CacheConfig::new(1, query_heads, kv_heads, head_dim)
}

#[test]
fn huge_logits() {
    let mut pair = Pair::new(&config(4, 1, 64));
    pair.key_scale = 150.0;
    let s = pair.create_sequence();
    pair.fill(s, 500);
    for _ in 0..4 {
        pair.step(&[SequenceStep::decode(s)]);
    }
}

/// Products q·k far beyond the largest f16: logits are f32 and finite.
#[test]
fn products_beyond_f16() {
    let mut pair = Pair::new(&config(4, 1, 64));
    pair.key_scale = 6000.0;
    let s = pair.create_sequence();
    pair.fill(s, 500);
    pair.step(&[SequenceStep::extend(s, 3)]);
}

/// Per-channel offsets up to ±200, as biased key projections have: their share of the logits is exact,
/// whatever the width.
#[test]
fn keys_with_channel_offsets() {
    for &bits in Bits::ALL {
        let mut pair = Pair::new(&config(4, 2, 128).with_bits(bits, bits));
        let s = pair.create_sequence();
        for (append, attend) in [(400, 0), (1, 1), (3, 3)] {
            let step = [SequenceStep::new(s, append, attend)];
            let mut tensors = pair.tensors(&step);
            let offsets = [0.0, 200.0, -200.0, 37.0];
            for (i, k) in tensors[0].k.iter_mut().enumerate() {
                *k += offsets[i % 4];
            }
            pair.step_with(&step, &tensors);
        }
        pair.check_state(s);
    }
}

/// Sliding windows from one token to more than a page, next to a layer that sees everything; some are smaller
/// than the residual window.
#[test]
fn sliding_windows() {
    for sinks in [0, 5] {
        let windows = [None, Some(1), Some(16), Some(100), Some(256), Some(301)];
        let attention = windows.map(|sliding_window| {
            let mut attention = LayerAttention::default();
            attention.sliding_window = sliding_window;
            attention.soft_cap = None;
            attention
        });
        let config = CacheConfig::new(6, 4, 2, 64).with_sink_tokens(sinks).with_residual_window(40);
        let mut pair = Pair::new(&config.with_layer_attention(attention.to_vec()));
        let s = pair.create_sequence();
        for (append, attend) in [(1, 1), (3, 3), (120, 0), (8, 8), (300, 90), (1, 1), (200, 200), (5, 5)] {
            pair.step(&[SequenceStep::new(s, append, attend)]);
        }
        pair.check_state(s);
    }
}

/// Soft caps far above, around and far below the logits.
#[test]
fn soft_caps() {
    let caps = [None, Some(0.3), Some(5.0), Some(50.0), Some(3000.0)];
    let attention = caps.map(|soft_cap| {
        let mut attention = LayerAttention::default();
        attention.sliding_window = None;
        attention.soft_cap = soft_cap;
        attention
    });
    let config = CacheConfig::new(5, 4, 2, 64).with_layer_attention(attention.to_vec());
    for key_scale in [1.0, 40.0] {
        let mut pair = Pair::new(&config);
        pair.key_scale = key_scale;
        let s = pair.create_sequence();
        pair.fill(s, 400);
        pair.step(&[SequenceStep::decode(s)]);
        pair.step(&[SequenceStep::extend(s, 4)]);
        pair.step(&[SequenceStep::extend(s, 70)]);
    }
}

/// Learned sink logits, in and far above and far below the range of the others.
#[test]
fn learned_sinks() {
    let mut pair = Pair::new(&config(6, 2, 64).with_sink_tokens(2));
    let s = pair.create_sequence();
    for sinks in [[0.5, -3.0, 2.0, 4.0, 0.0, 1.0], [30.0, -200.0, 3.0, 9.0, -9.0, 0.0]] {
        pair.sink_logits = sinks.to_vec();
        pair.step(&[SequenceStep::extend(s, 3)]);
        pair.fill(s, 300);
        pair.step(&[SequenceStep::decode(s)]);
    }
}

/// A learned sink so far above all logits that weights relative to these would be infinite.
#[test]
fn a_sink_far_above_all_logits() {
    let mut pair = Pair::new(&config(4, 2, 64).with_sink_tokens(2));
    let s = pair.create_sequence();
    pair.fill(s, 300);
    for sinks in [[200.0, 130.0, 89.0, 0.0], [1e3, 1e30, 205.0, 88.0]] {
        let steps = [SequenceStep::attend(s, 1)];
        let tensors = pair.tensors(&steps);
        pair.sink_logits.clear();
        let without = pair.step_with(&steps, &tensors).remove(0);
        pair.sink_logits = sinks.to_vec();
        // Log-sum-exps, which are the sinks here, are compared with the oracle's.
        let with = pair.step_with(&steps, &tensors).remove(0);
        for ((with, without), sink) in with.chunks(64).zip(without.chunks(64)).zip(sinks) {
            let most = |row: &[f32]| row.iter().fold(0.0f32, |most, x| most.max(x.abs()));
            assert!(sink < 50.0 || most(with) <= 1e-9 * most(without), "{sink}: {with:?}");
        }
    }
}
