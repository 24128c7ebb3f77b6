//! Attention against the f64 oracle.

use crate::support::{Pair, full};
use kivi_wgpu::{
    Axis, Bits, CacheConfig, Dtype, Error, LayerAttention, SequenceStep, Shape, TensorFormat, Variant,
};

fn config(query_heads: u32, kv_heads: u32, head_dim: u32) -> CacheConfig {
    CacheConfig::new(1, query_heads, kv_heads, head_dim)
}

#[test]
fn every_critical_length() {
    for length in [1, 31, 32, 33, 127, 128, 129, 130, 159, 160, 161, 1000, 8192] {
        let mut pair = Pair::new(&config(4, 1, 64).with_capacity(8300));
        let s = pair.create_sequence();
        if length > 1 {
            pair.fill(s, length - 1);
        }
        pair.step(&[SequenceStep::decode(s)]);
        pair.check_state(s);
    }
}

#[test]
fn one_to_eight_new_tokens() {
    let mut pair = Pair::new(&config(4, 2, 64).with_residual_window(64));
    let s = pair.create_sequence();
    pair.fill(s, 300);
    for n in 1..=8 {
        pair.step(&[SequenceStep::extend(s, n)]);
    }
    // Queries without new tokens, and more new tokens than queries.
    pair.step(&[SequenceStep::attend(s, 3)]);
    pair.step(&[SequenceStep::new(s, 5, 2)]);
    pair.step(&[SequenceStep::new(s, 2, 7)]);
    pair.check_state(s);
}

/// A prompt of 4096 tokens that attends throughout, in chunks of any length: outputs right, words and tokens
/// the same. The shortest chunks are left to the fastest kernels of the device.
#[test]
fn prompts_in_chunks() {
    let config = config(2, 1, 64).with_residual_window(64).with_max_step(4096).with_capacity(4200);
    let mut states = Vec::new();
    for chunk in [1, 7, 64, 512, 4096] {
        let fast = chunk < 64 || full();
        let mut pair = match Pair::with_variant(&config, Variant::Subgroups) {
            Ok(pair) if fast => pair,
            Ok(_) | Err(Error::VariantUnavailable { .. }) => Pair::new(&config),
            Err(other) => panic!("{other}"),
        };
        let s = pair.create_sequence();
        let all = pair.tensors(&[SequenceStep::extend(s, 4096)]).remove(0);
        let chunks = vec![chunk; 4096 / chunk as usize];
        let rest = 4096 % chunk;
        let lengths: Vec<u32> = chunks.into_iter().chain((rest > 0).then_some(rest)).collect();
        for (n, tensors) in lengths.iter().zip(all.split(&lengths)) {
            pair.step_with(&[SequenceStep::extend(s, *n)], &[tensors]);
        }
        pair.check_state(s);
        states.push(pair.gpu.submit_and_read_state_blocking(0, s).unwrap());
    }
    assert!(states.windows(2).all(|pair| pair[0] == pair[1]));
}

/// Long chunks of every head_dim and width, at every remainder of a tile, with sinks, over several slabs.
#[test]
fn long_chunks() {
    for (i, head_dim) in [8, 24, 64, 80, 128, 136, 256, 512].into_iter().enumerate() {
        for (j, bits) in Bits::ALL.iter().copied().enumerate() {
            if !full() && i % Bits::ALL.len() != j {
                continue;
            }
            let base = config(3, 1, head_dim).with_bits(bits, bits).with_residual_window(20);
            let page = kivi_wgpu::Shape::new(&base).unwrap().layout.page_words() * 4;
            let mut pair = Pair::new(&base.with_sink_tokens(5).with_max_slab_bytes(page));
            let s = pair.create_sequence();
            for (append, attend) in [(17, 17), (300, 0), (150, 150), (40, 22), (0, 33), (64, 64)] {
                pair.step(&[SequenceStep::new(s, append, attend)]);
            }
            pair.check_state(s);
        }
    }
}

