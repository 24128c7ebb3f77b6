//! `perplexity`: what formats of the cache cost in quality and take in memory, on a real text.

use crate::ModelOptions;
use crate::commands::output::Output;
use crate::commands::throughput::Crowd;
use crate::commands::{mib, text};
use crate::pictures::points as plot;
use anyhow::{Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use kivi_wgpu::cache_bytes;
use llama::format::Format;
use llama::model::Model;
use llama::room::asked;
use llama::score::{Summary, read_and_score};
use std::path::PathBuf;

/// The first position whose prediction counts: by then every format has packed something.
pub const FROM: usize = 257;

#[derive(clap::Args)]
pub struct Options {
    /// Formats, separated by commas; 16 bits come first in any case.
    #[arg(long, value_delimiter = ',', default_value = "kivi4,bits4.5,kivi2,bits3,bits2.75,bits2.25")]
    formats: Vec<Format>,
    /// The text; without it a part of Jane Austen's Emma.
    #[arg(long)]
    text: Option<PathBuf>,
    /// How many of its tokens are read.
    #[arg(long, default_value_t = 4096)]
    tokens: usize,
    /// Tokens per step.
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..))]
    chunk: u32,
    /// The first position whose prediction counts.
    #[arg(long, default_value_t = FROM)]
    from: usize,
    #[command(flatten)]
    output: Output,
}

pub fn run(model: &ModelOptions, options: Options) -> Result<()> {
    if options.tokens.saturating_sub(1) <= options.from {
        bail!("no prediction counts: --tokens must be more than --from, {}, and one", options.from);
    }
    let formats = Format::after_sixteen(&options.formats)?;
    let opened = model.open()?;
    let chunk = asked(options.chunk, "--chunk");
    let room = opened.room(chunk, chunk, asked(options.tokens, "--tokens"))?;
    opened.check(room, &formats, asked(1u32, ""), "--formats, --chunk, --tokens")?;
    let tokens = text(&opened.tokenizer, options.text.as_deref(), options.tokens, "--tokens")?;
    let (model, _) = opened.load(room)?;
    let (summaries, _) = measure(&model, &formats, &tokens, options.chunk, options.from)?;
    let mut table = format!(
        "{} on {}: {} tokens in steps of {}, losses from position {} on\n\n",
        model.shape.name,
        model.gpu.name(),
        tokens.len(),
        options.chunk,
        options.from
    );
    table += "| format | format bits | resident bits | bytes allocated | perplexity | Δ | mean KL, nats | same top-1 |\n";
    table += "|---|---|---|---|---|---|---|---|\n";
    let mut points = Vec::new();
    for (format, s) in formats.iter().zip(&summaries) {
        let bytes = cache_bytes(&format.apply(model.cache_config()), tokens.len() as u32)?;
        table += &format!(
            "| {} | {:.2} | {:.2} | {:.2} MiB | {:.3} | {:+.2} % ± {:.2} | {:.4} ± {:.4} | {:.2} % |\n",
            format.name,
            bytes.format_bits,
            bytes.resident_bits(),
            mib(bytes.allocated()),
            s.perplexity,
            100.0 * s.change,
            100.0 * s.change_error,
            s.divergence,
            s.divergence_error,
            100.0 * s.agreement
        );
        points.push((format.name.clone(), mib(bytes.content()), s.divergence));
    }
    let title = format!("{}: loss against bytes, {} tokens", model.shape.name, tokens.len());
    let y = "mean KL divergence from the 16-bit cache, nats";
    let x = "MiB that hold the tokens, window and sinks included";
    let draw = (points.len() > 1).then_some(|| plot(&title, x, y, &points[1..]));
    options.output.publish("perplexity", &table, draw)
}

/// What each format loses on the tokens from position `from` on, and a sequence that holds them; the first is
/// what the others are compared with.
pub fn measure(
    model: &Model,
    formats: &[Format],
    tokens: &[u32],
    chunk: u32,
    from: usize,
) -> Result<(Vec<Summary>, Vec<Crowd>)> {
    let contexts =
        formats.iter().map(|format| model.context_with_sequence(&format.apply(model.cache_config())));
    let mut contexts = contexts.collect::<Result<Vec<_>>>()?;
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} tokens, {per_sec}, {eta} left")?;
    let bar = ProgressBar::new((tokens.len() * formats.len()) as u64).with_style(style);
    let scores = read_and_score(model, &mut contexts, tokens, chunk, from, |n| bar.inc(n))?;
    bar.finish_and_clear();
    let summaries = scores.iter().map(|scores_of| Summary::new(scores_of, &scores[0])).collect();
    let crowds = contexts.into_iter().map(|(context, sequence)| Crowd::of(context, sequence)).collect();
    Ok((summaries, crowds))
}
