//! The oracle against keys, values and queries of real models.
//!
//! `exact.*` in the files comes from an independent implementation of the block format's quantizer in numpy
//! with float64 attention; `out.*` and `relative_error` from one with textbook rounding.

#[path = "../examples/support/real_data.rs"]
mod real_data;

use kivi_wgpu::oracle::{CpuCache, LayerInput};
use kivi_wgpu::{Axis, Bits, CacheConfig, Preset, SequenceStep, Shape, TensorFormat, ZeroPoint};
use real_data::{RealData, relative_error};
use std::path::PathBuf;

struct Variant {
    name: &'static str,
    config: fn(CacheConfig) -> CacheConfig,
}

/// Keys per token as most caches have them, and no window.
fn per_token(config: CacheConfig, bits: Bits) -> CacheConfig {
    let format = TensorFormat::new(bits);
    config.with_formats(format.with_axis(Axis::PerToken), format).with_residual_window(0)
}

const VARIANTS: [Variant; 10] = [
    Variant { name: "token2_g32_w0", config: |c| per_token(c, Bits::Two) },
    Variant { name: "token4_g32_w0", config: |c| per_token(c, Bits::Four) },
    Variant { name: "token8_g32_w0", config: |c| per_token(c, Bits::Eight) },
    Variant { name: "kivi2_g32_w128", config: |c| c },
    Variant { name: "kivi2_g32_w32", config: |c| c.with_residual_window(32) },
    Variant { name: "kivi2_g64_w128", config: |c| c.with_group_size(64) },
    Variant { name: "kivi4_g32_w128", config: |c| c.with_bits(Bits::Four, Bits::Four) },
    Variant { name: "k4v2_g32_w128", config: |c| c.with_bits(Bits::Four, Bits::Two) },
    Variant { name: "kivi2_g32_w128_sink4", config: |c| c.with_sink_tokens(4) },
    Variant { name: "kivi2_g32_w128_roundzero", config: |c| c.with_zero_point(ZeroPoint::Rounded) },
];

/// The number stored for `variant` in a flat JSON object.
fn stored_number(json: &str, variant: &str) -> Option<f64> {
    let rest = json.split_once(&format!("\"{variant}\": "))?.1;
    rest.split([',', '}']).next()?.trim().parse().ok()
}

fn run(data: &RealData, config: &CacheConfig) -> Vec<f32> {
    let mut cache = CpuCache::new(config).unwrap();
    let sequence = cache.create_sequence().unwrap();
    let (row, query_row) = (data.token_len(), data.query_heads * data.head_dim);
    let prompt = data.tokens - data.queries;
    let mut done = 0;
    let mut out = Vec::new();
    while done < data.tokens {
        let n = if done < prompt { 300.min(prompt - done) } else { data.queries };
        let queries = if done < prompt { 0 } else { data.queries };
        let range = done * row..(done + n) * row;
        let input = LayerInput {
            k: &data.k[range.clone()],
            v: &data.v[range],
            q: &data.q[..queries * query_row],
            ..Default::default()
        };
        let step = SequenceStep::new(sequence, n as u32, queries as u32);
        out = cache.step(&[step], &[input]).unwrap().1.remove(0).out;
        done += n;
    }
    out.into_iter().map(|x| x as f32).collect()
}

/// The presets cost the bits in their names, and have the errors that their documentation says.
#[test]
fn presets_are_as_documented() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    let files = ["qwen05b_L00", "qwen05b_L23", "smollm2_L00", "smollm2_L29"];
    for &preset in Preset::ALL {
        let (bits, documented) = match preset {
            Preset::Kivi2 => (3.0, [0.288, 0.307, 0.186, 0.132]),
            Preset::Kivi4 => (5.0, [0.062, 0.045, 0.026, 0.029]),
            Preset::Bits3 => (3.0, [0.115, 0.106, 0.065, 0.027]),
            Preset::Bits2_75 => (2.75, [0.117, 0.102, 0.064, 0.027]),
            Preset::Bits2_25 => (2.25, [0.166, 0.145, 0.071, 0.034]),
            Preset::Bits4_5 => (4.5, [0.052, 0.032, 0.014, 0.006]),
            other => panic!("{other:?} is documented nowhere"),
        };
        for (file, documented) in files.iter().zip(documented) {
            let data = RealData::load(&folder.join(format!("{file}.safetensors"))).unwrap();
            let base =
                CacheConfig::new(1, data.query_heads as u32, data.kv_heads as u32, data.head_dim as u32);
            let config = base.with_preset(preset);
            assert_eq!(Shape::new(&config).unwrap().layout.format_bits(), bits, "{preset:?}");
            let error = relative_error(&run(&data, &config), data.output("out.exact").unwrap());
            assert!((error - documented).abs() <= 0.0006, "{preset:?} on {file}: {error:.4}");
            if preset == Preset::Bits3 {
                let kivi = stored_number(data.metadata("relative_error_exact"), "kivi2_g32_w128").unwrap();
                assert!(error <= 0.55 * kivi, "{file}: {error:.4}, KIVI at the same size {kivi:.4}");
            }
        }
    }
}

#[test]
fn real_data_outputs_match_independent_references() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    let mut checked = 0;
    for file in ["qwen05b_L00", "qwen05b_L23", "smollm2_L00", "smollm2_L29"] {
        let data = RealData::load(&folder.join(format!("{file}.safetensors"))).unwrap();
        let base = CacheConfig::new(1, data.query_heads as u32, data.kv_heads as u32, data.head_dim as u32);
        let exact = data.output("out.exact").unwrap();
        for variant in &VARIANTS {
            let out = run(&data, &(variant.config)(base.clone()));
            if let Some(reference) = data.output(&format!("exact.{}", variant.name)) {
                let error = relative_error(&out, reference);
                assert!(error < 1e-5, "{file} {}: {error:e} from exact.*", variant.name);
                checked += 1;
            }
            let textbook = stored_number(data.metadata("relative_error"), variant.name).unwrap();
            let ours = relative_error(&out, exact);
            assert!(
                (ours / textbook - 1.0).abs() < 0.1,
                "{file} {}: error {ours:.5}, textbook {textbook:.5}",
                variant.name
            );
        }
    }
    assert_eq!(checked, 36, "every variant but the rounded zero point has an exact reference");
}