/// A new prompt beside one-token continuations, long and short, in one step: each as if alone, to the bit.
#[test]
fn a_prompt_beside_continuations() {
    let base = config(4, 2, 64).with_max_sequences(4).with_capacity(4000).with_max_batch_tokens(700);
    let page = kivi_wgpu::Shape::new(&base).unwrap().layout.page_words() * 4;
    let mut pair = Pair::new(&base.clone().with_max_slab_bytes(2 * page));
    let mut alone = Pair::new(&base);
    let ids = [(); 4].map(|()| pair.create_sequence());
    let lone = [(); 4].map(|()| alone.create_sequence());
    // Tokens of each sequence per step; the third begins with a prompt while the others go on.
    for lengths in [[500, 40, 0, 1], [300, 1, 0, 1], [1, 1, 400, 1], [1, 1, 1, 1], [1, 20, 12, 300]] {
        let steps: Vec<_> = ids
            .iter()
            .zip(lengths)
            .filter(|(_, n)| *n > 0)
            .map(|(&sequence, n)| SequenceStep::extend(sequence, n))
            .collect();
        let tensors = pair.tensors(&steps);
        let together = pair.step_with(&steps, &tensors);
        let mut outputs = together[0].as_slice();
        for ((&sequence, n), own) in lone.iter().zip(lengths).zip(tensors[0].split(&lengths)) {
            if n == 0 {
                continue;
            }
            let out = alone.step_with(&[SequenceStep::extend(sequence, n)], &[own]);
            let (row, rest) = outputs.split_at(out[0].len());
            assert!(row == out[0], "{sequence}, {n} tokens");
            outputs = rest;
        }
    }
    for (&a, &b) in ids.iter().zip(&lone) {
        pair.check_state(a);
        assert_eq!(
            pair.gpu.submit_and_read_state_blocking(0, a).unwrap(),
            alone.gpu.submit_and_read_state_blocking(0, b).unwrap()
        );
    }
}

#[test]
fn every_head_ratio() {
    for ratio in 1..=16 {
        if !full() && [6, 10, 11, 13, 14, 15].contains(&ratio) {
            continue;
        }
        let mut pair = Pair::new(&config(2 * ratio, 2, 64).with_residual_window(32));
        let s = pair.create_sequence();
        pair.fill(s, 400);
        pair.step(&[SequenceStep::decode(s)]);
        pair.step(&[SequenceStep::extend(s, 3)]);
        pair.step(&[SequenceStep::extend(s, 8)]);
    }
}

#[test]
fn every_head_dim() {
    for (i, head_dim) in [8, 16, 24, 64, 72, 80, 96, 112, 128, 136, 256, 264, 512].into_iter().enumerate() {
        for (j, bits) in Bits::ALL.iter().copied().enumerate() {
            if !full() && i % Bits::ALL.len() != j {
                continue;
            }
            let mut pair = Pair::new(&config(3, 1, head_dim).with_bits(bits, bits).with_residual_window(20));
            let s = pair.create_sequence();
            pair.fill(s, 350);
            pair.step(&[SequenceStep::decode(s)]);
            pair.step(&[SequenceStep::extend(s, 7)]);
        }
    }
}

/// All pairs of group and key width, group and value width, key and value width.
#[test]
fn every_group_and_pair_of_widths() {
    for (i, group) in [16, 32, 64, 128].into_iter().enumerate() {
        for (j, key_bits) in Bits::ALL.iter().copied().enumerate() {
            for (k, value_bits) in Bits::ALL.iter().copied().enumerate() {
                if !full() && (i + j) % Bits::ALL.len() != k {
                    continue;
                }
                let config = config(4, 2, 80).with_group_size(group).with_bits(key_bits, value_bits);
                let mut pair = Pair::new(&config.with_residual_window(32).with_sink_tokens(3));
                let s = pair.create_sequence();
                pair.fill(s, 600);
                pair.step(&[SequenceStep::extend(s, 2)]);
            }
        }
    }
}

