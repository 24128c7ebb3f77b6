//! `compare`: paradigms of the cache side by side, everything measured or computed here.

use crate::ModelOptions;
use crate::commands::needle::{BESIDES, Grid, Rates, search};
use crate::commands::output::Output;
use crate::commands::perplexity::{FROM, measure};
use crate::commands::throughput::{positions, timings};
use crate::commands::{READ, text};
use anyhow::{Context as _, Result, bail};
use indicatif::ProgressBar;
use kivi_wgpu::CacheConfig;
use kivi_wgpu::cache_bytes;
use llama::format::Format;
use llama::generate::Sampler;
use llama::room::asked;
use std::num::NonZeroU32;

/// Name for people, and format.
const PARADIGMS: [(&str, &str); 9] = [
    ("16 bits", "16"),
    ("uniform, per token, 8 bits", "k8t-v8-w0"),
    ("uniform, per token, 4 bits", "k4t-v4-w0"),
    ("sliding window of 512, 4 sinks", "16-s4-l512"),
    ("KIVI, 4 bits", "kivi4"),
    ("KIVI, 2 bits", "kivi2"),
    ("preset Bits4_5", "bits4.5"),
    ("preset Bits3", "bits3"),
    ("preset Bits2_25", "bits2.25"),
];

#[derive(clap::Args)]
pub struct Options {
    /// Tokens of Jane Austen's Emma that perplexity is measured on, and that the sequence holds then whose
    /// decoding is timed.
    #[arg(long, default_value_t = 2048)]
    tokens: usize,
    /// Tokens per step of that.
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..))]
    chunk: u32,
    /// Length of the texts that pass keys are hidden in, at five depths.
    #[arg(long, default_value_t = 1024)]
    needle: usize,
    /// Keys per depth.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    trials: u16,
    /// Decode steps that are timed; the formats take turns.
    #[arg(long, default_value = "5")]
    steps: NonZeroU32,
    #[command(flatten)]
    output: Output,
}

pub fn run(model: &ModelOptions, options: Options) -> Result<()> {
    if options.tokens <= FROM + 1 {
        bail!("no prediction counts: --tokens must be more than {}", FROM + 1);
    }
    let formats: Vec<Format> = PARADIGMS.iter().map(|(_, format)| format.parse()).collect::<Result<_>>()?;
    let depths = vec![0.1, 0.3, 0.5, 0.7, 0.9];
    let grid = Grid::new(vec![options.needle], depths, options.trials.into()).context("--needle")?;
    let opened = model.open()?;
    let longest = options.tokens.max(options.needle);
    let chunk = |size: u32| asked(size, "--chunk");
    let context = (longest as u64).saturating_add(BESIDES + positions(options.steps));
    let context = asked(context, "--tokens or --needle with --steps");
    let room = opened.room(chunk(READ.max(options.chunk)), chunk(options.chunk), context)?;
    opened.check(room, &formats, asked(2u32, ""), "--chunk, --tokens, --needle, --steps")?;
    let all = text(&opened.tokenizer, None, longest, "--tokens or --needle")?;
    let (model, tokenizer) = opened.load(room)?;
    let (summaries, mut crowds) = measure(&model, &formats, &all[..options.tokens], options.chunk, FROM)?;
    let timings = timings(&model, &Sampler::new(&model)?, &mut crowds, options.steps)?;

    let bar = ProgressBar::new(grid.cost() * formats.len() as u64);
    let mut found = Vec::new();
    for format in &formats {
        found.push(search(&model, &tokenizer, format, &all, &grid, |tokens| bar.inc(tokens))?);
    }
    bar.finish_and_clear();

    let mut table = format!(
        "{} on {}. Memory: a sequence of 131072 tokens, allocated. Perplexity: {} tokens in steps of {}, losses from position {FROM} on. \
         Keys are hidden in {} tokens. Decoding: {} tokens in the cache, medians of {} steps.\n\n",
        model.shape.name,
        model.gpu.name(),
        options.tokens,
        options.chunk,
        options.needle,
        options.tokens,
        options.steps
    );
    table += &format!(
        "| cache | format | 8B, GiB | 70B, GiB | perplexity | Δ | mean KL | {} | token, ms | of it cache, ms | attention kernels |\n",
        Rates::HEADER
    );
    table += "|---|---|---|---|---|---|---|---|---|---|---|---|\n";
    for (index, format) in formats.iter().enumerate() {
        let gib = |layers, heads| -> Result<f64> {
            let config = format.apply(CacheConfig::new(layers, heads, 8, 128));
            Ok(cache_bytes(&config, 131_072)?.allocated() as f64 / f64::from(1 << 30))
        };
        let (summary, timing) = (&summaries[index], &timings[index]);
        table += &format!(
            "| {} | `{}` | {:.2} | {:.2} | {:.2} | {:+.2} % ± {:.2} | {:.4} | {} | {:.1} | {} | {} |\n",
            PARADIGMS[index].0,
            format.name,
            gib(32, 32)?,
            gib(80, 64)?,
            summary.perplexity,
            100.0 * summary.change,
            100.0 * summary.change_error,
            summary.divergence,
            Rates::new(&found[index], &found[0]),
            timing.step,
            timing.parts.map_or("–".to_string(), |parts| format!("{:.1}", parts[1])),
            crowds[index].kernels()
        );
    }
    options.output.publish("compare", &table, None::<fn() -> Result<String>>)
}
