//! Every variant of the attention kernels that the device can run, against the f64 oracle, each within its
//! own tolerance.

use crate::support::{Pair, device, full, kernels, may_be_missing, options_on, skipped};
use kivi_wgpu::KvCacheOptions;
use kivi_wgpu::{
    Bits, CacheConfig, Dtype, Error, KvCache, LayerAttention, Preset, SequenceStep, Shape, TensorFormat,
    Variant, wgpu,
};

/// A pair for each variant but the portable one, which the other tests use; those that the device lacks are
/// named on stderr.
fn pairs(config: &CacheConfig) -> Vec<Pair> {
    let g = Shape::new(config).unwrap();
    let others = Variant::ALL.iter().copied().filter(|v| *v != Variant::Portable && v.supports(&g).is_ok());
    others
        .filter_map(|variant| match Pair::with_variant(config, variant) {
            Ok(pair) => Some(pair),
            Err(Error::VariantUnavailable { needed, .. }) if may_be_missing(variant) => {
                skipped(variant, needed);
                None
            }
            Err(other) => panic!("{other}"),
        })
        .collect()
}

/// One new token, a few if `full`, then a chunk. Each kind has kernels of its own, which take seconds to
/// compile on a software adapter.
fn decode_and_extend(config: &CacheConfig, tokens: u32, prepare: impl Fn(&mut Pair)) {
    for mut pair in pairs(config) {
        prepare(&mut pair);
        let s = pair.create_sequence();
        pair.fill(s, tokens);
        pair.step(&[SequenceStep::decode(s)]);
        if full() {
            pair.step(&[SequenceStep::extend(s, 3)]);
        }
        pair.step(&[SequenceStep::extend(s, 50)]);
        pair.check_state(s);
        let mean = pair.mean_error();
        assert!(mean <= 1e-5, "{:?}: {mean}", pair.gpu.variant());
    }
}

/// Presets, whose values are rotated, with every variant.
#[test]
fn presets() {
    for (preset, head_dim) in
        [(Preset::Bits3, 64), (Preset::Bits4_5, 128), (Preset::Bits2_25, 64), (Preset::Bits2_75, 128)]
    {
        let config = CacheConfig::new(1, 8, 2, head_dim).with_preset(preset).with_capacity(1200);
        decode_and_extend(&config, 700, |_| {});
    }
}

#[test]
fn rotated_keys() {
    for (head_dim, bits) in [(64, Bits::Two), (128, Bits::Four)] {
        let keys = TensorFormat::new(bits).with_rotation();
        let config = CacheConfig::new(1, 8, 2, head_dim).with_formats(keys, TensorFormat::new(bits));
        decode_and_extend(&config, 600, |_| {});
    }
}

/// The oldest page begins with blocks that are gone.
#[test]
fn limited_histories() {
    for (head_dim, limit) in [(64, 200), (128, 333)] {
        let config = CacheConfig::new(1, 8, 2, head_dim).with_sink_tokens(4).with_history_limit(limit);
        decode_and_extend(&config, 700, |_| {});
    }
}

/// Parameters in 16 bits: one, two and four groups of values per token.
#[test]
fn compact_parameters() {
    let compact = |bits| TensorFormat::new(bits).with_compact_parameters();
    for (head_dim, group, bits) in [
        (64, 64, Bits::Two),
        (64, 32, Bits::Four),
        (64, 16, Bits::Eight),
        (128, 32, Bits::Two),
        (128, 64, Bits::Three),
    ] {
        let config = CacheConfig::new(1, 8, 2, head_dim).with_formats(compact(bits), compact(bits));
        decode_and_extend(&config.with_group_size(group), 600, |_| {});
    }
}

#[test]
fn every_width_and_group() {
    for (i, head_dim) in [64, 128].into_iter().enumerate() {
        for (j, key_bits) in Bits::ALL.iter().copied().enumerate() {
            for (k, value_bits) in Bits::ALL.iter().copied().enumerate() {
                if !full() && (i + j + k) % Bits::ALL.len() != 0 {
                    continue;
                }
                for (l, group) in [16, 32, 64, 128].into_iter().enumerate() {
                    if !full() && (i + j + l) % 2 != 0 {
                        continue;
                    }
                    let config = CacheConfig::new(1, 8, 2, head_dim)
                        .with_group_size(group)
                        .with_bits(key_bits, value_bits)
                        .with_residual_window(32);
                    decode_and_extend(&config, 600, |_| {});
                }
            }
        }
    }
}

