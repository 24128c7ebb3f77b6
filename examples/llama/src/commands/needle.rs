//! `needle`: whether a pass key that is hidden in a long text is found again, with each format of the cache.

use crate::ModelOptions;
use crate::commands::output::Output;
use crate::commands::text;
use crate::pictures::{Panel, heat_maps};
use anyhow::{Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use llama::format::Format;
use llama::generate::{Request, Sampler, Sampling, generate, read};
use llama::model::Model;
use llama::room::asked;
use llama::tokenizer::Tokenizer;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::fmt;
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct Options {
    /// Formats, separated by commas; 16 bits come first in any case.
    #[arg(long, value_delimiter = ',', default_value = "kivi2,bits2.25")]
    formats: Vec<Format>,
    /// Lengths of the text in tokens, separated by commas.
    #[arg(long, value_delimiter = ',', default_value = "512,1024,2048")]
    lengths: Vec<usize>,
    /// Where the key is: parts of the text before it, separated by commas.
    #[arg(long, value_delimiter = ',', default_value = "0.1,0.3,0.5,0.7,0.9")]
    depths: Vec<f64>,
    /// Keys per place.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    trials: u16,
    /// The text; without it a part of Jane Austen's Emma.
    #[arg(long)]
    text: Option<PathBuf>,
    /// Tokens of a step while the text is read.
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..))]
    chunk: u32,
    #[command(flatten)]
    output: Output,
}

/// What is asked, of all formats alike.
pub struct Grid {
    pub lengths: Vec<usize>,
    pub depths: Vec<f64>,
    pub trials: usize,
}

impl Grid {
    pub fn new(lengths: Vec<usize>, depths: Vec<f64>, trials: usize) -> Result<Grid> {
        if let Some(depth) = depths.iter().find(|depth| !(0.0..=1.0).contains(*depth)) {
            bail!("{depth} is no part of a text that a key can stand after: 0 to 1");
        }
        if lengths.contains(&0) {
            bail!("no key can be hidden in a text of 0 tokens: 1 or more");
        }
        Ok(Grid { lengths, depths, trials })
    }

    pub fn longest(&self) -> usize {
        self.lengths.iter().copied().max().unwrap_or_default()
    }

    /// Tokens that one format's grid reads.
    pub fn cost(&self) -> u64 {
        let after: f64 =
            self.lengths.iter().flat_map(|&l| self.depths.iter().map(move |d| l as f64 * (1.0 - d))).sum();
        self.longest() as u64 + (after * self.trials as f64) as u64
    }
}

/// Room for what comes besides the text: key, question, answer.
pub const BESIDES: u64 = 96;
const ANSWER: u32 = 10;

pub fn run(model: &ModelOptions, options: Options) -> Result<()> {
    let grid = Grid::new(options.lengths, options.depths, options.trials.into())?;
    let formats = Format::after_sixteen(&options.formats)?;
    let opened = model.open()?;
    let context = (grid.longest() as u64).saturating_add(BESIDES);
    let room = opened.room(asked(options.chunk, "--chunk"), asked(1u32, ""), asked(context, "--lengths"))?;
    opened.check(room, &formats, asked(2u32, ""), "--formats, --chunk, --lengths")?;
    let haystack = text(&opened.tokenizer, options.text.as_deref(), grid.longest(), "--lengths")?;
    let (model, tokenizer) = opened.load(room)?;
    let bar = ProgressBar::new(grid.cost() * formats.len() as u64)
        .with_style(ProgressStyle::with_template("{bar:40} {pos}/{len} tokens, {eta} left")?);
    let mut table = format!("{} on {}\n\n", model.shape.name, model.gpu.name());
    table += &format!("| format | {} |\n|---|---|---|\n", Rates::HEADER);
    let (mut panels, mut exact) = (Vec::new(), Vec::new());
    for format in &formats {
        let found = search(&model, &tokenizer, format, &haystack, &grid, |tokens| bar.inc(tokens))?;
        if exact.is_empty() {
            exact = found.clone();
        }
        table += &format!("| {} | {} |\n", format.name, Rates::new(&found, &exact));
        let rate = |found: &[bool]| found.iter().filter(|&&f| f).count() as f64 / found.len() as f64;
        let cells = (0..grid.depths.len())
            .map(|depth| (0..grid.lengths.len()).map(|length| rate(&found[length][depth])).collect())
            .collect();
        panels.push(Panel { title: format.name.clone(), cells });
    }
    bar.finish_and_clear();
    let lengths = grid.lengths.iter().map(usize::to_string).collect::<Vec<_>>();
    let depths = grid.depths.iter().map(|d| format!("{:.0} %", 100.0 * d)).collect::<Vec<_>>();
    let draw = || heat_maps("Pass keys found, by length and depth", &panels, &lengths, &depths);
    options.output.publish("needle", &table, Some(draw))
}

