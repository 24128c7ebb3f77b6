//! `throughput`: tokens per second of the whole model against the number of sequences, and where a token's
//! time goes.

use crate::ModelOptions;
use crate::commands::output::{Output, show};
use crate::commands::{median, mib, text};
use anyhow::{Result, bail};
use kivi_wgpu::{Error, SequenceId};
use llama::format::Format;
use llama::generate::{Sampler, Sampling, read};
use llama::model::{Context, Input, Model, Wanted};
use llama::profile::Profile;
use llama::room::asked;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Instant;

#[derive(clap::Args)]
pub struct Options {
    /// Formats, separated by commas.
    #[arg(long, value_delimiter = ',', default_value = "16,kivi4,kivi2")]
    formats: Vec<Format>,
    /// Numbers of sequences, separated by commas.
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8,16,32")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=65535))]
    sequences: Vec<u32>,
    /// Tokens that each sequence holds.
    #[arg(long, default_value_t = 2048)]
    context: u32,
    /// Decode steps that are timed, per format and number of sequences; the formats take turns.
    #[arg(long, default_value = "5")]
    steps: NonZeroU32,
    /// The text that the sequences hold; without it a part of Jane Austen's Emma.
    #[arg(long)]
    text: Option<PathBuf>,
    /// Tokens of a step while the text is read.
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..))]
    chunk: u32,
    #[command(flatten)]
    output: Output,
}

/// A cache with some sequences in it.
pub struct Crowd {
    context: Context,
    sequences: Vec<SequenceId>,
}

/// Medians, in milliseconds.
pub struct Timing {
    /// From token to token on the host.
    pub step: f64,
    /// Of the GPU's time, by [`Part`](llama::profile::Part); nothing without timestamps.
    pub parts: Option<[f64; 3]>,
}

impl Crowd {
    /// One sequence that has read `tokens`; there will be `most` sequences.
    pub fn new(
        model: &Model,
        sampler: &Sampler,
        format: &Format,
        tokens: &[u32],
        most: u32,
    ) -> Result<Crowd> {
        let config = format.apply(model.cache_config()).with_max_sequences(most);
        let (mut context, sequence) = model.context_with_sequence(&config)?;
        let encoder = read(model, &mut context, sequence, tokens)?;
        sampler.submit(&model.gpu, encoder, &[Sampling::GREEDY]).wait(&model.gpu)?;
        Ok(Crowd { context, sequences: vec![sequence] })
    }

    /// One sequence with what it has read. It goes on from whatever token the model's buffer holds.
    pub fn of(context: Context, sequence: SequenceId) -> Crowd {
        Crowd { context, sequences: vec![sequence] }
    }

    /// Which of the library's kernels attend.
    pub fn kernels(&self) -> String {
        format!("{:?}", self.context.cache.variant())
    }

    fn inputs(&self) -> Vec<Input<'static>> {
        self.sequences.iter().map(|&sequence| Input { sequence, tokens: None }).collect()
    }
}

pub fn run(model: &ModelOptions, options: Options) -> Result<()> {
    let mut counts = options.sequences.clone();
    // Sequences are only ever added.
    counts.sort_unstable();
    counts.dedup();
    let most = counts.last().copied().unwrap_or(1);
    if options.context < options.chunk {
        bail!("--context must not be below --chunk ({})", options.chunk);
    }
    let opened = model.open()?;
    let sequences = asked(most, "--sequences");
    let tokens = if options.chunk < most { sequences } else { asked(options.chunk, "--chunk") };
    // A format that forgets reads the last chunk twice.
    let context = u64::from(options.context)
        + 2 * u64::from(options.chunk)
        + positions(options.steps) * counts.len() as u64;
    let context = asked(context, "--context with --chunk and --steps");
    let room = opened.room(tokens, sequences, context)?;
    opened.check(room, &options.formats, sequences, "--formats, --chunk, --context, --steps")?;
    let tokens = text(&opened.tokenizer, options.text.as_deref(), options.context as usize, "--context")?;
    let (model, _) = opened.load(room)?;
    let sampler = Sampler::new(&model)?;

    let mut crowds = Vec::new();
    for format in &options.formats {
        crowds.push(Crowd::new(&model, &sampler, format, &tokens, most)?);
    }
    let mut table = format!(
        "{} on {}; {} tokens in each sequence; medians of {} decode steps\n\n",
        model.shape.name,
        model.gpu.name(),
        options.context,
        options.steps
    );
    table += "| format | sequences | cache content | step, ms | tokens/s | layers without cache, ms | cache, ms | logits, ms | cache's part | attention kernels |\n";
    table += "|---|---|---|---|---|---|---|---|---|---|\n";
    show(format_args!("{table}"))?;
    // A row is saved before it is shown: what was measured stays, whoever reads.
    let mut more = |row: String| {
        table += &row;
        let saved = options.output.save("throughput.md", &table).map(drop);
        saved.and(show(format_args!("{row}")))
    };
    for count in counts {
        for crowd in &mut crowds {
            grow(&model, crowd, count)?;
        }
        let timings = timings(&model, &sampler, &mut crowds, options.steps)?;
        for (index, Timing { step, parts }) in timings.into_iter().enumerate() {
            let parts = parts.map_or("– | – | – | –".to_string(), |[layers, cache, head]| {
                let part = 100.0 * cache / (layers + cache + head);
                format!("{layers:.2} | {cache:.2} | {head:.2} | {part:.0} %")
            });
            let memory = crowds[index].context.cache.memory().all_layers();
            let row = format!(
                "| {} | {count} | {:.2} MiB | {step:.2} | {:.1} | {parts} | {} |\n",
                options.formats[index].name,
                mib(memory.total() - memory.slack),
                f64::from(count) * 1e3 / step,
                crowds[index].kernels()
            );
            more(row)?;
        }
    }
    more(reading(&model, &options.formats, &mut crowds, &tokens[..options.chunk as usize])?)
}

