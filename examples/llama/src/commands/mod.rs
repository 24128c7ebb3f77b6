//! One file per command, and what they share.

pub mod chat;
pub mod compare;
mod conversation;
pub mod generate;
pub mod heatmap;
mod interrupt;
pub mod needle;
pub mod output;
pub mod perplexity;
pub mod throughput;

use anyhow::{Context as _, Result, bail};
use kivi_wgpu::SequenceId;
use llama::format::Format;
use llama::generate::Sampling;
use llama::model::{Context, Model};
use llama::tokenizer::Tokenizer;
use std::path::Path;

/// Tokens of a step in which a prompt is read.
pub const READ: u32 = 128;

/// How tokens are chosen.
#[derive(clap::Args)]
pub struct SamplingOptions {
    /// Divisor of the logits; 0 chooses the most likely token.
    #[arg(long, default_value_t = 0.7, value_parser = not_negative)]
    temperature: f32,
    /// Only so many tokens are candidates, the most likely ones; 0: all.
    #[arg(long, default_value_t = 40)]
    top_k: u32,
    /// Only the most likely tokens that hold this part of the probability together are candidates.
    #[arg(long, default_value_t = 0.95, value_parser = not_negative)]
    top_p: f32,
    /// The same seed gives the same text; without it, another each time.
    #[arg(long)]
    seed: Option<u32>,
}

fn not_negative(number: &str) -> Result<f32> {
    let number: f32 = number.parse()?;
    if number >= 0.0 && number.is_finite() {
        Ok(number)
    } else {
        bail!("a number that is not negative is expected")
    }
}

impl SamplingOptions {
    pub fn get(&self) -> Sampling {
        Sampling {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            seed: self.seed.unwrap_or_else(rand::random),
        }
    }
}

/// The first `count` tokens of a file, or of a part of Jane Austen's Emma; `option` asks for so many.
pub fn text(tokenizer: &Tokenizer, path: Option<&Path>, count: usize, option: &str) -> Result<Vec<u32>> {
    let text = match path {
        Some(path) => std::fs::read_to_string(path).with_context(|| format!("{}", path.display()))?,
        None => include_str!("../../../../tests/data/emma_long.txt").to_string(),
    };
    let mut tokens = tokenizer.encode(&text)?;
    if tokens.len() < count {
        bail!("{option} asks for {count} tokens of a text that has only {}", tokens.len());
    }
    tokens.truncate(count);
    Ok(tokens)
}

/// The middle value; 0 of none.
pub fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}

/// Bytes in MiB.
pub fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// What the cache holds and takes, against 16 bits.
pub fn report(model: &Model, context: &Context, sequence: SequenceId, format: &Format) -> Result<String> {
    let cache = &context.cache;
    let mut tokens = 0;
    for sequence in cache.sequences() {
        tokens += u64::from(cache.tokens(sequence)?);
    }
    let others = match tokens - u64::from(cache.tokens(sequence)?) {
        0 => String::new(),
        others => format!(" and {others} of other sequences"),
    };
    let memory = cache.memory();
    let layers = memory.all_layers();
    let content = layers.total() - layers.slack;
    let sixteen = tokens * model.shape.token_bytes();
    // What forks share is held once.
    Ok(format!(
        "cache in {}: {} of {} tokens{others}, {:.2} MiB; in 16 bits, nothing shared, {:.2} MiB, {:.2} × as much; allocated in all {:.2} MiB",
        format.name,
        cache.tokens(sequence)?,
        model.room.context,
        mib(content),
        mib(sixteen),
        sixteen as f64 / content.max(1) as f64,
        mib(memory.total())
    ))
}