/// How many keys were found, of all and of those that 16 bits find.
pub struct Rates {
    found: [usize; 2],
    of: [usize; 2],
}

impl Rates {
    /// The columns that it fills.
    pub const HEADER: &str = "keys found | of those that 16 bits find";

    pub fn new(found: &[Vec<Vec<bool>>], exact: &[Vec<Vec<bool>>]) -> Rates {
        let flat = |grid: &[Vec<Vec<bool>>]| grid.concat().concat();
        let (found, exact) = (flat(found), flat(exact));
        let count = |found: &[bool]| found.iter().filter(|&&f| f).count();
        let both = found.iter().zip(&exact).filter(|(f, e)| **f && **e).count();
        Rates { found: [count(&found), both], of: [found.len(), count(&exact)] }
    }
}

impl fmt::Display for Rates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ([all, both], [of_all, of_exact]) = (self.found, self.of);
        write!(f, "{all} of {of_all} | {both} of {of_exact}")
    }
}

/// Whether each key was found, `[length][depth][trial]`, in a haystack of at least the longest length. The
/// text before a key is read once, and forked for each length and trial.
pub fn search(
    model: &Model,
    tokenizer: &Tokenizer,
    format: &Format,
    haystack: &[u32],
    grid: &Grid,
    mut progress: impl FnMut(u64),
) -> Result<Vec<Vec<Vec<bool>>>> {
    let sampler = Sampler::new(model)?;
    let (mut context, base) =
        model.context_with_sequence(&format.apply(model.cache_config()).with_max_sequences(2))?;
    let mut places: Vec<(usize, usize, usize)> = Vec::new();
    for (l, &length) in grid.lengths.iter().enumerate() {
        for (d, &depth) in grid.depths.iter().enumerate() {
            // After the first token, which may be the one that begins a text.
            places.push(((length as f64 * depth).max(1.0) as usize, l, d));
        }
    }
    places.sort_unstable();
    let mut found = vec![vec![vec![false; grid.trials]; grid.depths.len()]; grid.lengths.len()];
    let mut read_so_far = 0;
    for (at, l, d) in places {
        if at > read_so_far {
            let encoder = read(model, &mut context, base, &haystack[read_so_far..at])?;
            model.gpu.submit(encoder);
            model.gpu.wait()?;
            progress((at - read_so_far) as u64);
            read_so_far = at;
        }
        for (trial, found) in found[l][d].iter_mut().enumerate() {
            // The same keys for every format.
            let mut random = StdRng::seed_from_u64((l * 1000 + d * 100 + trial) as u64);
            let key = random.random_range(10_000..100_000).to_string();
            let hidden = format!("\n\nThe pass key is {key}. Remember it. {key} is the pass key.\n\n");
            let mut prompt = tokenizer.encode_part(&hidden)?;
            prompt.extend(&haystack[at..grid.lengths[l]]);
            prompt.extend(tokenizer.encode_part("\n\nWhat is the pass key? The pass key is")?);
            let mut encoder = model.gpu.encoder();
            let (fork, _) = context.cache.fork(&mut encoder, base)?;
            model.gpu.submit(encoder);
            let mut answer = Vec::new();
            let (sampling, ends) = (Sampling::GREEDY, &tokenizer.ends[..]);
            let request = Request { prompt: &prompt, sampling, limit: ANSWER, ends, stop: &|| false };
            generate(model, &sampler, &mut context, fork, request, |token| {
                answer.push(token);
                Ok(true)
            })?;
            *found = tokenizer.decode(&answer)?.contains(&key);
            context.cache.remove_sequence(fork)?;
            progress((grid.lengths[l] - at) as u64);
        }
    }
    Ok(found)
}
