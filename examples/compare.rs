//! Schemes of quantized caches on real keys, values and queries: what they cost and what they lose.
//!
//! For each file of `tests/data` and each scheme: bits per element (in packed form; of what holds the file's
//! tokens, window and sinks included; of all that a cache of 24 layers allocates for 32768 tokens), the error
//! of attention outputs against exact keys and values, and the mean KL divergence of the attention weights
//! from exact ones. Ours run on the oracle and on the GPU, which must agree; those of the engines in common
//! use are computed here. `cargo run --example compare [-- --svg FILE] [FILES]`

#[path = "support/host.rs"]
mod host;
#[path = "support/real_data.rs"]
mod real_data;

use host::Gpu;
use kivi_wgpu::cache_bytes;
use kivi_wgpu::format::{Tensor, enter, unrotate_exactly, widen};
use kivi_wgpu::oracle::{CpuCache, LayerInput};
use kivi_wgpu::{
    Axis, Bits, CacheConfig, Dtype, KvCache, KvCacheOptions, LayerIo, LayerState, Preset, SequenceStep,
    TensorFormat, TensorView, Variant,
};
use plotters::prelude::*;
use real_data::{RealData, relative_error};
use std::path::PathBuf;

type Failure = Box<dyn std::error::Error>;

/// The cache whose resident bits are shown.
const LAYERS: u32 = 24;
const TOKENS: u32 = 32768;

/// How many tokens of a prompt go into a step.
const CHUNK: usize = 300;

/// A scheme and where it stands in the picture.
struct Scheme {
    name: &'static str,
    config: fn(CacheConfig) -> CacheConfig,
}

fn schemes() -> Vec<Scheme> {
    fn two() -> TensorFormat {
        TensorFormat::new(Bits::Two)
    }
    vec![
        Scheme { name: "16 bits", config: |c| c.with_bits(Bits::Sixteen, Bits::Sixteen) },
        Scheme { name: "preset Kivi4", config: |c| c.with_preset(Preset::Kivi4) },
        Scheme { name: "preset Bits4_5", config: |c| c.with_preset(Preset::Bits4_5) },
        Scheme { name: "KIVI, 3 bits", config: |c| c.with_bits(Bits::Three, Bits::Three) },
        Scheme { name: "preset Kivi2", config: |c| c.with_preset(Preset::Kivi2) },
        Scheme { name: "Kivi2, 4 sinks", config: |c| c.with_preset(Preset::Kivi2).with_sink_tokens(4) },
        Scheme {
            name: "Kivi2, 4 sinks, values clipped",
            config: |c| c.with_sink_tokens(4).with_formats(two(), two().with_clipping()),
        },
        Scheme {
            name: "Kivi2, 4 sinks, values rotated and clipped, keys clipped",
            config: |c| {
                c.with_sink_tokens(4)
                    .with_formats(two().with_clipping(), two().with_rotation().with_clipping())
            },
        },
        Scheme { name: "KIVI, keys 4 bits, values 2", config: |c| c.with_bits(Bits::Four, Bits::Two) },
        Scheme { name: "KIVI, keys 2 bits, values 4", config: |c| c.with_bits(Bits::Two, Bits::Four) },
        Scheme { name: "preset Bits3", config: |c| c.with_preset(Preset::Bits3) },
        Scheme { name: "preset Bits2_75", config: |c| c.with_preset(Preset::Bits2_75) },
        Scheme { name: "KIVI, groups of 64", config: |c| c.with_group_size(64) },
        Scheme {
            name: "Kivi2, compact parameters",
            config: |c| c.with_formats(two().with_compact_parameters(), two().with_compact_parameters()),
        },
        Scheme {
            name: "preset Bits3, keys rotated too",
            config: |c| {
                let c = c.with_preset(Preset::Bits3);
                let (keys, values) = (c.format.keys.with_rotation(), c.format.values);
                c.with_formats(keys, values)
            },
        },
        Scheme { name: "preset Bits2_25", config: |c| c.with_preset(Preset::Bits2_25) },
        Scheme {
            name: "16 bits, the last 512 tokens and 4 sinks",
            config: |c| c.with_bits(Bits::Sixteen, Bits::Sixteen).with_sink_tokens(4).with_history_limit(512),
        },
        Scheme {
            name: "16 bits, the last 256 tokens and 4 sinks",
            config: |c| c.with_bits(Bits::Sixteen, Bits::Sixteen).with_sink_tokens(4).with_history_limit(256),
        },
        Scheme {
            name: "keys and values per token, 8 bits",
            config: |c| {
                let eight = TensorFormat::new(Bits::Eight);
                c.with_formats(eight.with_axis(Axis::PerToken), eight)
            },
        },
        Scheme {
            name: "keys and values per token, 4 bits",
            config: |c| {
                let four = TensorFormat::new(Bits::Four);
                c.with_formats(four.with_axis(Axis::PerToken), four)
            },
        },
        Scheme {
            name: "keys and values per token, 2 bits",
            config: |c| c.with_formats(two().with_axis(Axis::PerToken), two()),
        },
        Scheme {
            name: "keys per token, values per channel, 2 bits",
            config: |c| c.with_formats(two().with_axis(Axis::PerToken), two().with_axis(Axis::PerChannel)),
        },
    ]
}

