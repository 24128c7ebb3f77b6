//! What a cache costs: any model, context and format; by default the tables of the README.

use kivi_wgpu::{Bits, CacheConfig};
use kivi_wgpu::{CacheBytes, cache_bytes};
use std::error::Error;

const HELP: &str = "\
cargo run --example memory -- [OPTIONS]

Without options it prints the README's tables. With --layers it prints one line for that model.

  --layers L --query-heads Q --kv-heads H --head-dim D
  --tokens N         context length (default 131072)
  --bits B           width of codes: 2, 4 or 8 (default 2)
  --group G          group size (default 32)
  --window W         residual window (default 128)
  --sinks S          sink tokens (default 0)";

const GIB: f64 = (1u64 << 30) as f64;

fn gib(bytes: u64) -> String {
    format!("{:.3}", bytes as f64 / GIB)
}

fn header() {
    println!(
        "| tokens | format | 16 bits, GiB | codes only, GiB | packed + window, GiB | allocated, GiB | smaller | format bits | resident bits |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
}

fn row(config: &CacheConfig, tokens: u32) -> Result<CacheBytes, Box<dyn Error>> {
    let b = cache_bytes(config, tokens)?;
    println!(
        "| {tokens} | {} bits, G = {}, W = {} | {} | {} | {} | {} | {:.2} × | {:.2} | {:.2} |",
        config.format.keys.bits.get(),
        config.format.group_size,
        config.format.residual_window,
        gib(b.sixteen_bit),
        gib(b.codes_only),
        gib(b.content()),
        gib(b.allocated()),
        b.ratio(),
        b.format_bits,
        b.resident_bits(),
    );
    Ok(b)
}

fn tables() -> Result<(), Box<dyn Error>> {
    println!(
        "The example that introduces this method elsewhere: 32 layers, 32 KV heads, head_dim 128, window 64\n"
    );
    header();
    let paper = CacheConfig::new(32, 32, 32, 128).with_residual_window(64);
    row(&paper, 131_072)?;
    for (name, layers, query_heads) in [("8B-class", 32, 32), ("70B-class", 80, 64)] {
        println!("\n{name}: {layers} layers, {query_heads} query heads, 8 KV heads, head_dim 128\n");
        header();
        for tokens in [8192, 32_768, 131_072] {
            let config = CacheConfig::new(layers, query_heads, 8, 128);
            row(&config, tokens)?;
            row(&config.clone().with_group_size(64), tokens)?;
            row(&config.clone().with_bits(Bits::Four, Bits::Four), tokens)?;
        }
    }
    println!(
        "\n\"Codes only\" is the figure often quoted: it leaves out parameters, window and padding. \"Allocated\" also counts the rest of the last \
         page, free ring slots, the staging buffer and the attention scratch."
    );
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    use lexopt::prelude::*;
    let (mut layers, mut query_heads, mut kv_heads, mut head_dim) = (0, 32, 8, 128);
    let (mut tokens, mut bits, mut group, mut window, mut sinks) = (131_072, 2, 32, 128, 0);
    let mut parser = lexopt::Parser::from_env();
    while let Some(arg) = parser.next()? {
        let target = match arg {
            Long("layers") => &mut layers,
            Long("query-heads") => &mut query_heads,
            Long("kv-heads") => &mut kv_heads,
            Long("head-dim") => &mut head_dim,
            Long("tokens") => &mut tokens,
            Long("bits") => &mut bits,
            Long("group") => &mut group,
            Long("window") => &mut window,
            Long("sinks") => &mut sinks,
            Long("help") | Short('h') => {
                println!("{HELP}");
                return Ok(());
            }
            _ => return Err(arg.unexpected().into()),
        };
        *target = parser.value()?.parse()?;
    }
    if layers == 0 {
        return tables();
    }
    let bits = Bits::from_u32(bits).ok_or("bits must be 2, 4, 8 or 16")?;
    let config = CacheConfig::new(layers, query_heads, kv_heads, head_dim)
        .with_bits(bits, bits)
        .with_group_size(group)
        .with_residual_window(window)
        .with_sink_tokens(sinks);
    header();
    row(&config, tokens).map(drop)
}
