//! Prompts, sampling and the loop of decoding.

use crate::gpu::{Gpu, Reading};
use crate::kernel::Kernel;
use crate::model::{Context, Input, Model, Wanted};
use anyhow::{Result, bail};
use kivi_wgpu::{SequenceId, wgpu};

/// How a token is chosen. Twin: `Choice` in shaders/sample.wgsl.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Sampling {
    /// Divisor of the logits; 0 chooses the most likely token.
    pub temperature: f32,
    /// Only so many tokens are candidates, the most likely ones; 0: all.
    pub top_k: u32,
    /// Only the most likely tokens that hold this part of the probability together are candidates.
    pub top_p: f32,
    /// Of the random numbers; each position has its own.
    pub seed: u32,
}

impl Sampling {
    /// The most likely token.
    pub const GREEDY: Sampling = Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, seed: 0 };
}

/// Chooses tokens on the GPU.
pub struct Sampler {
    kernel: Kernel,
    choices: wgpu::Buffer,
    tokens: wgpu::Buffer,
}

impl Sampler {
    /// For a model's logits.
    pub fn new(model: &Model) -> Result<Sampler> {
        Sampler::over(&model.gpu, model.shape.vocabulary, &model.logits, &model.tokens)
    }

    /// For rows of logits of a vocabulary (a multiple of 4); `tokens` is what was chosen, one u32 per row.
    pub fn over(gpu: &Gpu, vocabulary: u32, logits: &wgpu::Buffer, tokens: &wgpu::Buffer) -> Result<Sampler> {
        let rows = logits.size() / (4 * u64::from(vocabulary));
        let choices = gpu.storage("choices", rows * size_of::<Sampling>() as u64)?;
        let constants = [("VOCABULARY", format!("{vocabulary}u"))];
        let pipeline = gpu.pipeline(
            "sample",
            &constants,
            &[include_str!("../shaders/row.wgsl"), include_str!("../shaders/sample.wgsl")],
        );
        let kernel = Kernel::new(gpu, &pipeline, &[logits, &choices, tokens]);
        Ok(Sampler { kernel, choices, tokens: tokens.clone() })
    }

    /// Submits the encoder of a step that has left a row of logits per choice. Each chosen token stays on the
    /// GPU as that row's next input, and is on its way to the host.
    pub fn submit(&self, gpu: &Gpu, mut encoder: wgpu::CommandEncoder, choices: &[Sampling]) -> Reading<u32> {
        gpu.queue.write_buffer(&self.choices, 0, bytemuck::cast_slice(choices));
        self.kernel.dispatch(&mut encoder.begin_compute_pass(&Default::default()), choices.len() as u32, 1);
        gpu.submit_and_read(encoder, &self.tokens, 0..choices.len() as u64 * 4)
    }
}

/// Reads tokens into a sequence, in steps as long as there is room for, and leaves the logits of the last.
/// Its encoder is returned and must be submitted.
pub fn read(
    model: &Model,
    context: &mut Context,
    sequence: SequenceId,
    tokens: &[u32],
) -> Result<wgpu::CommandEncoder> {
    let encoder = read_unless(model, context, sequence, tokens, &|| false)?;
    Ok(encoder.unwrap_or_else(|| model.gpu.encoder()))
}

/// The same, unless it is told to stop between two steps: then nothing is left to submit.
fn read_unless(
    model: &Model,
    context: &mut Context,
    sequence: SequenceId,
    tokens: &[u32],
    stop: &dyn Fn() -> bool,
) -> Result<Option<wgpu::CommandEncoder>> {
    let mut encoder = model.gpu.encoder();
    let mut last_but_one = None;
    let chunks = tokens.chunks(model.room.tokens as usize);
    let last = chunks.len().saturating_sub(1);
    for (index, chunk) in chunks.enumerate() {
        if index > 0 {
            let submitted = model.gpu.submit(std::mem::replace(&mut encoder, model.gpu.encoder()));
            // Not far ahead of the GPU, so that stopping is felt.
            if let Some(before) = last_but_one.replace(submitted) {
                model.gpu.wait_for(before)?;
            }
            if stop() {
                return Ok(None);
            }
        }
        let wanted = if index == last { Wanted::Last } else { Wanted::Nothing };
        model.step(context, &mut encoder, &[Input { sequence, tokens: Some(chunk) }], wanted, None)?;
    }
    Ok(Some(encoder))
}

/// What to write.
#[derive(Clone, Copy)]
pub struct Request<'a> {
    /// What is read first: the sequence's next tokens, at least one.
    pub prompt: &'a [u32],
    pub sampling: Sampling,
    /// Tokens to write at most.
    pub limit: u32,
    /// Tokens after which nothing more is written.
    pub ends: &'a [u32],
    /// Asked between steps: whether to stop, in the middle of the prompt too.
    pub stop: &'a dyn Fn() -> bool,
}

/// Reads a prompt and goes on from it. `each` is given every token, the end's too, and goes on if it returns
/// true.
///
/// While the host waits for a token and shows it, the GPU is at the next one already. The tokens of the
/// sequence are then the prompt and all tokens that were given to `each`, but perhaps the last.
pub fn generate(
    model: &Model,
    sampler: &Sampler,
    context: &mut Context,
    sequence: SequenceId,
    Request { prompt, sampling, limit, ends, stop }: Request<'_>,
    mut each: impl FnMut(u32) -> Result<bool>,
) -> Result<()> {
    let held = context.cache.tokens(sequence)?;
    if prompt.is_empty() {
        bail!("there is nothing to go on from: the prompt is empty");
    }
    let Some(room) = (model.room.context as usize).checked_sub(held as usize + prompt.len()) else {
        bail!(
            "a prompt of {} tokens after {held} does not fit the context of {}: shorten it, or give --context more",
            prompt.len(),
            model.room.context
        );
    };
    let at = |context: &Context| -> Result<Sampling> {
        // Another seed for each position, so that a position's choice does not depend on how it was reached.
        let position = context.cache.tokens(sequence)?;
        Ok(Sampling { seed: sampling.seed ^ position.wrapping_mul(0x9e37_79b9), ..sampling })
    };
    let limit = limit.min(room as u32 + 1);
    if limit == 0 {
        return Ok(());
    }
    let Some(encoder) = read_unless(model, context, sequence, prompt, stop)? else { return Ok(()) };
    let mut sampled = sampler.submit(&model.gpu, encoder, &[at(context)?]);
    for count in 1..=limit {
        let next = if count < limit {
            let mut encoder = model.gpu.encoder();
            model.step(context, &mut encoder, &[Input { sequence, tokens: None }], Wanted::Last, None)?;
            Some(sampler.submit(&model.gpu, encoder, &[at(context)?]))
        } else {
            None
        };
        let token = sampled.wait(&model.gpu)?[0];
        let goes_on = each(token)? && !ends.contains(&token) && !stop();
        match next {
            Some(next) if goes_on => sampled = next,
            Some(next) => {
                next.wait(&model.gpu)?;
                break;
            }
            None => break,
        }
    }
    Ok(())
}