/// What a scheme does on one file.
struct Outcome {
    format_bits: f64,
    /// What holds the file's tokens, window and sinks included.
    held_bits: f64,
    resident_bits: f64,
    error: f64,
    divergence: f64,
    /// Of the GPU from the oracle, or that there was no GPU to ask.
    gpu: Option<f64>,
}

fn main() -> Result<(), Failure> {
    env_logger::init();
    let mut svg = PathBuf::from("target/compare.svg");
    let mut files = Vec::new();
    let mut parser = lexopt::Parser::from_env();
    while let Some(arg) = parser.next()? {
        match arg {
            lexopt::Arg::Long("svg") => svg = parser.value()?.into(),
            lexopt::Arg::Value(path) => files.push(PathBuf::from(path)),
            other => return Err(other.unexpected().into()),
        }
    }
    if files.is_empty() {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data");
        let known = ["qwen05b_L00", "qwen05b_L23", "smollm2_L00", "smollm2_L29"];
        files.extend(known.map(|name| folder.join(format!("{name}.safetensors"))));
    }
    let gpu = Gpu::open(&Default::default())?;
    println!(
        "oracle and {} agree on every scheme of ours, or this program ends with an error\n",
        gpu.info.name
    );

    let mut points = Vec::new();
    for file in &files {
        let data = RealData::load(file)?;
        println!("{}, {} tokens, the last {} attend\n", data.name, data.tokens, data.queries);
        println!(
            "| scheme | format bits | bits held here | resident bits | output error | KL of the weights | GPU − oracle |"
        );
        println!("|---|---|---|---|---|---|---|");
        for scheme in schemes() {
            let outcome = run(&gpu, &data, &(scheme.config)(config_of(&data)))?;
            print_row(scheme.name, &outcome);
            points.push((scheme.name, outcome));
        }
        for (name, bits, quantize) in ENGINES {
            let outcome = engine(&data, bits, quantize);
            print_row(name, &outcome);
            points.push((name, outcome));
        }
        println!();
    }
    draw(&svg, &points)?;
    println!("{}: error against bits held, a point per scheme and file", svg.display());
    Ok(())
}

fn print_row(name: &str, o: &Outcome) {
    let gpu = o.gpu.map_or("—".into(), |difference| format!("{difference:.1e}"));
    let Outcome { format_bits, held_bits, resident_bits, error, divergence, .. } = o;
    println!(
        "| {name} | {format_bits:.2} | {held_bits:.2} | {resident_bits:.2} | {error:.4} | {divergence:.5} | {gpu} |"
    );
}

