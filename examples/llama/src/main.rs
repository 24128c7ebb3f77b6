//! Commands around a real model: see `--help`.

mod commands;
mod pictures;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use indicatif::ProgressBar;
use llama::gguf::Gguf;
use llama::gpu::Gpu;
use llama::model::{Model, Room};
use llama::tokenizer::Tokenizer;
use std::path::PathBuf;

/// A Llama or Qwen2 model wholly on the GPU, around a key/value cache in 2 to 16 bits.
#[derive(Parser)]
#[command(after_help = llama::format::HELP)]
struct Arguments {
    #[command(flatten)]
    model: ModelOptions,
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Args)]
struct ModelOptions {
    /// A GGUF file; without it the one that `cargo xtask model` has fetched or was given last.
    #[arg(long, global = true)]
    model: Option<PathBuf>,
    /// The adapter whose name contains this.
    #[arg(long, global = true)]
    adapter: Option<String>,
}

#[derive(Subcommand)]
enum Command {
    /// Goes on from a prompt.
    #[command(after_help = llama::format::HELP)]
    Generate(commands::generate::Options),
    /// Conversations that can be forked, taken back, saved and loaded.
    #[command(after_help = llama::format::HELP)]
    Chat(commands::chat::Options),
    /// Losses of a real text with each format of the cache, against those with 16 bits.
    #[command(after_help = llama::format::HELP)]
    Perplexity(commands::perplexity::Options),
    /// Whether pass keys that are hidden in a long text are found again.
    #[command(after_help = llama::format::HELP)]
    Needle(commands::needle::Options),
    /// Cache paradigms side by side: memory, perplexity, pass keys, time per token.
    Compare(commands::compare::Options),
    /// Keys and values by token and channel, as a picture.
    Heatmap(commands::heatmap::Options),
    /// Tokens per second against the number of sequences, and where a token's time goes.
    #[command(after_help = llama::format::HELP)]
    Throughput(commands::throughput::Options),
}

fn main() -> Result<()> {
    env_logger::init();
    let Arguments { model, command } = Arguments::parse();
    match command {
        Command::Generate(options) => commands::generate::run(&model, options),
        Command::Chat(options) => commands::chat::run(&model, options),
        Command::Perplexity(options) => commands::perplexity::run(&model, options),
        Command::Needle(options) => commands::needle::run(&model, options),
        Command::Compare(options) => commands::compare::run(&model, options),
        Command::Heatmap(options) => commands::heatmap::run(&model, options),
        Command::Throughput(options) => commands::throughput::run(&model, options),
    }
}

impl ModelOptions {
    fn path(&self) -> Result<PathBuf> {
        if let Some(path) = &self.model {
            return Ok(path.clone());
        }
        let chosen = target().join("model/default");
        let path = std::fs::read_to_string(&chosen)
            .context("no model: `cargo xtask model` fetches one, `cargo xtask model FILE` or --model FILE takes any other")?;
        Ok(path.trim().into())
    }

    /// The model and its tokenizer, with a bar that shows how much of it is there.
    fn load(&self, room: Room) -> Result<(Model, Tokenizer)> {
        let mut file = Gguf::open(&self.path()?)?;
        let context = file.shape()?.context;
        let tokenizer = Tokenizer::new(&file)?;
        let bar = ProgressBar::new(0).with_message("weights");
        if room.context > context {
            eprintln!("the model was trained for {context} tokens, this asks for {}", room.context);
        }
        let room = Room { context: if room.context == 0 { context } else { room.context }, ..room };
        let model = Model::load(Gpu::open(self.adapter.as_deref())?, file, room, |done, all| {
            bar.set_length(all.into());
            bar.set_position(done.into());
        })?;
        bar.finish_and_clear();
        Ok((model, tokenizer))
    }
}

/// Where builds and results go.
fn target() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR")
        .map_or_else(|| PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../target")), PathBuf::from)
}
