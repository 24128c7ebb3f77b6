//! `heatmap`: keys and values as the method sees them.

use crate::ModelOptions;
use crate::commands::output::Output;
use crate::commands::{READ, text as read_text};
use crate::pictures::{Panel, bitmaps};
use anyhow::{Result, bail};
use half::f16;
use llama::format::Format;
use llama::generate::read;
use llama::room::asked;
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct Options {
    /// Layers, separated by commas; without it the first, the middle one and the last.
    #[arg(long, value_delimiter = ',')]
    layers: Vec<u32>,
    /// Tokens of the text.
    #[arg(long, default_value_t = 384, value_parser = clap::value_parser!(u32).range(8..))]
    tokens: u32,
    /// The text; without it a part of Jane Austen's Emma.
    #[arg(long)]
    text: Option<PathBuf>,
    #[command(flatten)]
    output: Output,
}

pub fn run(model: &ModelOptions, options: Options) -> Result<()> {
    let opened = model.open()?;
    let tokens = asked(options.tokens, "--tokens");
    let room = opened.room(asked(READ, ""), asked(1u32, ""), tokens)?;
    // A window that holds all of them.
    let sixteen: Format = format!("16-w{}", options.tokens).parse()?;
    opened.check(room, std::slice::from_ref(&sixteen), asked(1u32, ""), "--tokens")?;
    let tokens = read_text(&opened.tokenizer, options.text.as_deref(), options.tokens as usize, "--tokens")?;
    let last = opened.shape.layers - 1;
    let layers = if options.layers.is_empty() { vec![0, last / 2, last] } else { options.layers };
    if let Some(layer) = layers.iter().find(|layer| **layer > last) {
        bail!("--layers {layer}: there is no such layer, the last is {last}");
    }
    let (model, _) = opened.load(room)?;
    let (mut context, sequence) = model.context_with_sequence(&sixteen.apply(model.cache_config()))?;
    let encoder = read(&model, &mut context, sequence, &tokens)?;
    model.gpu.submit(encoder);
    let (mut panels, mut text) = (Vec::new(), String::new());
    for layer in layers {
        let state = context.cache.submit_and_read_state_blocking(layer, sequence)?;
        let width = (model.shape.kv_heads * model.shape.head_dim) as usize;
        for (what, words) in [("K", &state.window.keys), ("V", &state.window.values)] {
            let values: Vec<f64> =
                words.iter().flat_map(|&w| [w as u16, (w >> 16) as u16]).map(magnitude).collect();
            let rows: Vec<&[f64]> = values.chunks_exact(width).collect();
            let largest = values.iter().copied().fold(f64::MIN_POSITIVE, f64::max);
            text += &format!("{}\n", outliers(what, layer, &rows));
            // The square root shows what is small, too.
            let cells = rows.iter().map(|row| row.iter().map(|x| (x / largest).sqrt()).collect()).collect();
            panels.push(Panel { title: format!("|{what}| of layer {layer}, up to {largest:.1}"), cells });
        }
    }
    let title = format!("{}: keys (after RoPE) and values of {} tokens", model.shape.name, options.tokens);
    let draw = || bitmaps(&title, &panels, "channel, head after head", "token, from above");
    options.output.publish("heatmap", &text, Some(draw))
}

fn magnitude(bits: u16) -> f64 {
    f16::from_bits(bits).to_f64().abs()
}

/// What the picture shows, in numbers: how far the largest channel and token stand out.
fn outliers(what: &str, layer: u32, rows: &[&[f64]]) -> String {
    let width = rows[0].len();
    let mean = |values: &mut dyn Iterator<Item = f64>| {
        let (sum, count) = values.fold((0.0, 0), |(sum, count), x| (sum + x, count + 1));
        sum / f64::from(count)
    };
    let stands_out = |mut means: Vec<f64>| {
        let largest = means.iter().copied().fold(0.0, f64::max);
        largest / crate::commands::median(&mut means)
    };
    let channels = (0..width).map(|c| mean(&mut rows.iter().map(|row| row[c]))).collect();
    // The first tokens are sinks, of another kind.
    let tokens = rows.iter().skip(4).map(|row| mean(&mut row.iter().copied())).collect();
    format!(
        "|{what}| of layer {layer}: the largest channel's mean is {:.1} times the median channel's; the largest token's {:.1} times the median token's",
        stands_out(channels),
        stands_out(tokens)
    )
}