fn config_of(data: &RealData) -> CacheConfig {
    CacheConfig::new(1, data.query_heads as u32, data.kv_heads as u32, data.head_dim as u32)
        .with_capacity(data.tokens as u32)
}

/// The steps of a prompt and its last tokens, which attend: (tokens before, new, queries).
fn steps(data: &RealData) -> Vec<(usize, usize, usize)> {
    let prompt = data.tokens - data.queries;
    let mut steps: Vec<_> = (0..prompt).step_by(CHUNK).map(|at| (at, CHUNK.min(prompt - at), 0)).collect();
    steps.push((prompt, data.queries, data.queries));
    steps
}

fn run(gpu: &Gpu, data: &RealData, config: &CacheConfig) -> Result<Outcome, Failure> {
    let row = data.token_len();
    let mut cache = CpuCache::new(config)?;
    let sequence = cache.create_sequence()?;
    let mut out = Vec::new();
    let mut keys = Vec::new();
    for (at, new, queries) in steps(data) {
        let range = at * row..(at + new) * row;
        if queries > 0 {
            keys = dequantized_keys(&cache, &cache.state(0, sequence)?);
            // The new tokens are unpacked while they attend.
            let format = config.window_format;
            keys.extend(data.k[range.clone()].iter().map(|&k| f64::from(widen(enter(k, format), format))));
        }
        let input = LayerInput {
            k: &data.k[range.clone()],
            v: &data.v[range],
            q: &data.q[..queries * data.query_heads * data.head_dim],
            ..Default::default()
        };
        let step = SequenceStep::new(sequence, new as u32, queries as u32);
        out = cache.step(&[step], &[input])?.1.remove(0).out;
    }
    let out: Vec<f32> = out.into_iter().map(|x| x as f32).collect();
    let on_gpu = run_on_gpu(gpu, data, config)?;
    let difference = relative_error(&on_gpu, &out);
    if difference > 1e-4 {
        return Err(format!("{}: the GPU is {difference:e} off the oracle", data.name).into());
    }
    let exact = data.output("out.exact").ok_or("the file has no exact output")?;
    // All bytes that a cache of a whole model allocates for one long sequence.
    let model = CacheConfig::new(LAYERS, config.query_heads, config.kv_heads, config.head_dim)
        .with_format(config.format_of(0))
        .with_capacity(TOKENS);
    let held = cache_bytes(config, data.tokens as u32)?;
    let elements = f64::from(LAYERS) * f64::from(TOKENS) * 2.0 * row as f64;
    Ok(Outcome {
        format_bits: cache.shape().first().layout.format_bits(),
        held_bits: 8.0 * held.content() as f64 / (2 * data.tokens * row) as f64,
        resident_bits: 8.0 * model.bytes_for(TOKENS)?.total() as f64 / elements,
        error: relative_error(&out, exact),
        divergence: divergence(data, &keys),
        gpu: Some(difference),
    })
}

fn run_on_gpu(gpu: &Gpu, data: &RealData, config: &CacheConfig) -> Result<Vec<f32>, Failure> {
    let options = KvCacheOptions::default().with_variant(Variant::Portable);
    let mut cache = KvCache::with_options_blocking(&gpu.device, &gpu.queue, config, &options)?;
    let sequence = cache.create_sequence()?;
    let row = data.token_len();
    let tensor = |values: &[f32]| {
        let buffer = gpu.storage("tensor", (values.len() * 4) as u64);
        gpu.queue.write_buffer(&buffer, 0, bytemuck::cast_slice(values));
        buffer
    };
    let (k, v, q) = (tensor(&data.k), tensor(&data.v), tensor(&data.q));
    let out = gpu.storage("attention output", (data.q.len() * 4) as u64);
    let view = |buffer| TensorView::new(buffer, Dtype::F32);
    for (at, new, queries) in steps(data) {
        let offset = (at * row * 4) as u64;
        let io =
            LayerIo::new(view(&k).with_offset(offset), view(&v).with_offset(offset), view(&q), view(&out));
        let binding = cache.bind(&io)?;
        let mut encoder = gpu.device.create_command_encoder(&Default::default());
        let step = SequenceStep::new(sequence, new as u32, queries as u32);
        let mut step = cache.begin_step(&mut encoder, &[step])?;
        step.layer(&mut encoder, 0, &binding)?;
        step.finish()?;
        gpu.queue.submit([encoder.finish()]);
    }
    gpu.read(&out, data.q.len())
}

