//! Streams keys and values into a quantized cache on whatever GPU wgpu finds, attends from the packed form,
//! and shows memory and error.
//!
//! By default they are those of a real model (`tests/data`): a prompt appended in bulk, then one token at a
//! time with attention. `--tokens N` makes a long synthetic run instead.

#[path = "support/host.rs"]
mod host;
#[path = "support/real_data.rs"]
mod real_data;
#[path = "support/synthetic.rs"]
mod synthetic;

use host::{Gpu, human};
use indicatif::{ProgressBar, ProgressStyle};
use kivi_wgpu::{Bits, CacheConfig, Dtype, KvCache, LayerIo, SequenceStep, TensorView, wgpu};
use real_data::{RealData, relative_error};
use std::error::Error;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use synthetic::Synthetic;

const HELP: &str = "\
cargo run --example quickstart -- [OPTIONS]

  --file PATH        a file of tests/data (default: smollm2_L29.safetensors)
  --tokens N         synthetic keys and values of N tokens instead (32 query heads, 8 KV heads, head_dim 128)
  --bits B           width of key and value codes: 2, 4 or 8 (default 2)
  --key-bits B, --value-bits B
  --group G          group size: 16, 32, 64 or 128 (default 32)
  --window W         residual window (default 128)
  --layers L         layers of the cache, each given the same tensors (default 30 as SmolLM2-135M has; 1 with --tokens)
  --sinks S          tokens kept unpacked at the start (default 0)
  --decode N         tokens decoded one at a time at the end, with attention (default 64; 8 with --tokens)";

struct Options {
    file: PathBuf,
    tokens: Option<usize>,
    key_bits: Bits,
    value_bits: Bits,
    group: u32,
    window: u32,
    sinks: u32,
    layers: Option<u32>,
    decode: Option<usize>,
}

fn options() -> Result<Option<Options>, Box<dyn Error>> {
    use lexopt::prelude::*;
    let mut options = Options {
        file: PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data/smollm2_L29.safetensors"),
        tokens: None,
        key_bits: Bits::Two,
        value_bits: Bits::Two,
        group: 32,
        window: 128,
        sinks: 0,
        layers: None,
        decode: None,
    };
    let bits =
        |n: u32| Bits::from_u32(n).ok_or_else(|| format!("{n} bits are not supported: use 2, 4, 8 or 16"));
    let mut parser = lexopt::Parser::from_env();
    while let Some(arg) = parser.next()? {
        match arg {
            Long("file") => options.file = parser.value()?.into(),
            Long("tokens") => options.tokens = Some(parser.value()?.parse()?),
            Long("bits") => {
                options.key_bits = bits(parser.value()?.parse()?)?;
                options.value_bits = options.key_bits;
            }
            Long("key-bits") => options.key_bits = bits(parser.value()?.parse()?)?,
            Long("value-bits") => options.value_bits = bits(parser.value()?.parse()?)?,
            Long("group") => options.group = parser.value()?.parse()?,
            Long("window") => options.window = parser.value()?.parse()?,
            Long("sinks") => options.sinks = parser.value()?.parse()?,
            Long("layers") => options.layers = Some(parser.value()?.parse()?),
            Long("decode") => options.decode = Some(parser.value()?.parse()?),
            Long("help") | Short('h') => return Ok(None),
            _ => return Err(arg.unexpected().into()),
        }
    }
    Ok(Some(options))
}

/// Where keys, values and queries come from, `[token][head][head_dim]`.
enum Source {
    Real(Box<RealData>),
    Synthetic(Synthetic),
}

impl Source {
    fn shape(&self) -> (usize, usize, usize) {
        match self {
            Source::Real(data) => (data.query_heads, data.kv_heads, data.head_dim),
            Source::Synthetic(s) => (s.query_heads, s.kv_heads, s.head_dim),
        }
    }

    fn tokens(&self) -> usize {
        match self {
            Source::Real(data) => data.tokens,
            Source::Synthetic(s) => s.tokens,
        }
    }

    /// Keys and values of `n` tokens from `first` on.
    fn keys_values(&self, first: usize, n: usize) -> (Vec<f32>, Vec<f32>) {
        match self {
            Source::Real(data) => {
                let range = first * data.token_len()..(first + n) * data.token_len();
                (data.k[range.clone()].to_vec(), data.v[range].to_vec())
            }
            Source::Synthetic(s) => s.keys_values(first, n),
        }
    }

    /// The query at `position`. Files hold those of the last few positions: earlier ones borrow them.
    fn query(&self, position: usize) -> Vec<f32> {
        match self {
            Source::Real(data) => {
                let row = data.query_heads * data.head_dim;
                let first = data.tokens - data.queries;
                let i = if position >= first { position - first } else { position % data.queries };
                data.q[i * row..(i + 1) * row].to_vec()
            }
            Source::Synthetic(s) => s.query(position),
        }
    }

    fn name(&self) -> String {
        match self {
            Source::Real(data) => data.name.clone(),
            Source::Synthetic(_) => "synthetic, with channel outliers in the keys".into(),
        }
    }

