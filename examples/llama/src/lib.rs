//! A Llama or Qwen2 model that runs wholly on wgpu around kivi-wgpu's cache, as an inference engine would
//! embed it.
//!
//! - [`gguf`]: the file; [`shape`]: what the model is; [`tokenizer`], [`template`]: its tokens and its chat
//!   template.
//! - [`model`]: weights and kernels, and the recording of a step.
//! - [`generate`]: prompts, sampling, the loop of decoding. [`score`]: losses and divergences of texts.

use std::fmt::Arguments;
use std::io::Write;

pub mod format;
pub mod generate;
pub mod gguf;
pub mod gpu;
pub mod kernel;
mod loader;
pub mod model;
pub mod products;
pub mod profile;
pub mod room;
pub mod score;
pub mod shape;
pub mod template;
pub mod tokenizer;

/// Prints on stderr, or not where nobody reads.
pub fn complain(what: Arguments<'_>) {
    let _ = writeln!(std::io::stderr(), "{what}");
}