/// Keys of a sequence as attention sees them, `[token][kv head][head_dim]`.
fn dequantized_keys(cache: &CpuCache, state: &LayerState) -> Vec<f64> {
    let g = cache.shape().first();
    let (layout, sixteen_bit) = (&g.layout, g.sixteen_bit_format());
    let unpacked = |words: &[u32]| -> Vec<f64> {
        let elements = words.iter().flat_map(|&word| match g.window_format {
            Dtype::F32 => vec![word],
            _ => vec![word & 0xffff, word >> 16],
        });
        elements.map(|bits| f64::from(widen(bits, g.window_format))).collect()
    };
    let mut keys = unpacked(&state.sinks.keys);
    // Tokens that are gone have no weight.
    let gone = state.lengths.evicted * layout.group * layout.kv_heads * layout.head_dim;
    keys.resize(keys.len() + gone as usize, f64::NAN);
    for block in state.blocks.chunks(layout.block_words() as usize) {
        for token in 0..layout.group {
            for head in block.chunks(layout.head_words() as usize) {
                let mut row: Vec<f64> = (0..layout.head_dim)
                    .map(|c| f64::from(layout.tensor(Tensor::Keys).element(head, token, c, sixteen_bit)))
                    .collect();
                if g.layout.keys.rotated {
                    unrotate_exactly(&mut row);
                }
                keys.extend(row);
            }
        }
    }
    keys.extend(unpacked(&state.window.keys));
    keys
}

/// Attention weights of query `query` of head `head` over `keys`, `[token][kv head][head_dim]`.
fn weights(data: &RealData, keys: &[f64], query: usize, head: usize) -> Vec<f64> {
    let dim = data.head_dim;
    let kv_head = head / (data.query_heads / data.kv_heads);
    let q = &data.q[(query * data.query_heads + head) * dim..][..dim];
    let visible = data.tokens - data.queries + query + 1;
    let logits: Vec<f64> = (0..visible)
        .map(|t| {
            let key = &keys[(t * data.kv_heads + kv_head) * dim..][..dim];
            let product = key.iter().zip(q).map(|(k, &q)| k * f64::from(q)).sum::<f64>();
            if product.is_nan() { f64::NEG_INFINITY } else { product / (dim as f64).sqrt() }
        })
        .collect();
    let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = logits.iter().map(|l| (l - max).exp()).collect();
    let sum: f64 = weights.iter().sum();
    weights.into_iter().map(|w| w / sum).collect()
}

/// Mean over queries and heads of the KL divergence of the weights over `keys` from those over exact keys.
fn divergence(data: &RealData, keys: &[f64]) -> f64 {
    let exact: Vec<f64> = data.k.iter().map(|&k| f64::from(k)).collect();
    let mut sum = 0.0;
    for query in 0..data.queries {
        for head in 0..data.query_heads {
            let (p, other) = (weights(data, &exact, query, head), weights(data, keys, query, head));
            let terms = p.iter().zip(&other).filter(|(p, _)| **p > 0.0);
            sum += terms.map(|(p, o)| p * (p / o).ln()).sum::<f64>();
        }
    }
    sum / (data.queries * data.query_heads) as f64
}

/// A row of 32 elements, quantized in place.
type Quantize = fn(&mut [f64]);

