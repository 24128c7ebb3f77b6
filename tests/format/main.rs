//! The block format and its quantizer: exact rules against independent arithmetic, and the stated error
//! bounds.

mod layout;

use half::{bf16, f16};
use kivi_wgpu::format::{
    Param, bf16_to_f32, code, dequantize, enter, f16_to_f32, floor_to_f16, order_key, param, rotate,
    rotation_scale, rotation_size, round_to, unrotate, unrotate_exactly, widen,
};
use kivi_wgpu::{Bits, Dtype, TensorFormat, ZeroPoint};
use proptest::prelude::*;

/// Values of a group after they have entered a cache, and how the quantizer stores them.
fn quantize(bits: Bits, rule: ZeroPoint, window: Dtype, group: &[f32]) -> (Vec<f32>, Param, Vec<u32>) {
    let x: Vec<f32> = group.iter().map(|&x| widen(enter(x, window), window)).collect();
    let min = x.iter().copied().fold(f32::INFINITY, f32::min);
    let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let p = param(bits, rule, min, max);
    let codes = x.iter().map(|&x| code(bits, p, x)).collect();
    (x, p, codes)
}

fn ulp32(x: f32) -> f64 {
    let x = x.abs().max(f32::MIN_POSITIVE);
    f64::from(f32::from_bits(x.to_bits() + 1)) - f64::from(x)
}

fn ulp16(x: f32) -> f64 {
    2f64.powi((f64::from(x.abs()).max(2f64.powi(-14))).log2().floor() as i32 - 10)
}

/// Checks every promise about a group.
fn check_group(bits: Bits, rule: ZeroPoint, window: Dtype, group: &[f32]) {
    let (x, p, codes) = quantize(bits, rule, window, group);
    let (scale, min) = (p.scale(), p.min());
    let (scale16, stored16) = (p.word() as u16, (p.word() >> 16) as u16);
    assert_eq!((f16_to_f32(scale16), f16_to_f32(stored16)), (scale, min));
    for h in [scale16, stored16] {
        assert!(f16::from_bits(h).is_normal() || h == 0, "stored {h:#x} is not storable");
    }
    let smallest = x.iter().copied().fold(f32::INFINITY, f32::min);
    let largest = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let min16 = f16_to_f32(floor_to_f16(smallest));
    // Codes only grow with the value.
    for (a, ca) in x.iter().zip(&codes) {
        assert!(*ca <= bits.max_code());
        for (b, cb) in x.iter().zip(&codes) {
            assert!(a > b || ca <= cb);
        }
    }
    // The scale is the smallest storable one that covers the range.
    let range = largest - min16;
    let levels = f64::from(bits.max_code());
    if range == 0.0 {
        assert_eq!((scale16, min), (0, min16));
    } else {
        assert!(levels * f64::from(scale) >= f64::from(range));
        if scale16 > 0x0400 {
            assert!(levels * f64::from(f16_to_f32(scale16 - 1)) < f64::from(range));
        }
    }
    for (&x, &c) in x.iter().zip(&codes) {
        let y = dequantize(p, c);
        assert!(y.is_finite());
        // The definition: thresholds strictly below x.
        let below = (1..=bits.max_code()).filter(|&i| min + (i as f32 - 0.5) * scale < x).count();
        assert_eq!(below as u32, c);
        let error = (f64::from(x) - f64::from(y)).abs();
        let bound = match rule {
            ZeroPoint::Min => f64::from(scale) / 2.0 + ulp32(x.abs().max(y.abs())),
            ZeroPoint::Rounded => f64::from(scale) / 2.0 + ulp16(min) + ulp32(x.abs().max(y.abs())),
        };
        assert!(error <= bound, "{x} became {y} (scale {scale}, min {min}): error {error}, bound {bound}");
    }
    if rule == ZeroPoint::Rounded && scale > 0.0 {
        assert_eq!(stored16, textbook_min(min16, scale).unwrap_or(floor_to_f16(smallest)));
    }
}

