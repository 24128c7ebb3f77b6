//! Packed words and unpacked tokens, compared with `==`.

use crate::support::{Pair, Random, Tensors, full};
use kivi_wgpu::{Axis, Bits, CacheConfig, Dtype, SequenceStep, TensorFormat, ZeroPoint};

fn config(head_dim: u32) -> CacheConfig {
    CacheConfig::new(1, 4, 2, head_dim).with_residual_window(32).with_max_step(100).with_capacity(1024)
}

/// Pairs of axes of keys and values, KIVI's first.
const AXES: [(Axis, Axis); 4] = [
    (Axis::PerChannel, Axis::PerToken),
    (Axis::PerToken, Axis::PerToken),
    (Axis::PerChannel, Axis::PerChannel),
    (Axis::PerToken, Axis::PerChannel),
];

fn check(config: CacheConfig, input: Dtype) {
    let mut pair = Pair::new(&config);
    pair.input = input;
    let s = pair.create_sequence();
    for n in [100, 1, 57, 100] {
        pair.step(&[SequenceStep::append(s, n)]);
    }
    pair.check_state(s);
}

#[test]
fn every_head_dim() {
    for head_dim in [8, 64, 72, 80, 96, 128, 256, 512] {
        check(config(head_dim), Dtype::F32);
    }
}

#[test]
fn every_group_size_and_width() {
    for (i, group) in [16, 32, 64, 128].into_iter().enumerate() {
        for (j, (key_bits, value_bits)) in
            Bits::ALL.iter().copied().flat_map(|k| Bits::ALL.iter().map(move |v| (k, *v))).enumerate()
        {
            // Every width of each with every group; every pair of widths.
            if !full() && !(i + j / Bits::ALL.len() + j).is_multiple_of(2) {
                continue;
            }
            check(config(80).with_group_size(group).with_bits(key_bits, value_bits), Dtype::F32);
        }
    }
}

#[test]
fn every_value_group() {
    for group in [16, 32, 64, 128, 80] {
        check(config(80).with_value_group_size(group), Dtype::F32);
    }
}

#[test]
fn every_dtype_and_zero_point() {
    for &window in Dtype::ALL {
        for zero in [ZeroPoint::Min, ZeroPoint::Rounded] {
            for &input in Dtype::ALL {
                check(config(64).with_window_format(window).with_zero_point(zero).with_sink_tokens(5), input);
            }
        }
    }
}

/// Values that are hard to quantize: see CASES 1 to 5 in the format tests.
fn difficult(random: &mut Random) -> f32 {
    match random.below(16) {
        0 => f32::NAN,
        1 => f32::INFINITY,
        2 => f32::NEG_INFINITY,
        3 => -0.0,
        4 => f32::from_bits(random.below(1 << 23)),
        5 => f32::from_bits(random.bits() as u32),
        6 => 65504.0 * random.normal().clamp(-1.0, 1.0),
        7 => 1000.0 + 0.01 * random.normal(),
        8 => 1e-30 * random.normal(),
        9 => 6e-5 * random.normal(),
        10 => (random.below(9) as f32 - 4.0) * 0.5,
        _ => random.normal(),
    }
}

#[test]
fn difficult_values() {
    for &window in Dtype::ALL {
        for &bits in Bits::ALL {
            for zero in [ZeroPoint::Min, ZeroPoint::Rounded] {
                for clipping in [false, true] {
                    let format = TensorFormat::new(bits).with_zero_point(zero);
                    let format = if clipping { format.with_clipping() } else { format };
                    check_difficult(&config(96).with_window_format(window).with_formats(format, format));
                }
            }
        }
    }
}

fn check_difficult(config: &CacheConfig) {
    let mut pair = Pair::new(config);
    let s = pair.create_sequence();
    let row = 2 * config.head_dim as usize;
    let n = row * 100;
    // Half of the groups draw from one kind of value only.
    let mut random = Random(u64::from(config.format.keys.bits.get()));
    let k = (0..n).map(|_| difficult(&mut random)).collect();
    let v: Vec<f32> = (0..n.div_ceil(32))
        .flat_map(|_| {
            let kind = random.0;
            let value = |i| difficult(&mut Random(kind.wrapping_add(if i % 2 == 0 { 0 } else { i })));
            (0..32).map(value).collect::<Vec<_>>()
        })
        .take(n)
        .collect();
    // A token of nothing but the smallest numbers, whose differences are subnormal.
    let mut v = v;
    v[7 * row..8 * row].iter_mut().for_each(|x| *x = f32::MIN_POSITIVE * (1.5 + 0.1 * random.normal()));
    let tensors = [Tensors { k, v, q: vec![] }];
    pair.step_with(&[SequenceStep::append(s, 100)], &tensors);
    pair.check_state(s);
}