#[test]
fn every_head_ratio() {
    // Tiles of 2, 4 and 8 rows, two of them with a ratio of 16; with a ratio of 3, one row is not in use.
    for ratio in [2, 3, 4, 8, 16] {
        let config = CacheConfig::new(1, 3 * ratio, 3, 128).with_residual_window(0).with_sink_tokens(3);
        decode_and_extend(&config, 700, |_| {});
    }
}

#[test]
fn every_input_and_layout() {
    for &input in Dtype::ALL {
        decode_and_extend(&CacheConfig::new(1, 4, 1, 64), 300, |pair| pair.input = input);
    }
}

#[test]
fn sliding_windows_soft_caps_and_sinks() {
    let attention = [(None, None), (Some(1), Some(5.0)), (Some(100), None), (Some(301), Some(0.3))].map(
        |(sliding_window, soft_cap)| {
            let mut attention = LayerAttention::default();
            attention.sliding_window = sliding_window;
            attention.soft_cap = soft_cap;
            attention
        },
    );
    let config = CacheConfig::new(4, 8, 2, 128).with_layer_attention(attention.to_vec());
    decode_and_extend(&config.with_residual_window(40), 650, |pair| {
        pair.sink_logits = vec![0.5, -3.0, 2.0, 30.0, 0.0, 1.0, -200.0, 4.0];
    });
}

#[test]
fn huge_logits() {
    decode_and_extend(&CacheConfig::new(1, 4, 1, 64), 500, |pair| {
        pair.key_scale = 150.0;
    });
}

#[test]
fn thousands_of_decode_steps() {
    for mut pair in pairs(&CacheConfig::new(1, 2, 1, 64).with_residual_window(16).with_group_size(16)) {
        let s = pair.create_sequence();
        for _ in 0..1000 {
            pair.step(&[SequenceStep::decode(s)]);
        }
        let mean = pair.mean_error();
        assert!(mean <= 1e-5, "{:?}: {mean}", pair.gpu.variant());
    }
}

/// Row b of a batch equals b alone to the bit, with pages elsewhere and a scratch that holds one head at a
/// time.
#[test]
fn batches_do_not_change_a_bit() {
    let base = CacheConfig::new(1, 8, 2, 128).with_max_sequences(2).with_max_batch_tokens(600);
    for mut pair in pairs(&base) {
        let mut alone =
            Pair::with_variant(&base.clone().with_max_scratch_bytes(1), pair.gpu.variant()).unwrap();
        let ids = [pair.create_sequence(), pair.create_sequence()];
        let lone = [alone.create_sequence(), alone.create_sequence()];
        for (a, b) in [(500, 90), (1, 400), (300, 3), (1, 1)] {
            let steps = [SequenceStep::extend(ids[0], a), SequenceStep::extend(ids[1], b)];
            let tensors = pair.tensors(&steps);
            let together = pair.step_with(&steps, &tensors);
            let mut rows = tensors[0].split(&[a, b]).into_iter();
            let mut outputs = together[0].as_slice();
            for (n, sequence) in [a, b].into_iter().zip(lone) {
                let out = alone.step_with(&[SequenceStep::extend(sequence, n)], &[rows.next().unwrap()]);
                let (own, rest) = outputs.split_at(out[0].len());
                assert!(own == out[0], "{sequence}");
                outputs = rest;
            }
        }
    }
}

