//! `generate`: goes on from a prompt.

use crate::ModelOptions;
use crate::commands::output::{say, show};
use crate::commands::{READ, SamplingOptions, report};
use anyhow::{Context as _, Result, ensure};
use llama::format::Format;
use llama::generate::{Request, Sampler, generate};
use llama::room::asked;
use llama::template::Message;
use std::path::PathBuf;
use std::time::Instant;

#[derive(clap::Args)]
pub struct Options {
    /// What to go on from; without it and without --file: Why is the sky blue?
    prompt: Option<String>,
    /// A file to go on from, before the prompt.
    #[arg(long)]
    file: Option<PathBuf>,
    /// The prompt is text to be continued, not a message to be answered.
    #[arg(long)]
    raw: bool,
    /// The cache's format.
    #[arg(long, default_value = "bits3")]
    format: Format,
    /// Tokens to write at most.
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..))]
    limit: u32,
    /// Positions that there is room for; 0: as many as the model was trained for.
    #[arg(long, default_value_t = 0)]
    context: u32,
    #[command(flatten)]
    sampling: SamplingOptions,
}

pub fn run(model: &ModelOptions, options: Options) -> Result<()> {
    let opened = model.open()?;
    let room = opened.room(asked(READ, ""), asked(1u32, ""), asked(options.context, "--context"))?;
    opened.check(room, std::slice::from_ref(&options.format), asked(1u32, ""), "--format, --context")?;
    let mut prompt = match &options.file {
        Some(path) => std::fs::read_to_string(path).with_context(|| format!("{}", path.display()))?,
        None => String::new(),
    };
    match (&options.prompt, &options.file) {
        (Some(text), _) => prompt.push_str(text),
        (None, Some(_)) => {}
        (None, None) => prompt.push_str("Why is the sky blue?"),
    }
    let prompt = if options.raw {
        opened.tokenizer.encode(&prompt)?
    } else {
        opened.tokenizer.conversation(&[Message { role: "user".into(), content: prompt }], true)?
    };
    ensure!(!prompt.is_empty(), "there is nothing to go on from: the prompt is empty");
    ensure!(
        prompt.len() <= room.context as usize,
        "a prompt of {} tokens does not fit the context of {}: shorten it, or give --context more",
        prompt.len(),
        room.context
    );
    let (model, tokenizer) = opened.load(room)?;
    let (mut context, sequence) = model.context_with_sequence(&options.format.apply(model.cache_config()))?;
    let sampler = Sampler::new(&model)?;
    let mut text = tokenizer.streaming();
    let (start, mut first, mut count) = (Instant::now(), None, 0);
    let (sampling, limit) = (options.sampling.get(), options.limit);
    let request = Request { prompt: &prompt, sampling, limit, ends: &tokenizer.ends, stop: &|| false };
    generate(&model, &sampler, &mut context, sequence, request, |token| {
        first.get_or_insert_with(|| start.elapsed());
        count += 1;
        show(format_args!("{}", text.push(token)?))?;
        Ok(true)
    })?;
    say!("{}\n", text.finish()?);
    let first = first.unwrap_or_default();
    say!("{} on {}", model.shape.name, model.gpu.name());
    say!("prompt: {} tokens in {:.2} s", prompt.len(), first.as_secs_f64());
    if count > 1 {
        let seconds = (start.elapsed() - first).as_secs_f64();
        say!("{count} tokens, {:.1} tokens/s", f64::from(count - 1) / seconds);
    }
    say!("{}", report(&model, &context, sequence, &options.format)?);
    Ok(())
}