/// Rotated values of every head_dim's kind, clipped or not.
#[test]
fn rotated_values() {
    for (head_dim, bits) in
        [(8, Bits::Two), (24, Bits::Four), (64, Bits::Two), (80, Bits::Three), (512, Bits::Eight)]
    {
        let format = TensorFormat::new(bits).with_rotation();
        check(config(head_dim).with_formats(TensorFormat::new(Bits::Two), format), Dtype::F32);
        for &window in Dtype::ALL {
            let config = config(head_dim).with_window_format(window).with_value_group_size(head_dim);
            check_difficult(&config.with_formats(TensorFormat::new(bits), format.with_clipping()));
        }
    }
}

/// Rotated keys, and values that are rotated and quantized per channel: rows are rotated in a pass of their
/// own.
#[test]
fn rows_rotated_apart() {
    for (i, head_dim) in [8, 24, 64, 80, 128, 512].into_iter().enumerate() {
        let bits = Bits::QUANTIZED[i % 4];
        let format = TensorFormat::new(bits).with_rotation();
        let group = [16, 32, 64, 128][i % 4];
        let both = config(head_dim).with_group_size(group);
        check(both.with_formats(format, format.with_axis(Axis::PerChannel)), Dtype::F32);
        let per_token = format.with_axis(Axis::PerToken).with_clipping();
        check(config(head_dim).with_formats(per_token, format), Dtype::F16);
    }
    for &window in Dtype::ALL {
        let format = TensorFormat::new(Bits::Three).with_rotation().with_compact_parameters();
        let config = config(64).with_window_format(window);
        check_difficult(&config.with_formats(format.with_clipping(), format.with_axis(Axis::PerChannel)));
    }
}

/// Clipped groups of every range from none to the largest, with tails of different lengths: every pair of
/// ends wins somewhere (tests/format.rs).
#[test]
fn clipped_groups_of_every_range() {
    let format = |bits| TensorFormat::new(bits).with_clipping();
    for (bits, compact) in [(Bits::Two, false), (Bits::Three, true), (Bits::Four, false)] {
        let format = |bits| if compact { format(bits).with_compact_parameters() } else { format(bits) };
        let config = config(256).with_formats(format(bits), format(bits)).with_window_format(Dtype::F32);
        let mut pair = Pair::new(&config);
        let s = pair.create_sequence();
        for n in [100, 100] {
            let steps = [SequenceStep::append(s, n)];
            let mut tensors = pair.tensors(&steps);
            let Tensors { k, v, .. } = &mut tensors[0];
            for (i, x) in k.iter_mut().chain(v).enumerate() {
                let channel = i % 256;
                let (below, above) = ((channel / 84) as f32, (channel % 5) as f32 / 2.0);
                let normal = *x;
                let stretched = if normal < 0.0 {
                    normal * (1.0 - normal * below)
                } else {
                    normal * (1.0 + normal * above)
                };
                *x = stretched * 2f32.powi((channel % 84) as i32 - 68);
            }
            pair.step_with(&steps, &tensors);
        }
        pair.check_state(s);
    }
}

/// Groups of every size and the longest, clipped.
#[test]
fn every_clipped_group() {
    for (group, value_group) in [(16, 16), (64, 80), (128, 32)] {
        let format = |bits| TensorFormat::new(bits).with_clipping();
        let config = config(80).with_group_size(group).with_value_group_size(value_group);
        check(config.clone().with_formats(format(Bits::Two), format(Bits::Three)), Dtype::F32);
        check(config.with_formats(format(Bits::Four), TensorFormat::new(Bits::Eight)), Dtype::F16);
    }
    // The longest: 512 channels.
    let format = TensorFormat::new(Bits::Two).with_clipping();
    let config = config(512).with_value_group_size(512);
    check(config.clone().with_formats(format, format), Dtype::F32);
    check(config.with_formats(format, format.with_rotation()), Dtype::F32);
}

/// Both axes of both tensors, every width, with compact parameters or not.
#[test]
fn every_axis_and_compact_parameters() {
    for (i, bits) in Bits::QUANTIZED.iter().copied().enumerate() {
        for (j, (keys, values)) in AXES.into_iter().enumerate() {
            let format = |axis, compact| {
                let format = TensorFormat::new(bits).with_axis(axis);
                if compact { format.with_compact_parameters() } else { format }
            };
            let group = [16, 32, 64, 128][(i + j) % 4];
            for compact in [false, true] {
                let config = config([80, 128][j % 2]).with_group_size(group);
                check(config.with_formats(format(keys, compact), format(values, compact)), Dtype::F32);
            }
        }
    }
}

#[test]
fn difficult_values_with_compact_parameters() {
    for &window in Dtype::ALL {
        for (bits, (keys, values)) in Bits::QUANTIZED.iter().copied().zip(AXES) {
            let compact = |axis| TensorFormat::new(bits).with_axis(axis).with_compact_parameters();
            let config = config(96).with_window_format(window);
            check_difficult(&config.clone().with_formats(compact(keys), compact(values)));
            let clipped = |axis| compact(axis).with_clipping();
            check_difficult(&config.with_formats(clipped(keys), clipped(values)));
        }
        let rotated = TensorFormat::new(Bits::Two).with_compact_parameters().with_rotation().with_clipping();
        check_difficult(
            &config(64).with_window_format(window).with_formats(TensorFormat::new(Bits::Two), rotated),
        );
    }
}