/// Decode steps of all crowds, which take turns.
///
/// A turn is three steps as a host decodes that is in a hurry: each is recorded and submitted before the
/// token of the one before is waited for. What passes between the tokens of the first and the second is a
/// step's time: the longer one of recording and running. The third is profiled.
pub fn timings(
    model: &Model,
    sampler: &Sampler,
    crowds: &mut [Crowd],
    turns: NonZeroU32,
) -> Result<Vec<Timing>> {
    let gpu = &model.gpu;
    let mut walls = vec![Vec::new(); crowds.len()];
    let mut parts = vec![[const { Vec::new() }; 3]; crowds.len()];
    let mut profile = Profile::new(gpu, model.shape.layers).ok();
    // The first turn is for warming up.
    for turn in 0..=turns.get() {
        for (index, crowd) in crowds.iter_mut().enumerate() {
            let inputs = crowd.inputs();
            let choices = vec![Sampling::GREEDY; inputs.len()];
            let mut record = |profile| {
                let mut encoder = gpu.encoder();
                model.step(&mut crowd.context, &mut encoder, &inputs, Wanted::Last, profile)?;
                anyhow::Ok(encoder)
            };
            let first = sampler.submit(gpu, record(None)?, &choices);
            let second = sampler.submit(gpu, record(None)?, &choices);
            first.wait(gpu)?;
            let start = Instant::now();
            let encoder = record(profile.as_mut())?;
            let ticks = match &profile {
                Some(profile) => Some(profile.submit(gpu, encoder)),
                None => {
                    gpu.submit(encoder);
                    None
                }
            };
            second.wait(gpu)?;
            let took = start.elapsed().as_secs_f64() * 1e3;
            let times = match (&mut profile, ticks) {
                (Some(profile), Some(ticks)) => Some(profile.times(gpu, ticks)?),
                _ => None,
            };
            if turn > 0 {
                walls[index].push(took);
                let times = times.into_iter().flatten();
                parts[index].iter_mut().zip(times).for_each(|(part, time)| part.push(time));
            }
        }
    }
    let timing = |(mut walls, mut parts): (Vec<f64>, [Vec<f64>; 3])| Timing {
        step: median(&mut walls),
        parts: (!parts[0].is_empty()).then(|| parts.each_mut().map(|times| median(times))),
    };
    Ok(walls.into_iter().zip(parts).map(timing).collect())
}

/// A table of what it takes to read more tokens, which are taken back.
fn reading(model: &Model, formats: &[Format], crowds: &mut [Crowd], tokens: &[u32]) -> Result<String> {
    let mut table = format!(
        "\n| format | reading {} more tokens (once), ms | of it cache, ms |\n|---|---|---|\n",
        tokens.len()
    );
    let Ok(mut profile) = Profile::new(&model.gpu, model.shape.layers) else { return Ok(String::new()) };
    for (format, Crowd { context, sequences }) in formats.iter().zip(crowds) {
        let mut times = Vec::new();
        // The first is for warming up.
        for _ in 0..2 {
            let mut encoder = model.gpu.encoder();
            let input = Input { sequence: sequences[0], tokens: Some(tokens) };
            model.step(context, &mut encoder, &[input], Wanted::Nothing, Some(&mut profile))?;
            let ticks = profile.submit(&model.gpu, encoder);
            times.push(profile.times(&model.gpu, ticks)?);
            let mut encoder = model.gpu.encoder();
            let held = context.cache.tokens(sequences[0])? - tokens.len() as u32;
            match context.cache.truncate(&mut encoder, sequences[0], held) {
                Ok(_) => {
                    model.gpu.submit(encoder);
                }
                // A format that forgets goes on.
                Err(Error::TruncateIntoEvicted { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
        let [layers, cache, _] = times[1];
        table += &format!("| {} | {:.1} | {cache:.1} |\n", format.name, layers + cache);
    }
    Ok(table)
}

/// Positions that so many timed turns take.
pub fn positions(turns: NonZeroU32) -> u64 {
    3 * (u64::from(turns.get()) + 1)
}

/// Makes sequences until there are `count`, each with pages of its own: forks would share them, and a GPU's
/// caches with them.
fn grow(model: &Model, crowd: &mut Crowd, count: u32) -> Result<()> {
    if crowd.sequences.len() >= count as usize {
        return Ok(());
    }
    let snapshot = crowd.context.cache.submit_and_save_blocking(crowd.sequences[0])?;
    while crowd.sequences.len() < count as usize {
        let mut encoder = model.gpu.encoder();
        let (sequence, _) = crowd.context.cache.load(&mut encoder, &snapshot)?;
        model.gpu.submit(encoder);
        model.gpu.wait()?;
        crowd.sequences.push(sequence);
    }
    Ok(())
}
