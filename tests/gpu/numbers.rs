//! What is no number, and where there is nothing: queries, keys, values, padding, empty rows of a batch.

use crate::support::{
    POISON, Pair, Tensors, decode, device, poisoned_buffer, read_buffer, skipped, storage_buffer,
};
use kivi_wgpu::{
    Bits, CacheConfig, Dtype, Error, LayerIo, Preset, SequenceStep, TensorFormat, TensorView, Variant, wgpu,
};

/// Pairs of every variant that can run a configuration here.
fn pairs(config: &CacheConfig) -> impl Iterator<Item = Pair> {
    Variant::ALL.iter().copied().filter_map(|variant| match Pair::with_variant(config, variant) {
        Ok(pair) => Some(pair),
        Err(Error::VariantUnavailable { needed, .. }) => {
            skipped(variant, needed);
            None
        }
        Err(other) => panic!("{other}"),
    })
}

/// Formats whose keys and queries go through kernels of their own.
fn formats() -> Vec<CacheConfig> {
    let base = CacheConfig::new(1, 4, 2, 64).with_residual_window(32).with_max_step(64);
    let plain = TensorFormat::new;
    vec![
        base.clone(),
        base.clone().with_preset(Preset::Bits3).with_sink_tokens(3),
        base.clone().with_bits(Bits::Sixteen, Bits::Eight).with_window_format(Dtype::F32),
        base.with_formats(plain(Bits::Four).with_rotation(), plain(Bits::Four))
            .with_window_format(Dtype::Bf16),
    ]
}

/// A query with a NaN or an infinity makes its own row NaN, in the output and in the log-sum-exp; all others
/// keep every bit.
#[test]
fn queries_that_are_not_finite_are_nan_in_their_own_rows() {
    for config in formats() {
        for (mut pair, (input, output)) in
            pairs(&config).zip(Dtype::ALL.iter().copied().zip([Dtype::Bf16, Dtype::F32, Dtype::F16]))
        {
            (pair.input, pair.output) = (input, output);
            let s = pair.create_sequence();
            pair.fill(s, 400);
            for queries in [1, 3, 20] {
                let steps = [SequenceStep::attend(s, queries)];
                let mut tensors = pair.tensors(&steps);
                let good = pair.step_with(&steps, &tensors).remove(0);
                // One row in three, somewhere in it.
                let mut bad = Vec::new();
                for (row, query) in tensors[0].q.chunks_mut(64).enumerate() {
                    if row % 3 == 1 {
                        query[row * 7 % 64] =
                            [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -f32::NAN][row / 3 % 4];
                        bad.push(row);
                    }
                }
                // The oracle's rows are NaN where the queries are, and `step_with` compares.
                let out = pair.step_with(&steps, &tensors).remove(0);
                for (row, (out, good)) in out.chunks(64).zip(good.chunks(64)).enumerate() {
                    match bad.contains(&row) {
                        true => assert!(out.iter().all(|x| x.is_nan()), "{config:?}: row {row}: {out:?}"),
                        false => assert!(out == good, "{config:?}: row {row} has changed"),
                    }
                }
            }
            pair.check_state(s);
        }
    }
}

/// A learned sink that is −∞ is none; one that is another number that is not finite makes the rows of its
/// head NaN, and no others.
#[test]
fn sinks_that_are_not_finite() {
    for mut pair in pairs(&CacheConfig::new(1, 4, 2, 64).with_residual_window(32)) {
        let s = pair.create_sequence();
        pair.fill(s, 300);
        for queries in [1, 30] {
            let steps = [SequenceStep::attend(s, queries)];
            let tensors = pair.tensors(&steps);
            let mut with = |sinks: &[f32]| {
                pair.sink_logits = sinks.to_vec();
                pair.step_with(&steps, &tensors).remove(0)
            };
            let none = with(&[]);
            assert!(with(&[f32::NEG_INFINITY; 4]) == none);
            let out = with(&[f32::NEG_INFINITY, f32::NAN, f32::INFINITY, f32::NEG_INFINITY]);
            for (row, (out, none)) in out.chunks(64).zip(none.chunks(64)).enumerate() {
                match row % 4 {
                    1 | 2 => assert!(out.iter().all(|x| x.is_nan()), "row {row}"),
                    _ => assert!(out == none, "row {row}"),
                }
            }
        }
    }
}

/// Keys and values enter as the nearest number that the window holds: NaN as 0, infinities as the largest
/// magnitude.
#[test]
fn keys_and_values_that_are_not_finite_enter_as_numbers() {
    for config in formats() {
        let mut pair = Pair::new(&config);
        let s = pair.create_sequence();
        for n in [64, 64, 40] {
            let steps = [SequenceStep::extend(s, n)];
            let mut tensors = pair.tensors(&steps);
            let special = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e-42, -0.0, 3e38];
            let Tensors { k, v, .. } = &mut tensors[0];
            for tensor in [k, v] {
                tensor.iter_mut().step_by(97).zip(special.iter().cycle()).for_each(|(x, s)| *x = *s);
            }
            pair.step_with(&steps, &tensors);
        }
        pair.check_state(s);
    }
}