/// Groups along the other axis, of keys, of values and of both, with compact parameters or not.
#[test]
fn every_axis() {
    use Axis::{PerChannel, PerToken};
    let axes = [(PerToken, PerToken), (PerChannel, PerChannel), (PerToken, PerChannel)];
    for (i, head_dim) in [8, 80, 128].into_iter().enumerate() {
        for (j, (keys, values)) in axes.into_iter().enumerate() {
            let bits = Bits::QUANTIZED[(i + j) % 4];
            let format = |axis| {
                let format = TensorFormat::new(bits).with_axis(axis);
                if (i + j) % 2 == 0 { format.with_compact_parameters() } else { format }
            };
            let config = config(4, 2, head_dim).with_formats(format(keys), format(values));
            let mut pair = Pair::new(&config.with_group_size([32, 64, 16][i]));
            let s = pair.create_sequence();
            pair.fill(s, 500);
            pair.step(&[SequenceStep::decode(s)]);
            pair.step(&[SequenceStep::extend(s, 40)]);
            pair.check_state(s);
        }
    }
}

/// Rotated keys: queries are rotated, of every input type, for pages and not for the window.
#[test]
fn rotated_keys() {
    for (i, head_dim) in [8, 24, 64, 80, 128, 256].into_iter().enumerate() {
        let keys = TensorFormat::new(Bits::QUANTIZED[i % 4]).with_rotation();
        let keys = if i == 3 { keys.with_axis(Axis::PerToken) } else { keys };
        let values = TensorFormat::new(Bits::Two);
        let values = if i % 2 == 0 { values.with_rotation() } else { values };
        let config = config(4, 2, head_dim).with_formats(keys, values).with_sink_tokens(3);
        let mut pair = Pair::new(&config.with_max_sequences(2).with_max_batch_tokens(1024));
        pair.input = Dtype::ALL[i % 3];
        let (s, t) = (pair.create_sequence(), pair.create_sequence());
        pair.fill(s, 500);
        pair.step(&[SequenceStep::decode(s), SequenceStep::extend(t, 300)]);
        pair.step(&[SequenceStep::extend(s, 40), SequenceStep::attend(t, 2)]);
        pair.check_state(s);
        pair.truncate(s, 150);
        pair.step(&[SequenceStep::extend(s, 9)]);
        pair.check_state(s);
    }
}

/// Parameters in 16 bits, with groups of every size.
#[test]
fn compact_parameters() {
    let compact = |bits| TensorFormat::new(bits).with_compact_parameters();
    for (i, head_dim) in [8, 72, 96, 256].into_iter().enumerate() {
        for (j, group) in [16, 32, 64, 128].into_iter().enumerate() {
            if !full() && (i + j) % 2 == 1 {
                continue;
            }
            let (keys, values) = (Bits::QUANTIZED[(i + j) % 4], Bits::QUANTIZED[j]);
            let config = config(4, 2, head_dim).with_formats(compact(keys), compact(values));
            let mut pair = Pair::new(&config.with_group_size(group));
            let s = pair.create_sequence();
            pair.fill(s, 500);
            pair.step(&[SequenceStep::decode(s)]);
            pair.step(&[SequenceStep::extend(s, 40)]);
            pair.check_state(s);
        }
    }
}

#[test]
fn every_dtype() {
    for &window in Dtype::ALL {
        for (i, input) in Dtype::ALL.iter().copied().enumerate() {
            for (o, output) in Dtype::ALL.iter().copied().enumerate() {
                if !full() && (i + window.index() as usize) % Dtype::ALL.len() != o {
                    continue;
                }
                let mut pair = Pair::new(&config(4, 2, 72).with_window_format(window).with_sink_tokens(2));
                (pair.input, pair.output) = (input, output);
                let s = pair.create_sequence();
                pair.fill(s, 300);
                pair.step(&[SequenceStep::extend(s, 2)]);
            }
        }
    }
}

