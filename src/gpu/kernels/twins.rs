//! The twins of records in WGSL: a struct of the same fields, its size in words, and a function that reads
//! one.

use crate::plan::{BlockCopy, PackBlock, Record, TokenCopy, TokenUnpack, TokenWrite};
use crate::schedule::{RowTile, Split, TileRun};
use std::fmt::Write;

/// A record's name and WGSL.
struct Twin {
    name: &'static str,
    text: String,
}

impl Twin {
    fn of<T: Record>() -> Twin {
        let (name, words) = (T::NAME, T::WORDS);
        let snake = snake_case(name);
        let fields: String = T::FIELDS.iter().map(|field| format!("    {field}: u32,\n")).collect();
        let reads: Vec<String> = (0..words).map(|word| format!("plan[at + {word}u]")).collect();
        let mut text = format!("struct {name} {{\n{fields}}}\n");
        let _ = writeln!(text, "const {}_WORDS: u32 = {words}u;", snake.to_uppercase());
        let _ = writeln!(
            text,
            "fn {snake}_at(at: u32) -> {name} {{\n    return {name}({});\n}}",
            reads.join(", ")
        );
        Twin { name, text }
    }
}

/// WGSL of the records with these names, each once.
pub(super) fn twins(names: impl Iterator<Item = &'static str>) -> String {
    let names: Vec<&str> = names.collect();
    let all = [
        Twin::of::<TokenWrite>(),
        Twin::of::<PackBlock>(),
        Twin::of::<RowTile>(),
        Twin::of::<Split>(),
        Twin::of::<TileRun>(),
        Twin::of::<TokenCopy>(),
        Twin::of::<BlockCopy>(),
        Twin::of::<TokenUnpack>(),
    ];
    all.into_iter().filter(|twin| names.contains(&twin.name)).map(|twin| twin.text).collect()
}

fn snake_case(name: &str) -> String {
    let mut snake = String::new();
    for (at, c) in name.chars().enumerate() {
        if c.is_ascii_uppercase() && at > 0 {
            snake.push('_');
        }
        snake.push(c.to_ascii_lowercase());
    }
    snake
}
