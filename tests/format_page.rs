//! `docs/format.md` is complete: a packer that was written from it alone writes the library's files, byte for
//! byte.

mod python;

use kivi_wgpu::oracle::{CpuCache, LayerInput};
use kivi_wgpu::{Axis, Bits, CacheConfig, Dtype, LayerFormat, SequenceStep, TensorFormat, ZeroPoint};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype as FileDtype, TensorView};
use serde_json::Value;
use std::collections::HashMap;
use std::path::Path;

/// Layers of a file.
const LAYERS: usize = 8;
const HEADS: usize = 2;

/// Every format of a tensor that a cache takes.
fn formats() -> Vec<TensorFormat> {
    let mut formats = Vec::new();
    for &bits in Bits::ALL {
        for choice in 0..32 {
            let is = |bit: u32| choice >> bit & 1 == 1;
            let axis = if is(0) { Axis::PerToken } else { Axis::PerChannel };
            let zero_point = if is(1) { ZeroPoint::Rounded } else { ZeroPoint::Min };
            let mut format = TensorFormat::new(bits).with_axis(axis).with_zero_point(zero_point);
            (format.compact, format.clipping, format.rotated) = (is(2), is(3), is(4));
            let config = CacheConfig::new(1, 1, 1, 64).with_formats(format, format);
            if CpuCache::new(&config).is_ok() {
                formats.push(format);
            }
        }
    }
    formats
}

/// Elements that are hard to pack, `[token][head][channel]`.
fn tokens(count: usize, head_dim: usize, seed: u32) -> Vec<f32> {
    let mut state = seed;
    let mut noise = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / 8_388_608.0 - 1.0
    };
    (0..count * HEADS * head_dim)
        .map(|i| {
            let (token, head, channel) = (i / head_dim / HEADS, i / head_dim % HEADS, i % head_dim);
            let noise = noise();
            // Tokens of nothing but one size, among others, in some blocks.
            let size = match token % 11 {
                7 if token / 64 % 2 == 1 => 1e-38,
                9 if token / 64 % 2 == 1 => 1e5,
                _ => 1.0,
            };
            size * match (channel + 5 * head) % 16 {
                0 => (token % 7) as f32 * 0.5 - 1.0,
                1 => -noise * noise * noise * 30.0,
                // 63 units of a compact minimum.
                2 => 1010.0 + 0.02 * noise,
                3 => 131_008.0 * noise,
                4 => -37.25,
                5 => 1e-4 * noise,
                6 => 1e-30 * noise,
                7 => 1e20 * noise,
                8 if token % 5 == 0 => f32::NAN,
                8 if token % 5 == 1 => f32::INFINITY,
                8 => f32::from_bits(token as u32 + 1),
                9 => -60_000.0 + 100.0 * noise,
                10 => -0.0,
                11 if token % 9 == 0 => f32::NEG_INFINITY,
                12 => (noise * 64.0).round() / 64.0 + 3.0,
                13 => 6.2e-5 * noise,
                _ => noise,
            }
        })
        .collect()
}

/// What a packer is told: the header without what follows from the tokens.
fn description(file: &[u8]) -> String {
    let (_, metadata) = SafeTensors::read_metadata(file).unwrap();
    let header = &metadata.metadata().as_ref().unwrap()["kivi_wgpu"];
    let mut header: Value = serde_json::from_str(header).unwrap();
    let fields = header.as_object_mut().unwrap();
    for derived in ["version", "tokens", "checksum"] {
        fields.remove(derived).unwrap();
    }
    for format in fields["formats"].as_array_mut().unwrap() {
        for derived in ["blocks", "evicted"] {
            format.as_object_mut().unwrap().remove(derived).unwrap();
        }
    }
    header.to_string()
}