    /// Attention over the exact keys and values for the queries at `positions`, one row of all heads each.
    fn exact(&self, positions: &[usize], progress: &ProgressBar) -> Vec<f32> {
        let (query_heads, kv_heads, dim) = self.shape();
        let mut state = vec![(f64::NEG_INFINITY, 0.0, vec![0.0; dim]); positions.len() * query_heads];
        let queries: Vec<Vec<f32>> = positions.iter().map(|&p| self.query(p)).collect();
        let mut first = 0;
        while first < self.tokens() {
            let n = 512.min(self.tokens() - first);
            let (k, v) = self.keys_values(first, n);
            for (t, position) in (0..n).zip(first..) {
                for (i, _) in positions.iter().enumerate().filter(|(_, p)| **p >= position) {
                    for head in 0..query_heads {
                        let at = (t * kv_heads + head * kv_heads / query_heads) * dim;
                        let q = &queries[i][head * dim..][..dim];
                        let dot: f64 = q.iter().zip(&k[at..]).map(|(q, k)| f64::from(q * k)).sum();
                        add_token(
                            &mut state[i * query_heads + head],
                            dot / (dim as f64).sqrt(),
                            &v[at..at + dim],
                        );
                    }
                }
            }
            first += n;
            progress.inc(n as u64);
        }
        state.into_iter().flat_map(|(_, sum, out)| out.into_iter().map(move |x| (x / sum) as f32)).collect()
    }
}

/// One token more in a softmax-weighted sum (maximum, sum of weights, output).
fn add_token((max, sum, out): &mut (f64, f64, Vec<f64>), logit: f64, value: &[f32]) {
    if logit > *max {
        let shrink = (*max - logit).exp();
        *sum *= shrink;
        out.iter_mut().for_each(|x| *x *= shrink);
        *max = logit;
    }
    let weight = (logit - *max).exp();
    *sum += weight;
    out.iter_mut().zip(value).for_each(|(x, v)| *x += weight * f64::from(*v));
}

