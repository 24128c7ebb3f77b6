//! The oracle: its attention against the naive model's textbook attention, and its words under any split into
//! steps.

mod reference;

use kivi_wgpu::oracle::{CpuCache, LayerInput, block_of};
use kivi_wgpu::{Bits, CacheConfig, Dtype, LayerAttention, Preset, SequenceStep, Shape, ZeroPoint};
use proptest::prelude::*;
use reference::{NaiveSequence, Rules, TokenData, attend, seen};

fn config() -> impl Strategy<Value = CacheConfig> {
    let sizes = (0u32..70, prop_oneof![Just(16u32), Just(32), Just(64)], 0u32..6, 1u32..100);
    let format =
        (0usize..5, 0usize..5, any::<bool>(), 0usize..3, prop_oneof![Just(16u32), Just(24), Just(40)]);
    (sizes, format).prop_map(|((window, group, sinks, max_step), (key, value, rounded, dtype, head_dim))| {
        CacheConfig::new(1, 4, 2, head_dim)
            .with_residual_window(window)
            .with_group_size(group)
            .with_value_group_size(if window % 2 == 0 { 16 } else { head_dim })
            .with_sink_tokens(sinks)
            .with_max_step(max_step)
            .with_bits(Bits::ALL[key], Bits::ALL[value])
            .with_zero_point(if rounded { ZeroPoint::Rounded } else { ZeroPoint::Min })
            .with_window_format(Dtype::ALL[dtype])
            .with_attention({
                let mut attention = LayerAttention::default();
                attention.sliding_window = (max_step % 3 == 0).then_some(1 + 2 * window);
                attention.soft_cap = (max_step % 2 == 0).then_some(3.0);
                attention
            })
            .with_capacity(1000)
    })
}

/// Noise with outliers, from a seed.
fn noise(seed: &mut u32, n: usize) -> Vec<f32> {
    (0..n)
        .map(|i| {
            *seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let x = (*seed >> 8) as f32 / 16_777_216.0 - 0.5;
            if i % 13 == 5 { 20.0 * x } else { 2.0 * x }
        })
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn attention_is_textbook_attention(config in config(), steps in prop::collection::vec((1u32..100, 0u32..25), 1..8), mut seed: u32) {
        let mut cache = CpuCache::new(&config).unwrap();
        let id = cache.create_sequence().unwrap();
        let rules = Rules::of(&config);
        let mut naive = NaiveSequence::default();
        let mut data = TokenData::default();
        let (row, dim) = ((2 * config.head_dim) as usize, config.head_dim as usize);
        for (append, attend_queries) in steps {
            let append = append.min(config.max_step);
            let queries = attend_queries.min(naive.tokens.len() as u32 + append).min(config.max_step);
            let k = noise(&mut seed, append as usize * row);
            let v = noise(&mut seed, append as usize * row);
            let q = noise(&mut seed, queries as usize * 2 * row);
            let first = naive.tokens.len() as u64;
            for i in 0..append as usize {
                data.keys.insert(first + i as u64, k[i * row..(i + 1) * row].to_vec());
                data.values.insert(first + i as u64, v[i * row..(i + 1) * row].to_vec());
            }
            let step = SequenceStep::new(id, append, queries);
            let out = cache.step(&[step], &[LayerInput { k: &k, v: &v, q: &q, ..Default::default() }]).unwrap().1.remove(0);
            naive.enter(first..first + u64::from(append));
            for head in 0..4 {
                let (keys, values) = seen(&config, &data, &naive, head / 2);
                for i in 0..queries as usize {
                    let at = (i * 4 + head) * dim;
                    let visible = naive.tokens.len() - (queries as usize - 1 - i);
                    let expected = attend(&config, &q[at..at + dim], &keys, &values, visible, 0);
                    for (a, b) in out.out[at..at + dim].iter().zip(&expected) {
                        // x̂ is rounded to f32 once in the naive model, and exact in the oracle.
                        prop_assert!((a - b).abs() <= 1e-5 * (1.0 + b.abs()), "{} {}", a, b);
                    }
                }
            }
            naive.pack(&rules);
        }
    }

    /// Words do not depend on how the tokens were fed.
    #[test]
    fn words_do_not_depend_on_the_steps(config in config(), chunks in prop::collection::vec(1u32..100, 1..8), mut seed: u32) {
        let row = (2 * config.head_dim) as usize;
        let total: u32 = chunks.iter().map(|n| n.min(&config.max_step)).sum();
        let k = noise(&mut seed, total as usize * row);
        let v = noise(&mut seed, total as usize * row);
        let feed = |chunks: &[u32]| {
            let mut cache = CpuCache::new(&config).unwrap();
            let id = cache.create_sequence().unwrap();
            let mut done = 0;
            for &n in chunks {
                let n = n.min(config.max_step) as usize;
                let range = done * row..(done + n) * row;
                let input = LayerInput { k: &k[range.clone()], v: &v[range], q: &[], ..Default::default() };
                cache.step(&[SequenceStep::append(id, n as u32)], &[input]).unwrap();
                done += n;
            }
            cache.state(0, id).unwrap()
        };
        prop_assert_eq!(feed(&chunks), feed(&vec![1; total as usize]));
    }
}

