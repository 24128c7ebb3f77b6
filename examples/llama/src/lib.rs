//! A Llama or Qwen2 model that runs wholly on wgpu around kivi-wgpu's cache, as an inference engine would
//! embed it.
//!
//! - [`gguf`]: the file; [`shape`]: what the model is; [`tokenizer`], [`template`]: its tokens and its chat
//!   template.
//! - [`model`]: weights and kernels, and the recording of a step.
//! - [`generate`]: prompts, sampling, the loop of decoding. [`score`]: losses and divergences of texts.

pub mod format;
pub mod generate;
pub mod gguf;
pub mod gpu;
pub mod model;
pub mod products;
pub mod profile;
pub mod room;
pub mod score;
pub mod shape;
pub mod template;
pub mod tokenizer;