/// The rounded zero point in integers: f16 values are whole numbers of 2⁻²⁴.
fn textbook_min(min16: f32, scale: f32) -> Option<u16> {
    let whole = |x: f32| (f64::from(x) * 2f64.powi(24)) as i64;
    let (m, s) = (-whole(min16), whole(scale));
    let z = (2 * m + s).div_euclid(2 * s);
    let stored = -(z as f64) * f64::from(scale);
    if z.abs() > 4095 || stored < -65504.0 {
        return None;
    }
    Some(if z == 0 { 0 } else { floor_to_f16(stored as f32) })
}

fn every_rule(mut check: impl FnMut(Bits, ZeroPoint, Dtype)) {
    for &bits in Bits::QUANTIZED {
        for rule in [ZeroPoint::Min, ZeroPoint::Rounded] {
            for &window in Dtype::ALL {
                check(bits, rule, window);
            }
        }
    }
}

fn group_strategy() -> impl Strategy<Value = Vec<f32>> {
    let noise = || prop::collection::vec(-1.0f32..1.0, 1..129);
    prop_oneof![
        prop::collection::vec(any::<f32>(), 1..129),
        (noise(), -1e5f32..1e5, -14i32..18)
            .prop_map(|(x, offset, e)| { x.into_iter().map(|x| offset + x * 2f32.powi(e)).collect() }),
        (noise(), -100i32..17).prop_map(|(x, e)| x.into_iter().map(|x| x * 2f32.powi(e)).collect()),
        prop::collection::vec((-64i32..64).prop_map(|i| i as f32 / 8.0), 1..129),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn groups_keep_every_promise(group in group_strategy(), bits in 0usize..4, rounded: bool, window in 0usize..3) {
        let rule = if rounded { ZeroPoint::Rounded } else { ZeroPoint::Min };
        check_group(Bits::QUANTIZED[bits], rule, Dtype::ALL[window], &group);
    }

    #[test]
    fn compact_parameters_keep_every_promise(group in group_strategy(), bits in 0usize..4, window in 0usize..3) {
        check_compact(Bits::QUANTIZED[bits], Dtype::ALL[window], &group);
    }

    #[test]
    fn order_keys_order(a: f32, b: f32) {
        prop_assume!(!a.is_nan() && !b.is_nan() && a.to_bits() != 0x8000_0000 && b.to_bits() != 0x8000_0000);
        prop_assert_eq!(a < b, order_key(a) < order_key(b));
    }

    #[test]
    fn entry_matches_its_definition(bits: u32) {
        check_entry(f32::from_bits(bits));
    }

    #[test]
    fn outputs_round_as_ieee(bits: u32) {
        let x = f32::from_bits(bits);
        prop_assume!(!x.is_nan());
        prop_assert_eq!(round_to(x, Dtype::F16), u32::from(f16::from_f32(x).to_bits()));
        prop_assert_eq!(round_to(x, Dtype::Bf16), u32::from(bf16::from_f32(x).to_bits()));
    }

    #[test]
    fn lines_round_trip(codes in prop::collection::vec(0u32..256, 1..513), bits in 0usize..4) {
        let bits = Bits::QUANTIZED[bits];
        let length = codes.len() as u32;
        let mut line = vec![0u32; bits.line_words(length) as usize];
        let codes: Vec<u32> = codes.into_iter().map(|c| c & bits.max_code()).collect();
        for (j, code) in codes.iter().enumerate() {
            for part in bits.parts(length, j as u32) {
                line[part.word as usize] |= ((code >> part.code_shift) & ((1 << part.width) - 1)) << part.shift;
            }
        }
        let mut used = vec![0u32; line.len()];
        for (j, code) in codes.iter().enumerate() {
            let read: u32 = bits.parts(length, j as u32).map(|part| {
                ((line[part.word as usize] >> part.shift) & ((1 << part.width) - 1)) << part.code_shift
            }).sum();
            prop_assert_eq!(read, *code);
            // Code j of a word is in byte j mod 4, p·(j / 4) bits from its end. Three bits are the two low
            // ones, then the high one: that of code j of a pair of words is where the low ones are, and a
            // bit further in the second.
            let (j, per_word) = (j as u32, if bits == Bits::Three { 16 } else { 32 / bits.get() });
            let width = 32 / per_word;
            let at = 8 * (j % 4) + width * (j % per_word / 4);
            let mut field = |word: u32, at: u32, width: u32| {
                used[word as usize] |= ((1 << width) - 1) << at;
                (line[word as usize] >> at) & ((1 << width) - 1)
            };
            let mut packed = field(j / per_word, at, width);
            if bits == Bits::Three {
                packed |= field(length.div_ceil(16) + j / 32, at + j % 32 / 16, 1) << 2;
            }
            prop_assert_eq!(packed, *code);
        }
        for (word, used) in line.iter().zip(used) {
            prop_assert_eq!(word & !used, 0, "unused bits are zero");
        }
    }
}

fn check_entry(x: f32) {
    for &window in Dtype::ALL {
        let (largest, smallest) = match window {
            Dtype::F32 => (65504.0, f32::MIN_POSITIVE),
            Dtype::F16 => (65504.0, 2f32.powi(-14)),
            Dtype::Bf16 => (65280.0, f32::MIN_POSITIVE),
        };
        let expected = if x.is_nan() || x.abs() < smallest {
            0.0
        } else {
            let x = x.clamp(-largest, largest);
            match window {
                Dtype::F32 => x,
                Dtype::F16 => f16::from_f32(x).to_f32(),
                Dtype::Bf16 => bf16::from_f32(x).to_f32(),
            }
        };
        assert_eq!(widen(enter(x, window), window).to_bits(), expected.to_bits(), "{x:e} as {window:?}");
    }
}

#[test]
fn entry_of_special_values() {
    for x in
        [0.0, -0.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 65504.0, 65519.9, 65520.0, 65280.0, 65281.0]
    {
        check_entry(x);
        check_entry(-x);
    }
    for bits in [
        1,
        0x007f_ffff,
        0x0080_0000,
        0x387f_ffff,
        0x3880_0000,
        0x3880_1000,
        0x3880_3000,
        0x477f_e000,
        0x477f_f000,
    ] {
        check_entry(f32::from_bits(bits));
        check_entry(f32::from_bits(bits | 0x8000_0000));
    }
}

#[test]
fn sixteen_bit_floats_widen_exactly() {
    for h in 0..=u16::MAX {
        let (ours, theirs) = (f16_to_f32(h), f16::from_bits(h).to_f32());
        assert!(ours.to_bits() == theirs.to_bits() || (ours.is_nan() && theirs.is_nan()), "{h:#x}");
        assert_eq!(bf16_to_f32(h).to_bits(), u32::from(h) << 16);
    }
}

#[test]
fn the_stored_minimum_is_the_largest_storable_below() {
    let storable = |h: u16| h == 0 || f16::from_bits(h).is_normal();
    let mut all: Vec<f32> = (0..=u16::MAX).filter(|&h| storable(h)).map(f16_to_f32).collect();
    all.sort_by(f32::total_cmp);
    let mut state = 1u32;
    for _ in 0..200_000 {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let x = widen(enter(f32::from_bits(state), Dtype::F32), Dtype::F32);
        let below = all.partition_point(|&y| y <= x);
        let expected = all[below - 1];
        assert_eq!(f16_to_f32(floor_to_f16(x)).to_bits(), expected.to_bits(), "{x:e}");
    }
}

#[test]
fn constant_groups_are_exact_up_to_f16() {
    every_rule(|bits, rule, window| {
        for c in [9.0, -9.0, 0.0, -0.0, 0.01, 100.0, -65504.0, 65504.0, 1e-30, -1e-30] {
            for n in [1, 32] {
                let group = vec![c; n];
                check_group(bits, rule, window, &group);
                let (x, p, codes) = quantize(bits, rule, window, &group);
                let y = dequantize(p, codes[0]);
                // Rounding the zero point moves a constant that is no f16 to the nearest of its levels.
                let zero = if rule == ZeroPoint::Rounded { f64::from(p.scale()) / 2.0 } else { 0.0 };
                let error = (f64::from(x[0]) - f64::from(y)).abs();
                assert!(error <= ulp16(x[0]) + zero, "{} became {y}", x[0]);
            }
        }
    });
}

#[test]
fn difficult_groups() {
    let mut normal = normals(3);
    every_rule(|bits, rule, window| {
        let offset: Vec<f32> = (0..32).map(|_| 1000.0 + 0.01 * normal()).collect();
        check_group(bits, rule, window, &offset);
        let full: Vec<f32> = (0..32).map(|i| -65504.0 + 131_008.0 * i as f32 / 31.0).collect();
        check_group(bits, rule, window, &full);
        let wide: Vec<f32> = (0..32).map(|i| -60_000.0 + 120_000.0 * i as f32 / 31.0).collect();
        check_group(bits, rule, window, &wide);
        for exponent in -30..=5 {
            let range = 10f32.powi(exponent);
            for shift in [-1.0, -0.5, 0.0] {
                let group: Vec<f32> = (0..32).map(|i| range * (shift + i as f32 / 31.0)).collect();
                check_group(bits, rule, window, &group);
            }
        }
        let strange =
            [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1.0, -0.0, f32::from_bits(1), -f32::from_bits(7)];
        check_group(bits, rule, window, &strange);
        check_group(bits, rule, window, &[f32::NAN; 32]);
    });
}

/// Standard normal numbers (SplitMix64, Box–Muller).
fn normals(mut seed: u64) -> impl FnMut() -> f32 {
    let mut unit = move || {
        seed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = seed;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (((z ^ (z >> 31)) >> 11) + 1) as f64 / (1u64 << 53) as f64
    };
    move || ((-2.0 * unit().ln()).sqrt() * (std::f64::consts::TAU * unit()).cos()) as f32
}

#[test]
fn error_on_gaussian_groups() {
    let mut normal = normals(11);
    for (bits, expected, tolerance) in [(Bits::Two, 0.154, 0.002), (Bits::Four, 0.0061, 0.0002)] {
        let (mut error, mut energy) = (0.0, 0.0);
        for _ in 0..20_000 {
            let group: Vec<f32> = (0..32).map(|_| normal()).collect();
            let (x, p, codes) = quantize(bits, ZeroPoint::Min, Dtype::F16, &group);
            for (&x, &c) in x.iter().zip(&codes) {
                error += (f64::from(x) - f64::from(dequantize(p, c))).powi(2);
                energy += f64::from(x).powi(2);
            }
        }
        let relative = error / energy;
        assert!((relative - expected).abs() <= tolerance, "{bits:?}: relative MSE {relative}");
    }
}

/// Clipping makes the squared error smaller, never larger (but for what its integers round), and leaves what
/// has no range alone.
#[test]
fn clipping_lowers_the_squared_error() {
    let mut normal = normals(12);
    for (bits, expected) in [(Bits::Two, 0.0886), (Bits::Three, 0.0222), (Bits::Four, 0.00534)] {
        let (mut plain, mut clipped, mut energy) = (0.0, 0.0, 0.0);
        for n in 0..5_000 {
            // Of any size, far from zero or not.
            let (scale, offset) = (2f32.powi(n % 23 - 11), if n % 3 == 0 { 3.0 } else { 0.0 });
            let group: Vec<f32> = (0..32).map(|_| (normal() + offset) * scale).collect();
            let x: Vec<f32> = group.iter().map(|&x| widen(enter(x, Dtype::F16), Dtype::F16)).collect();
            let error =
                |p| x.iter().map(|&x| f64::from(x - dequantize(p, code(bits, p, x))).powi(2)).sum::<f64>();
            let format = TensorFormat::new(bits);
            let (before, after) = (error(format.fit(&x)), error(format.with_clipping().fit(&x)));
            assert!(after <= 1.01 * before, "{before:e} {after:e}");
            let unit = f64::from(scale).powi(2);
            (plain, clipped, energy) = (plain + before / unit, clipped + after / unit, energy + 32.0);
        }
        assert!(
            (clipped / energy - expected).abs() < 0.03 * expected,
            "{bits:?}: {} {}",
            clipped / energy,
            plain / energy
        );
    }
    // Against a plain search in f64 over the same pairs of ends: the pair chosen is among the best but for
    // what integers round.
    for n in 0..300 {
        let (scale, offset) = (2f32.powi(n % 19 - 9), if n % 2 == 0 { 2.0 } else { 0.0 });
        let x: Vec<f32> =
            (0..64).map(|_| widen(enter((normal() + offset) * scale, Dtype::F16), Dtype::F16)).collect();
        let (min, max) = x.iter().fold((f32::MAX, f32::MIN), |(a, b), &x| (a.min(x), b.max(x)));
        let error =
            |p| x.iter().map(|&x| f64::from(x - dequantize(p, code(Bits::Two, p, x))).powi(2)).sum::<f64>();
        let step = (max - min) * 5.0 / 128.0;
        let best = (0..36)
            .map(|c| {
                error(param(
                    Bits::Two,
                    ZeroPoint::Min,
                    min + (c / 6) as f32 * step,
                    max - (c % 6) as f32 * step,
                ))
            })
            .fold(f64::INFINITY, f64::min);
        let chosen = error(TensorFormat::new(Bits::Two).with_clipping().fit(&x));
        assert!((chosen / best - 1.0).abs() < 0.02, "{n}: {chosen:e}, {best:e}");
    }
    for constant in [0.0, 3.0, -65504.0, 1e-30] {
        let group = [widen(enter(constant, Dtype::F32), Dtype::F32); 20];
        let format = TensorFormat::new(Bits::Two);
        assert_eq!(format.fit(&group), format.with_clipping().fit(&group));
    }
}

/// Clipped parameters by the rule as it is written down, for groups of every range from none to the largest:
/// the first of the smallest sums of squared errors, in integers, over all pairs of ends. Every pair wins
/// somewhere.
#[test]
fn clipping_follows_its_rule_at_every_range() {
    let mut normal = normals(14);
    let mut winners = std::collections::BTreeSet::new();
    for n in 0..6_000 {
        let exponent = n % 84 - 68;
        let scale = 2f32.powi(exponent);
        // Tails of different lengths on both sides.
        let (below, above) = ((n / 84 % 7) as f32 / 4.0, (n / 588 % 7) as f32 / 4.0);
        let x: Vec<f32> = (0..32)
            .map(|_| {
                let x = normal();
                let stretched = if x < 0.0 { x * (1.0 - x * below) } else { x * (1.0 + x * above) };
                widen(enter(stretched * scale, Dtype::F32), Dtype::F32)
            })
            .collect();
        let bits = [Bits::Two, Bits::Three, Bits::Four][n as usize % 3];
        let format = TensorFormat::new(bits);
        let (min, max) = x.iter().fold((f32::MAX, f32::MIN), |(a, b), &x| (a.min(x), b.max(x)));
        let range = max - min;
        // Below 2^-60 the ends stay.
        let steps = if range < 2f32.powi(-60) { 1 } else { 6 };
        let coarse = f32::from_bits(range.to_bits() & 0xffff_0000) * (5.0 / 128.0);
        let unit = 2f64.powi(12 - range.log2().floor() as i32);
        let pairs = (0..steps).flat_map(|i| (0..steps).map(move |j| (i, j)));
        let tried = pairs.map(|(i, j)| {
            let p = format.fit(&[min + i as f32 * coarse, max - j as f32 * coarse]);
            let errors = x.iter().map(|&x| {
                let above = (f64::from(x - p.min()) * unit).clamp(-1_048_576.0, 1_048_576.0) as i64;
                let level = (f64::from(code(bits, p, x) as f32 * p.scale()) * unit).min(1_048_576.0) as i64;
                (above - level).abs().min(2047).pow(2)
            });
            (errors.sum::<i64>(), (i, j), p)
        });
        let (_, pair, expected) = tried.min_by_key(|(error, ..)| *error).unwrap();
        assert_eq!(format.with_clipping().fit(&x), expected, "{n}: 2^{exponent}, {pair:?}");
        winners.insert(pair);
    }
    assert_eq!(winners.len(), 36, "{winners:?}");
}

/// The rotation against its definition, and back.
#[test]
fn rotations_are_hadamard_transforms_with_an_inverse() {
    let mut normal = normals(13);
    for head_dim in [8usize, 24, 64, 80, 96, 128, 512] {
        let size = rotation_size(head_dim as u32) as usize;
        assert!(size >= 8 && head_dim.is_multiple_of(size) && size.is_power_of_two());
        let row: Vec<f32> = (0..head_dim).map(|_| normal()).collect();
        let mut rotated = row.clone();
        rotate(&mut rotated);
        for (i, got) in rotated.iter().enumerate() {
            let first = i / size * size;
            let sign = |j: usize| if (i & j).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
            let sum: f64 = (0..size).map(|j| sign(j) * f64::from(row[first + j])).sum();
            let expected = sum * f64::from(rotation_scale(head_dim as u32));
            assert!((f64::from(*got) - expected).abs() < 1e-4, "{head_dim}, {i}: {got} {expected}");
        }
        let mut back = rotated.clone();
        unrotate(&mut back);
        let mut exact: Vec<f64> = rotated.iter().map(|x| f64::from(*x)).collect();
        unrotate_exactly(&mut exact);
        for ((x, back), exact) in row.iter().zip(&back).zip(&exact) {
            assert!((x - back).abs() < 1e-5 && (f64::from(*x) - exact).abs() < 1e-5);
        }
        // Integers stay integers: no rounding at all.
        let mut whole: Vec<f32> = (0..head_dim).map(|i| (i % 7) as f32 - 3.0).collect();
        let before = whole.clone();
        rotate(&mut whole);
        unrotate(&mut whole);
        assert_eq!(whole, before);
    }
    // What is too large is clamped like everything that enters.
    let mut large = [65504.0; 64];
    rotate(&mut large);
    assert_eq!((large[0], large[1]), (65504.0, 0.0));
}

/// Compact parameters, by their definition in f64.
fn check_compact(bits: Bits, window: Dtype, group: &[f32]) {
    let x: Vec<f32> = group.iter().map(|&x| widen(enter(x, window), window)).collect();
    let format = TensorFormat::new(bits).with_compact_parameters();
    let p = format.fit(&x);
    let smallest = x.iter().copied().fold(f32::INFINITY, f32::min);
    let largest = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    assert_eq!(p, Param::from_compact(p.word() as u16));
    let levels = i64::from(bits.max_code());
    // The definition: the first scale that reaches as far as the range, and from a whole number of its
    // quarters, or of four of it, to the largest value.
    let scale_of = |code: u32| f64::from(f16_to_f32((code << 7) as u16));
    let (low, high) = (f64::from(smallest), f64::from(largest));
    let candidates = (8..=0xf7u32).flat_map(|code| [(code, 0u32, 0.25), (code, 1, 4.0)]);
    let expected = candidates.map(|(code, coarse, unit)| (code, coarse, unit * scale_of(code))).find_map(
        |(code, coarse, unit)| {
            let n = (low / unit).floor().min(63.0);
            let levels = levels as f64 * scale_of(code);
            let covers = levels >= f64::from(largest - smallest) && n * unit + levels >= high && n >= -63.0;
            covers.then_some((code | ((n as i32 & 0x7f) as u32) << 8 | coarse << 15, n * unit))
        },
    );
    let zero = smallest == 0.0 && largest == 0.0;
    let (word, expected_min) = if zero { (0, 0.0) } else { expected.unwrap() };
    assert_eq!(p.word(), word, "{smallest} to {largest}, {bits:?}");
    let (scale, min) = (f64::from(p.scale()), f64::from(p.min()));
    assert_eq!((scale, min), (scale_of(word & 0xff), expected_min));
    for x in x {
        let (code, exact) = (code(bits, p, x), f64::from(x));
        let level = f64::from(dequantize(p, code));
        assert_eq!(level, f64::from(code) * scale + min, "levels are exact");
        assert!((exact - level).abs() <= scale / 2.0, "{x} became {level} (scale {scale}, min {min})");
        let below = (1..=bits.max_code()).filter(|&i| min + (f64::from(i) - 0.5) * scale < exact).count();
        assert!(zero || below as u32 == code);
    }
}