/// Whether the packer writes what the library does.
fn check(name: &str, config: &CacheConfig, head_dim: usize, count: usize) {
    let data: Vec<[Vec<f32>; 2]> = (0..LAYERS as u32)
        .map(|layer| [2 * layer + 1, 2 * layer + 2].map(|n| tokens(count, head_dim, n)))
        .collect();
    let mut cache = CpuCache::new(config).unwrap();
    let id = cache.create_sequence().unwrap();
    let row = HEADS * head_dim;
    for first in (0..count).step_by(100) {
        let rows = first * row..(first + 100).min(count) * row;
        let inputs: Vec<LayerInput> = data
            .iter()
            .map(|[k, v]| LayerInput { k: &k[rows.clone()], v: &v[rows.clone()], ..Default::default() })
            .collect();
        let step = SequenceStep::append(id, (rows.len() / row) as u32);
        cache.step(&[step], &inputs).unwrap();
    }
    let expected = cache.save(id).unwrap().to_bytes().unwrap();

    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (input, output) = (folder.join(format!("{name}.tokens")), folder.join(format!("{name}.packed")));
    let bytes: Vec<(String, Vec<u8>)> = data
        .iter()
        .enumerate()
        .flat_map(|(layer, pair)| {
            ["keys", "values"].into_iter().zip(pair).map(move |(tensor, x)| {
                (format!("layers.{layer}.{tensor}"), x.iter().flat_map(|x| x.to_le_bytes()).collect())
            })
        })
        .collect();
    let view = |bytes| TensorView::new(FileDtype::F32, vec![count, HEADS, head_dim], bytes).unwrap();
    let views = bytes.iter().map(|(name, bytes)| (name, view(bytes)));
    let metadata = HashMap::from([("description".to_string(), description(&expected))]);
    std::fs::write(&input, safetensors::serialize(views, Some(metadata)).unwrap()).unwrap();

    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/pack_from_the_page.py");
    let run = python::with("numpy").unwrap().arg(script).arg(&input).arg(&output).output().unwrap();
    assert!(run.status.success(), "{name}: {}", String::from_utf8_lossy(&run.stderr));
    let packed = std::fs::read(&output).unwrap();
    if packed == expected {
        return;
    }
    // Where the files are apart.
    let [ours, theirs] = [&expected, &packed].map(|file| SafeTensors::deserialize(file).unwrap());
    for (tensor, view) in ours.iter() {
        let other = theirs.tensor(tensor).unwrap();
        assert_eq!((view.dtype(), view.shape()), (other.dtype(), other.shape()), "{name}: {tensor}");
        if let Some(at) = view.data().iter().zip(other.data()).position(|(a, b)| a != b) {
            let layer: u32 = tensor.split('.').nth(1).unwrap().parse().unwrap();
            let format = cache.shape_of(layer).map(|g| (g.layout, g.window_format));
            panic!("{name}: byte {at} of {tensor} {:?} is another: {format:?}", view.shape());
        }
    }
    let text = |file: &[u8]| {
        let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
        String::from_utf8_lossy(&file[8..8 + length]).into_owned()
    };
    assert_eq!(text(&packed), text(&expected), "{name}");
    panic!("{name}: the same parts make another file");
}

/// Every format of keys and of values, each with groups, windows, sinks and limits of several sizes.
#[test]
fn a_packer_written_from_the_page_writes_the_same_files() {
    if python::with("numpy").is_none() {
        python::skipped("a_packer_written_from_the_page_writes_the_same_files", "numpy");
        return;
    }
    let formats = formats();
    assert!(formats.len() > 80, "{}", formats.len());
    let windows = [Dtype::F16, Dtype::Bf16, Dtype::F32];
    for (file, keys) in formats.chunks(LAYERS).enumerate() {
        let head_dim = [24, 40, 64, 80, 128][file % 5];
        let mut config = CacheConfig::new(LAYERS as u32, HEADS as u32, HEADS as u32, head_dim)
            .with_window_format(windows[file % 3])
            .with_capacity(500);
        for layer in 0..LAYERS {
            let n = file * LAYERS + layer;
            let mut format = LayerFormat::default();
            format.keys = keys[layer % keys.len()];
            // Another one, and each in its turn.
            format.values = formats[(7 * n + 3) % formats.len()];
            format.group_size = [32, 16, 64, 128][n % 4];
            format.value_group_size = Some([16, 32, head_dim][n / 4 % 3].min(head_dim));
            format.residual_window = [0, 5, 32, 129][n / 2 % 4];
            format.sink_tokens = [0, 3, 1][n % 3];
            format.history_limit = [None, None, Some(200)][n % 3];
            config = config.with_layer_format([layer as u32], format);
        }
        check(&format!("page_{file}"), &config, head_dim as usize, [333, 1, 150, 420][file % 4]);
    }
    // A file of nothing.
    check("page_empty", &CacheConfig::new(LAYERS as u32, HEADS as u32, HEADS as u32, 64), 64, 0);
}