fn bar(label: &str, length: usize) -> ProgressBar {
    let style = ProgressStyle::with_template("{prefix:>10} [{bar:40}] {pos}/{len} tokens, {elapsed}");
    let bar = ProgressBar::new(length as u64).with_prefix(label.to_string());
    bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

fn main() -> Result<(), Box<dyn Error>> {
    env_logger::init();
    let Some(options) = options()? else {
        println!("{HELP}");
        return Ok(());
    };
    let source = match options.tokens {
        Some(tokens) => Source::Synthetic(Synthetic::new(tokens)),
        None => Source::Real(Box::new(RealData::load(&options.file)?)),
    };
    let (query_heads, kv_heads, head_dim) = source.shape();
    let tokens = source.tokens();
    let synthetic = options.tokens.is_some();
    let layers = options.layers.unwrap_or(if synthetic { 1 } else { 30 });
    let decode = options.decode.unwrap_or(if synthetic { 8 } else { 64 }).clamp(1, tokens);
    let prompt = tokens - decode;

    let config = CacheConfig::new(layers, query_heads as u32, kv_heads as u32, head_dim as u32)
        .with_bits(options.key_bits, options.value_bits)
        .with_group_size(options.group)
        .with_residual_window(options.window)
        .with_sink_tokens(options.sinks)
        .with_capacity(tokens as u32);
    let gpu = Gpu::open(&KvCache::required_limits(&config)?)?;
    let mut cache = KvCache::new_blocking(&gpu.device, &gpu.queue, &config)?;
    let sequence = cache.create_sequence()?;

    // The host's buffers: keys and values of up to max_step tokens, one token's queries and output.
    let max_step = config.max_step as usize;
    let row = kv_heads * head_dim;
    let query_row = query_heads * head_dim;
    let k_buffer = gpu.storage("keys", (max_step * row * 4) as u64);
    let v_buffer = gpu.storage("values", (max_step * row * 4) as u64);
    let q_buffer = gpu.storage("queries", (query_row * 4) as u64);
    let out_buffer = gpu.storage("output", (query_row * 4) as u64);
    let view = |buffer| TensorView::new(buffer, Dtype::F32);
    let io =
        cache.bind(&LayerIo::new(view(&k_buffer), view(&v_buffer), view(&q_buffer), view(&out_buffer)))?;

    // The prompt: appended in bulk.
    let progress = bar("prompt", prompt);
    let started = Instant::now();
    let mut done = 0;
    while done < prompt {
        let n = max_step.min(prompt - done);
        let (k, v) = source.keys_values(done, n);
        gpu.queue.write_buffer(&k_buffer, 0, bytemuck::cast_slice(&k));
        gpu.queue.write_buffer(&v_buffer, 0, bytemuck::cast_slice(&v));
        let mut encoder = gpu.device.create_command_encoder(&Default::default());
        let mut step = cache.begin_step(&mut encoder, &[SequenceStep::append(sequence, n as u32)])?;
        for layer in 0..layers {
            step.layer(&mut encoder, layer, &io)?;
        }
        step.finish()?;
        gpu.queue.submit([encoder.finish()]);
        done += n;
        progress.inc(n as u64);
    }
    gpu.wait()?;
    let prompt_time = started.elapsed();
    progress.finish();

    // Then one token at a time, with attention. The last few outputs are compared with exact attention.
    let compared: Vec<usize> = (tokens - decode.min(8)..tokens).collect();
    let progress = bar("decode", decode);
    let mut times = Vec::new();
    let mut outputs = Vec::new();
    for position in prompt..tokens {
        let (k, v) = source.keys_values(position, 1);
        gpu.queue.write_buffer(&k_buffer, 0, bytemuck::cast_slice(&k));
        gpu.queue.write_buffer(&v_buffer, 0, bytemuck::cast_slice(&v));
        gpu.queue.write_buffer(&q_buffer, 0, bytemuck::cast_slice(&source.query(position)));
        let started = Instant::now();
        let mut encoder = gpu.device.create_command_encoder(&Default::default());
        let mut step = cache.begin_step(&mut encoder, &[SequenceStep::decode(sequence)])?;
        for layer in 0..layers {
            step.layer(&mut encoder, layer, &io)?;
        }
        step.finish()?;
        gpu.queue.submit([encoder.finish()]);
        gpu.wait()?;
        times.push(started.elapsed());
        if compared.contains(&position) {
            outputs.extend(gpu.read(&out_buffer, query_row)?);
        }
        progress.inc(1);
    }
    progress.finish();

    let progress = bar("compare", tokens);
    let exact = source.exact(&compared, &progress);
    progress.finish_and_clear();
    let error = relative_error(&outputs, &exact);

    let measured = Measured { error, compared: compared.len(), prompt_time, times };
    report(&options, &source, &gpu, &config, &cache, &measured);
    Ok(())
}

/// What a run has found out.
struct Measured {
    /// Of attention, against exact keys and values.
    error: f64,
    /// Tokens whose attention was compared.
    compared: usize,
    prompt_time: Duration,
    /// Of decode steps.
    times: Vec<Duration>,
}

/// Prints what the cache holds, what it costs and how far off it is.
fn report(
    options: &Options,
    source: &Source,
    gpu: &Gpu,
    config: &CacheConfig,
    cache: &KvCache,
    measured: &Measured,
) {
    let (query_heads, kv_heads, head_dim) = source.shape();
    let (tokens, layers) = (source.tokens(), config.layers);
    let (decode, prompt) = (measured.times.len(), tokens - measured.times.len());
    let memory = cache.memory();
    let elements = 2 * tokens * kv_heads * head_dim * layers as usize;
    let sixteen_bit = 2 * elements as u64;
    let layout = &cache.shape().first().layout;
    let software = gpu.info.device_type == wgpu::DeviceType::Cpu;
    println!();
    println!("keys and values      {}", source.name());
    println!("adapter              {} ({:?})", gpu.info.name, gpu.info.backend);
    println!("driver               {} {}", gpu.info.driver, gpu.info.driver_info);
    println!(
        "heads                {query_heads} query, {kv_heads} KV, head_dim {head_dim}; layers: {layers}, all given the same tensors"
    );
    println!(
        "format               keys {} bits per channel, values {} bits per token, groups of {}",
        options.key_bits.get(),
        options.value_bits.get(),
        options.group
    );
    println!("tokens               {tokens}, of which {} are packed", packed_tokens(config, tokens as u32));
    println!("16-bit cache         {}", human(sixteen_bit));
    println!("bytes allocated      {}", human(memory.total()));
    let held = memory.all_layers();
    println!("  codes              {}", human(held.codes));
    println!("  scales and minima  {}", human(held.parameters));
    println!("  window and sinks   {}", human(held.window + held.sinks));
    println!("  free in layers     {}", human(held.slack));
    println!("  shared by layers   {}", human(memory.staging + memory.scratch + memory.plan));
    let smaller = |bytes: u64| sixteen_bit as f64 / bytes as f64;
    println!(
        "ratio                {:.2} x smaller; {:.2} x without what all layers share",
        smaller(memory.total()),
        smaller(held.total())
    );
    println!("format bits          {:.2} per packed element", layout.format_bits());
    println!(
        "resident bits        {:.2} per element, all allocated bytes",
        8.0 * memory.total() as f64 / elements as f64
    );
    println!(
        "attention error      {:.2} % against exact keys and values (last {} tokens)",
        100.0 * measured.error,
        measured.compared
    );
    println!("prompt               {:.1} ms for {prompt} tokens", 1e3 * measured.prompt_time.as_secs_f64());
    println!(
        "decode step          {:.2} ms, median of {} (all layers)",
        1e3 * median(measured.times.clone()).as_secs_f64(),
        decode
    );
    if software {
        println!("\nThe adapter is a software one: its times say nothing about a GPU.");
    }
}

fn packed_tokens(config: &CacheConfig, tokens: u32) -> u32 {
    let history = tokens.saturating_sub(config.format.sink_tokens + config.format.residual_window);
    history / config.format.group_size * config.format.group_size
}
