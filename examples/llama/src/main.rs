//! Commands around a real model: see `--help`.

mod commands;
mod pictures;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use indicatif::ProgressBar;
use kivi_wgpu::KvCache;
use llama::format::Format;
use llama::gguf::Gguf;
use llama::gpu::Gpu;
use llama::model::{Model, cache_config};
use llama::room::{Asked, Room};
use llama::shape::Shape;
use llama::tokenizer::Tokenizer;
use std::path::PathBuf;
use std::process::ExitCode;

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
    /// The adapter with this index, or the first whose name contains this; a name that none has lists them.
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

fn main() -> ExitCode {
    env_logger::init();
    let Arguments { model, command } = Arguments::parse();
    match run(&model, command) {
        Err(error) if !commands::output::is_closed_pipe(&error) => {
            llama::complain(format_args!("{error:#}"));
            ExitCode::FAILURE
        }
        // Who has read enough closes the pipe.
        _ => ExitCode::SUCCESS,
    }
}

fn run(model: &ModelOptions, command: Command) -> Result<()> {
    match command {
        Command::Generate(options) => commands::generate::run(model, options),
        Command::Chat(options) => commands::chat::run(model, options),
        Command::Perplexity(options) => commands::perplexity::run(model, options),
        Command::Needle(options) => commands::needle::run(model, options),
        Command::Compare(options) => commands::compare::run(model, options),
        Command::Heatmap(options) => commands::heatmap::run(model, options),
        Command::Throughput(options) => commands::throughput::run(model, options),
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

    /// The model's file, its weights not read yet, and the device.
    fn open(&self) -> Result<Opened> {
        let path = self.path()?;
        let mut file = Gguf::open(&path)?;
        let shape = Shape::of(&mut file).with_context(|| format!("{}", path.display()))?;
        let tokenizer = Tokenizer::new(&file).with_context(|| format!("{}", path.display()))?;
        Ok(Opened { file, shape, tokenizer, gpu: Gpu::open(self.adapter.as_deref())? })
    }
}

/// A model of which everything is known but its weights: what options ask for is checked now.
struct Opened {
    file: Gguf,
    shape: Shape,
    tokenizer: Tokenizer,
    gpu: Gpu,
}

impl Opened {
    /// Room for so many tokens and rows of logits in a step, and for a context.
    fn room(&self, tokens: Asked, logits: Asked, context: Asked) -> Result<Room> {
        Room::new(&self.gpu, &self.shape, tokens, logits, context)
    }

    /// Whether a cache in each of these formats can hold a sequence of the whole context, among so many
    /// sequences. `options` are those that have a part in it, for messages.
    fn check(&self, room: Room, formats: &[Format], sequences: Asked, options: &str) -> Result<()> {
        let config = cache_config(&self.shape, room).with_capacity(room.context);
        for format in formats {
            let config =
                format.apply(config.clone()).with_max_sequences(sequences.within(65535, "sequences")?);
            KvCache::check(&config, &self.gpu.device.limits()).with_context(|| {
                let Room { tokens, context, .. } = room;
                let Asked { size, option } = sequences;
                let options = if option.is_empty() { options.into() } else { format!("{option}, {options}") };
                format!(
                    "{options}: a cache in the format {} for {context} positions, {tokens} tokens in a step and \
                     {size} sequences cannot be made",
                    format.name
                )
            })?;
        }
        Ok(())
    }

    /// Reads the weights, with a bar that shows how much of them is there.
    fn load(self, room: Room) -> Result<(Model, Tokenizer)> {
        let bar = ProgressBar::new(0).with_message("weights");
        let model = Model::load(self.gpu, self.file, self.shape, room, |done, all| {
            bar.set_length(all.into());
            bar.set_position(done.into());
        })?;
        bar.finish_and_clear();
        Ok((model, self.tokenizer))
    }
}

/// Where builds and results go.
fn target() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR")
        .map_or_else(|| PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../target")), PathBuf::from)
}