#[test]
fn value_groups_up_to_the_whole_head() {
    for group in [16, 64, 128, 80] {
        let mut pair = Pair::new(&config(4, 2, 80).with_value_group_size(group));
        let s = pair.create_sequence();
        pair.fill(s, 400);
        pair.step(&[SequenceStep::decode(s)]);
    }
}

/// More tokens in a step than workgroups in one dimension.
#[test]
fn steps_of_more_than_65535_tokens() {
    let config = CacheConfig::new(1, 1, 1, 8).with_max_step(70_000).with_capacity(70_500);
    let mut pair = Pair::new(&config);
    let s = pair.create_sequence();
    pair.step(&[SequenceStep::new(s, 70_000, 2)]);
    pair.step(&[SequenceStep::decode(s)]);
    pair.check_state(s);
}

#[test]
fn sinks_of_more_than_a_page() {
    let mut pair = Pair::new(&config(2, 1, 64).with_sink_tokens(300).with_residual_window(0));
    let s = pair.create_sequence();
    for n in [1, 200, 98, 1, 1, 250] {
        pair.step(&[SequenceStep::new(s, n, 1)]);
        pair.check_state(s);
    }
}

#[test]
fn several_slabs_and_sequences() {
    // One page per slab.
    let base = config(4, 2, 64).with_max_sequences(3).with_capacity(4000).with_max_batch_tokens(1024);
    let page = kivi_wgpu::Shape::new(&base).unwrap().layout.page_words() * 4;
    let mut pair = Pair::new(&base.clone().with_max_slab_bytes(page));
    assert!(pair.gpu.planner().pool_size(0).slabs > 10);
    let mut alone = Pair::new(&base.with_max_slab_bytes(3 * page));
    let ids = [pair.create_sequence(), pair.create_sequence(), pair.create_sequence()];
    let lone = [alone.create_sequence(), alone.create_sequence(), alone.create_sequence()];
    for (a, b, c) in [(500, 3, 90), (1, 1, 400), (300, 200, 7), (1, 1, 1), (5, 2, 1)] {
        let steps: Vec<_> = ids
            .iter()
            .zip([a, b, c])
            .map(|(&sequence, n)| SequenceStep::new(sequence, n, n.min(8)))
            .collect();
        let tensors = pair.tensors(&steps);
        let together = pair.step_with(&steps, &tensors);
        // The same rows one sequence at a time, with pages elsewhere: equal to the bit.
        let g = pair.gpu.shape().first().clone();
        let (kv, q) = ((2 * g.layout.head_dim) as usize, (4 * g.layout.head_dim) as usize);
        let (mut token, mut query) = (0, 0);
        for (step, &sequence) in steps.iter().zip(&lone) {
            let (n, m) = (step.append as usize, step.attend as usize);
            let own = crate::support::Tensors {
                k: tensors[0].k[token * kv..(token + n) * kv].to_vec(),
                v: tensors[0].v[token * kv..(token + n) * kv].to_vec(),
                q: tensors[0].q[query * q..(query + m) * q].to_vec(),
            };
            let out = alone.step_with(
                &[{
                    let mut own = *step;
                    own.sequence = sequence;
                    own
                }],
                &[own],
            );
            assert_eq!(out[0][..m * q], together[0][query * q..(query + m) * q], "{sequence}");
            token += n;
            query += m;
        }
    }
    for (&a, &b) in ids.iter().zip(&lone) {
        pair.check_state(a);
        assert_eq!(
            pair.gpu.submit_and_read_state_blocking(0, a).unwrap(),
            alone.gpu.submit_and_read_state_blocking(0, b).unwrap()
        );
    }
}