/// The self-test at construction runs every attention kernel that a configuration can have, and finds all of
/// them right: presets, and configurations at their edges.
#[test]
fn the_self_test_passes() {
    let shape = |query_heads, kv_heads, head_dim| CacheConfig::new(1, query_heads, kv_heads, head_dim);
    let two = TensorFormat::new(Bits::Two);
    let capped = LayerAttention::default().with_sliding_window(1).with_soft_cap(1e-3);
    let mut configs: Vec<CacheConfig> =
        Preset::ALL.iter().map(|preset| shape(4, 2, 64).with_preset(*preset).with_max_step(1)).collect();
    configs.extend([
        // Steps of one token without a window, the least that a plan must hold.
        shape(1, 1, 8).with_residual_window(0).with_max_step(1).with_capacity(1).with_group_size(128),
        shape(16, 1, 128).with_max_step(40).with_window_format(Dtype::Bf16),
        shape(2, 2, 80).with_formats(two.with_rotation(), two.with_rotation()).with_max_step(17),
        shape(3, 1, 64).with_softmax_scale(1e6).with_attention(capped).with_sink_tokens(9).with_max_step(1),
        shape(1, 1, 40).with_softmax_scale(1e-6).with_bits(Bits::Sixteen, Bits::Three).with_max_step(1),
        // A group with fewer tokens than a long chunk has queries, with and without sinks.
        shape(1, 1, 64).with_group_size(16).with_max_step(17),
        shape(2, 2, 64).with_group_size(16).with_sink_tokens(4).with_max_step(17),
        // A pool that never has a page.
        shape(1, 1, 64).with_max_step(1).with_capacity(100).with_max_capacity(100),
        // A pool that begins empty.
        shape(2, 1, 64).with_max_step(1).with_capacity(1).with_residual_window(300),
    ]);
    let (device, queue) = device();
    for (i, config) in configs.into_iter().enumerate() {
        let g = Shape::new(&config).unwrap();
        // Kernels take a software adapter long to build: other variants with every format once.
        let all = full() || i < Preset::ALL.len();
        let variants = Variant::ALL.iter().copied().filter(|v| *v == Variant::Portable || all);
        for variant in variants.filter(|v| v.supports(&g).is_ok()) {
            let options = KvCacheOptions::default().with_variant(variant).with_kernels(kernels());
            match KvCache::with_options_blocking(device, queue, &config, &options) {
                Ok(cache) => assert_eq!(cache.variant(), variant),
                Err(Error::VariantUnavailable { needed, .. }) if may_be_missing(variant) => {
                    skipped(variant, needed);
                }
                Err(other) => panic!("{config:?}: {other}"),
            }
        }
    }
}

#[test]
fn variants_can_be_chosen_and_refused() {
    let (device, queue) = device();
    let build = |config: &CacheConfig, variant| {
        let options = options_on(device).with_variant(variant);
        KvCache::with_options_blocking(device, queue, config, &options).map(|cache| cache.variant())
    };
    let config = CacheConfig::new(1, 4, 1, 64);
    for &variant in Variant::ALL {
        match build(&config, variant) {
            Ok(built) => assert_eq!(built, variant),
            Err(Error::VariantUnavailable { needed, .. }) if may_be_missing(variant) => {
                skipped(variant, needed);
            }
            Err(other) => panic!("{other}"),
        }
    }
    let odd = build(&CacheConfig::new(1, 4, 1, 72), Variant::Subgroups).unwrap_err();
    assert!(odd.to_string().contains("head_dim = 64 or 128"), "{odd}");

    // Without the feature there are no subgroup kernels.
    let plain = crate::support::device_with(wgpu::Features::empty(), wgpu::Limits::default());
    let cache = crate::support::new_cache(&plain.0, &plain.1, &config).unwrap();
    assert_ne!(cache.variant(), Variant::Subgroups);
}

/// What is chosen where, as far as it does not depend on this machine: kernels within the published bound.
#[test]
fn the_preferred_variant_of_each_kind_of_adapter() {
    let mut info = device().0.adapter_info();
    use wgpu::Backend::{Dx12, Metal, Vulkan};
    for (device_type, vendor, backend, expected) in [
        (wgpu::DeviceType::Cpu, 0x10005, Vulkan, Variant::Subgroups),
        (wgpu::DeviceType::DiscreteGpu, 0x1002, Vulkan, Variant::Portable),
        (wgpu::DeviceType::DiscreteGpu, 0x1002, Dx12, Variant::Portable),
        (wgpu::DeviceType::DiscreteGpu, 0x10de, Vulkan, Variant::Portable),
        (wgpu::DeviceType::IntegratedGpu, 0x106b, Metal, Variant::Portable),
    ] {
        (info.device_type, info.vendor, info.backend) = (device_type, vendor, backend);
        assert_eq!(Variant::preferred(&info), expected, "{device_type:?} {vendor:#x} {backend:?}");
    }
}