/// The caches of engines in common use: every token in blocks of 32 channels with one f16 scale, keys and
/// values alike, without a window.
const ENGINES: [(&str, f64, Quantize); 2] =
    [("per token, 8 bits (as q8_0)", 8.5, q8_0), ("per token, 4 bits (as q4_0)", 4.5, q4_0)];

fn q8_0(row: &mut [f64]) {
    let scale = row.iter().fold(0.0, |m: f64, x| m.max(x.abs())) / 127.0;
    if scale > 0.0 {
        let stored = f64::from(half::f16::from_f64(scale).to_f32());
        row.iter_mut().for_each(|x| *x = (*x / scale).round() * stored);
    }
}

fn q4_0(row: &mut [f64]) {
    let most = row.iter().fold(0.0, |m: f64, &x| if x.abs() > m.abs() { x } else { m });
    let scale = most / -8.0;
    if scale != 0.0 {
        let stored = f64::from(half::f16::from_f64(scale).to_f32());
        row.iter_mut().for_each(|x| *x = ((*x / scale + 8.5).floor().min(15.0) - 8.0) * stored);
    }
}

/// A scheme of others, with attention in f64.
fn engine(data: &RealData, bits: f64, quantize: Quantize) -> Outcome {
    let quantized = |x: &[f32]| {
        let mut x: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
        x.chunks_mut(data.head_dim).flat_map(|row| row.chunks_mut(32)).for_each(quantize);
        x
    };
    let (keys, values) = (quantized(&data.k), quantized(&data.v));
    let (dim, per_group) = (data.head_dim, data.query_heads / data.kv_heads);
    let mut out = Vec::with_capacity(data.q.len());
    for query in 0..data.queries {
        for head in 0..data.query_heads {
            let mut sum = vec![0.0; dim];
            for (t, weight) in weights(data, &keys, query, head).into_iter().enumerate() {
                let value = &values[(t * data.kv_heads + head / per_group) * dim..][..dim];
                sum.iter_mut().zip(value).for_each(|(sum, v)| *sum += weight * v);
            }
            out.extend(sum.into_iter().map(|x| x as f32));
        }
    }
    let exact = data.output("out.exact").unwrap_or_default();
    let error = relative_error(&out, exact);
    Outcome {
        format_bits: bits,
        held_bits: bits,
        resident_bits: bits,
        error,
        divergence: divergence(data, &keys),
        gpu: None,
    }
}

/// Error against what holds the tokens, a colour per scheme.
fn draw(path: &PathBuf, points: &[(&str, Outcome)]) -> Result<(), Failure> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let root = SVGBackend::new(path, (1240, 640)).into_drawing_area();
    root.fill(&WHITE)?;
    let (plot, legend) = root.split_horizontally(820);
    let mut chart = ChartBuilder::on(&plot)
        .margin(16)
        .caption("Error of attention outputs, on every file", ("sans-serif", 20))
        .x_label_area_size(40)
        .y_label_area_size(64)
        .build_cartesian_2d(4.0..10.5, (3e-3..2.0).log_scale())?;
    chart
        .configure_mesh()
        .x_desc("bits per element that hold the 1024 tokens, window and sinks included")
        .y_desc("relative error")
        .draw()?;
    let mut names: Vec<&str> = Vec::new();
    for (name, _) in points.iter().filter(|(name, _)| *name != "16 bits") {
        if !names.contains(name) {
            names.push(name);
        }
    }
    for (i, name) in names.into_iter().enumerate() {
        let (color, size) = (Palette99::pick(i).to_rgba(), 5);
        let own = points.iter().filter(|(n, _)| *n == name).map(|(_, o)| (o.held_bits, o.error));
        chart.draw_series(own.map(|at| Circle::new(at, size, color.filled())))?;
        let y = 40 + 24 * i as i32;
        legend.draw(&Circle::new((12, y), size, color.filled()))?;
        legend.draw(&Text::new(name, (26, y - 7), ("sans-serif", 14)))?;
    }
    root.present()?;
    Ok(())
}