/// Whatever stands between the rows of the host's tensors, before and behind them is never read into a
/// result, and never written.
#[test]
fn padding_may_be_nan_and_is_not_written() {
    for mut pair in pairs(&CacheConfig::new(1, 4, 2, 64).with_residual_window(32)) {
        pair.key_outlier = 1.0;
        let s = pair.create_sequence();
        pair.fill(s, 300);
        for n in [1usize, 3, 40] {
            let steps = [SequenceStep::extend(s, n as u32)];
            let t = pair.tensors(&steps).remove(0);
            // Rows of 64 in steps of 68, tokens in steps of 5 such rows, after 12 elements and before 1000.
            let strided = |data: &[f32], heads: usize| {
                let mut host = vec![f32::from_bits(POISON); 12 + n * 340 + 1000];
                for (i, row) in data.chunks(64).enumerate() {
                    let at = 12 + i / heads * 340 + i % heads * 68;
                    host[at..at + 64].copy_from_slice(row);
                }
                storage_buffer(bytemuck::cast_slice(&host))
            };
            let (k, v, q) = (strided(&t.k, 2), strided(&t.v, 2), strided(&t.q, 4));
            let (out, lse) = (poisoned_buffer(4 * (12 + n * 340 + 1000)), poisoned_buffer(4 * (12 + n * 7)));
            fn view(buffer: &wgpu::Buffer) -> TensorView<'_> {
                TensorView::new(buffer, Dtype::F32).with_offset(48).with_strides(340, 68)
            }
            let io = LayerIo::new(view(&k), view(&v), view(&q), view(&out))
                .with_lse(TensorView::new(&lse, Dtype::F32).with_offset(48).with_strides(6, 1));
            let binding = pair.gpu.bind(&io).unwrap();
            let mut encoder = device().0.create_command_encoder(&Default::default());
            let mut step = pair.gpu.begin_step(&mut encoder, &steps).unwrap();
            step.layer(&mut encoder, 0, &binding).unwrap();
            step.finish().unwrap();
            device().1.submit([encoder.finish()]);
            let input = kivi_wgpu::oracle::LayerInput { k: &t.k, v: &t.v, q: &t.q, ..Default::default() };
            let expected = pair.cpu.step(&steps, &[input]).unwrap().1.remove(0);

            let raw = decode(&read_buffer(&out), Dtype::F32);
            let rows = (0..n * 4).flat_map(|i| raw[12 + i / 4 * 340 + i % 4 * 68..][..64].to_vec());
            pair.check(0, &rows.collect::<Vec<f32>>(), &expected);
            let numbers = |words: &[f32]| words.iter().filter(|x| x.to_bits() != POISON).count();
            assert_eq!(numbers(&raw), n * 4 * 64);
            assert_eq!(numbers(&decode(&read_buffer(&lse), Dtype::F32)), n * 4);
            pair.check_state(s);
        }
    }
}

/// A sequence that does nothing in a step, and one without a token, beside one that goes on: as if they were
/// not there.
#[test]
fn idle_and_empty_sequences_in_a_batch() {
    for mut pair in pairs(&CacheConfig::new(1, 4, 2, 64).with_residual_window(32).with_max_sequences(4)) {
        pair.key_outlier = 1.0;
        let [idle, empty, busy] = [(); 3].map(|()| pair.create_sequence());
        pair.fill(idle, 333);
        pair.fill(busy, 290);
        let alone = pair.fork(busy);
        let nothing = |sequence| SequenceStep::new(sequence, 0, 0);
        for n in [1, 3, 40] {
            let tensors = pair.tensors(&[SequenceStep::extend(busy, n)]);
            let expected = pair.step_with(&[SequenceStep::extend(alone, n)], &tensors);
            let steps = [nothing(idle), SequenceStep::extend(busy, n), nothing(empty)];
            assert!(pair.step_with(&steps, &tensors) == expected);
        }
        for s in [idle, empty, busy, alone] {
            pair.check_state(s);
        }
        assert_eq!([idle, empty].map(|s| pair.gpu.tokens(s)), [Ok(333), Ok(0)]);
        let mut encoder = device().0.create_command_encoder(&Default::default());
        let refused = pair.gpu.begin_step(&mut encoder, &[SequenceStep::attend(empty, 1)]).map(drop);
        assert_eq!(refused, Err(Error::QueriesExceedTokens { got: 1, tokens: 0 }));
    }
}