/// A block of 16-bit tensors: two elements per word, keys word by word and values token by token, nothing
/// else.
#[test]
fn sixteen_bit_blocks_hold_the_elements_themselves() {
    let x = |token: u32, channel: u32| 1.0 + f32::from_bits(0x3a80_0000 + 8 * (64 * token + channel));
    let rows: Vec<f32> = (0..16).flat_map(|t| (0..64).map(move |c| x(t, c))).collect();
    for &window in Dtype::ALL {
        let config = CacheConfig::new(1, 1, 1, 64).with_group_size(16).with_window_format(window);
        let g = Shape::new(&config.with_bits(Bits::Sixteen, Bits::Sixteen)).unwrap();
        assert_eq!((g.layout.block_words(), g.layout.format_bits()), (2 * 16 * 32, 16.0));
        let block = block_of(&g, &rows, &rows);
        let half = |token, channel| match window {
            Dtype::Bf16 => u32::from(half::bf16::from_f32(x(token, channel)).to_bits()),
            _ => u32::from(half::f16::from_f32(x(token, channel)).to_bits()),
        };
        for token in 0..16 {
            for word in 0..32 {
                let expected = half(token, 2 * word) | (half(token, 2 * word + 1) << 16);
                assert_eq!(block[(word * 16 + token) as usize], expected);
                assert_eq!(block[(16 * 32 + token * 32 + word) as usize], expected);
            }
        }
    }
}

#[test]
fn inputs_of_the_wrong_size_are_refused() {
    let mut cache = CpuCache::new(&CacheConfig::new(2, 2, 1, 64)).unwrap();
    let id = cache.create_sequence().unwrap();
    let row = [0.0; 64];
    let input = LayerInput { k: &row, v: &row, q: &[0.0; 64], ..Default::default() };
    let step = [SequenceStep::decode(id)];
    let short = cache.step(&step, &[input, input]).unwrap_err();
    assert_eq!(short, kivi_wgpu::Error::BufferTooSmall { tensor: "q", needed: 512, got: 256 });
    let layers = cache.step(&step, &[input]).unwrap_err();
    assert_eq!(layers, kivi_wgpu::Error::LayerOutOfRange { got: 1, layers: 2 });
    assert_eq!(cache.planner().tokens(id), Ok(0));
}

/// A layer with a format of its own is as in a cache in which all layers have that format.
#[test]
fn layers_are_as_alone() {
    let presets = [Preset::Bits2_25, Preset::Kivi4, Preset::Bits2_25, Preset::Bits3];
    let mut formats = presets.map(Preset::format);
    formats[3].history_limit = Some(300);
    formats[3].residual_window = 20;
    let base = CacheConfig::new(4, 4, 2, 16).with_max_sequences(2).with_max_step(150).with_capacity(600);
    let mut mixed = base.clone();
    for (layer, format) in (0..).zip(formats) {
        mixed = mixed.with_layer_format([layer], format);
    }
    let mut mixed = CpuCache::new(&mixed).unwrap();
    let own = |format| CpuCache::with_id(&base.clone().with_format(format), mixed.id()).unwrap();
    let mut alone = formats.map(own);
    let mut seed = 17;
    let s = mixed.create_sequence().unwrap();
    alone.iter_mut().for_each(|cache| assert_eq!(cache.create_sequence(), Ok(s)));
    let mut length = 0;
    for (round, n) in [150usize, 1, 149, 150, 33, 1, 150, 7].into_iter().enumerate() {
        let mut tensor = |heads: usize| noise(&mut seed, n * heads * 16);
        let inputs = [0; 4].map(|_| (tensor(2), tensor(2), tensor(4)));
        let inputs: Vec<_> =
            inputs.iter().map(|(k, v, q)| LayerInput { k, v, q, ..Default::default() }).collect();
        let steps = [SequenceStep::extend(s, n as u32)];
        let (operation, outputs) = mixed.step(&steps, &inputs).unwrap();
        length += n as u32;
        for (layer, cache) in alone.iter_mut().enumerate() {
            let (own, expected) = cache.step(&steps, &[inputs[layer]; 4]).unwrap();
            assert_eq!((operation, &outputs[layer]), (own, &expected[layer]), "layer {layer}");
        }
        if round == 4 {
            length -= 15;
            mixed.truncate(s, length).unwrap();
            for cache in &mut alone {
                cache.truncate(s, length).unwrap();
            }
        }
        for (layer, cache) in (0..).zip(&alone) {
            assert_eq!(mixed.state(layer, s), cache.state(layer, s), "layer {layer}");
        }
    }
}