/// With scratch for one head of one tile at a time attention runs in many rounds, and every bit stays the
/// same.
#[test]
fn rounds_do_not_change_a_bit() {
    let base = config(12, 3, 64).with_residual_window(32).with_max_sequences(2);
    let mut one = Pair::new(&base);
    let mut many = Pair::new(&base.clone().with_max_scratch_bytes(1));
    let mut some = Pair::new(&base.with_max_scratch_bytes(50_000));
    let ids = [&mut one, &mut many, &mut some].map(|p| [p.create_sequence(), p.create_sequence()]);
    for (n, m) in [(470, 40), (8, 1), (1, 8), (3, 300)] {
        let steps = ids.map(|ids| {
            let steps = ids.map(|sequence| SequenceStep::new(sequence, n, n.min(8)));
            [steps[0], {
                let mut own = steps[1];
                own.append = m;
                own.attend = m.min(8);
                own
            }]
        });
        let tensors = one.tensors(&steps[0]);
        let expected = one.step_with(&steps[0], &tensors);
        assert_eq!(many.step_with(&steps[1], &tensors), expected);
        assert_eq!(some.step_with(&steps[2], &tensors), expected);
    }
}

#[test]
fn thousands_of_decode_steps() {
    let mut pair = Pair::new(&config(2, 1, 64).with_residual_window(16).with_group_size(16));
    let s = pair.create_sequence();
    for _ in 0..2000 {
        pair.step(&[SequenceStep::decode(s)]);
    }
    pair.check_state(s);
}

/// As many splits as a merge can meet: fewer than its invocations, as many, and more, with and without a
/// remainder for each of them.
#[test]
fn every_number_of_splits() {
    let base = config(2, 1, 8).with_residual_window(0).with_group_size(16).with_capacity(69_000);
    let mut pair = Pair::new(&base.with_max_step(4096));
    let s = pair.create_sequence();
    for _ in 0..66 {
        pair.fill(s, 255);
        pair.step(&[SequenceStep::decode(s)]);
    }
    assert_eq!(pair.gpu.tokens(s), Ok(66 * 256));
    pair.fill(s, 189 * 256);
    for _ in 0..4 {
        pair.step(&[SequenceStep::decode(s)]);
        pair.fill(s, 255);
    }
    pair.check_state(s);
}

/// Rotated values, whose sums are rotated back where partial results meet: decoding, long chunks, without
/// history, without a window, over many splits.
#[test]
fn rotated_values() {
    for (head_dim, bits, window) in
        [(64, Bits::Two, 32), (80, Bits::Three, 32), (128, Bits::Four, 0), (24, Bits::Eight, 40)]
    {
        let base = CacheConfig::new(1, 4, 2, head_dim).with_residual_window(window).with_sink_tokens(5);
        let base = base.with_max_step(100).with_capacity(3000);
        // One of them sees only what is near.
        let sliding_window = (bits == Bits::Three).then_some(300);
        let base = base.with_attention({
            let mut attention = LayerAttention::default();
            attention.sliding_window = sliding_window;
            attention
        });
        let config = base.with_formats(TensorFormat::new(bits), TensorFormat::new(bits).with_rotation());
        let page = Shape::new(&config).unwrap().layout.page_words() * 4;
        let mut pair = Pair::new(&config.with_max_slab_bytes(2 * page));
        let s = pair.create_sequence();
        pair.step(&[SequenceStep::extend(s, 3)]);
        for n in [60, 1, 8, 100, 33] {
            pair.step(&[SequenceStep::extend(s, n)]);
        }
        pair.fill(s, 1700);
        for n in [1, 2, 100] {
            pair.step(&[SequenceStep::extend(s, n)]);
            pair.step(&[SequenceStep::attend(s, n)]);
        }
        pair.truncate(s, 1111);
        pair.check_state(s);
        pair.step(&[SequenceStep::extend(s, 90)]);
        pair.check_state(s);
    }
}
