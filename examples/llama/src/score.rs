//! What a format costs in quality: losses of a real text, and divergence of next-token distributions from
//! those of another cache.

use crate::gpu::Gpu;
use crate::kernel::Kernel;
use crate::model::{Context, Input, Model, Wanted};
use anyhow::Result;
use kivi_wgpu::{SequenceId, wgpu};

/// Of one predicted token. Twin: `Score` in shaders/score.wgsl.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Score {
    /// −ln p of the token that came.
    pub loss: f32,
    /// KL divergence of the distribution from the reference's, in nats.
    pub divergence: f32,
    /// 1 if both rank the same token first.
    pub agrees: f32,
    /// 1 if the token that came is ranked first.
    pub right: f32,
}

/// Scores rows of a model's logits.
pub struct Scorer {
    kernel: Kernel,
    vocabulary: u32,
    logits: wgpu::Buffer,
    reference: wgpu::Buffer,
    targets: wgpu::Buffer,
    scores: wgpu::Buffer,
}

impl Scorer {
    /// For rows of logits of a vocabulary (a multiple of 4).
    pub fn new(gpu: &Gpu, vocabulary: u32, logits: &wgpu::Buffer) -> Result<Scorer> {
        let rows = logits.size() / (4 * u64::from(vocabulary));
        let reference = gpu.storage("reference logits", logits.size())?;
        let targets = gpu.storage("targets", rows * 4)?;
        let scores = gpu.storage("scores", rows * size_of::<Score>() as u64)?;
        let constants = [("VOCABULARY", format!("{vocabulary}u"))];
        let pipeline = gpu.pipeline(
            "score",
            &constants,
            &[include_str!("../shaders/row.wgsl"), include_str!("../shaders/score.wgsl")],
        );
        let kernel = Kernel::new(gpu, &pipeline, &[logits, &reference, &targets, &scores]);
        Ok(Scorer { kernel, logits: logits.clone(), reference, targets, scores, vocabulary })
    }

    /// Submits the encoder of a step that has left logits, waits, and returns their scores against the tokens
    /// that came; `is_reference` makes them what later ones are compared with.
    pub fn submit(
        &self,
        gpu: &Gpu,
        mut encoder: wgpu::CommandEncoder,
        targets: &[u32],
        is_reference: bool,
    ) -> Result<Vec<Score>> {
        gpu.queue.write_buffer(&self.targets, 0, bytemuck::cast_slice(targets));
        let rows = targets.len() as u64;
        if is_reference {
            let bytes = rows * u64::from(self.vocabulary) * 4;
            encoder.copy_buffer_to_buffer(&self.logits, 0, &self.reference, 0, bytes);
        }
        self.kernel.dispatch(&mut encoder.begin_compute_pass(&Default::default()), rows as u32, 1);
        gpu.submit_and_read(encoder, &self.scores, 0..rows * size_of::<Score>() as u64).wait(gpu)
    }
}

/// Reads `tokens` in steps of `chunk` into a sequence of every context, and scores the predictions of those
/// from position `from` on against the first context's.
///
/// Returns the scores of each context; the sequences hold the tokens then. `progress` is told how many tokens
/// have been read by one context more.
pub fn read_and_score(
    model: &Model,
    contexts: &mut [(Context, SequenceId)],
    tokens: &[u32],
    chunk: u32,
    from: usize,
    mut progress: impl FnMut(u64),
) -> Result<Vec<Vec<Score>>> {
    let scorer = Scorer::new(&model.gpu, model.shape.vocabulary, &model.logits)?;
    let mut scores = vec![Vec::new(); contexts.len()];
    for first in (0..tokens.len()).step_by(chunk as usize) {
        let end = tokens.len().min(first + chunk as usize);
        let targets = &tokens[first + 1..tokens.len().min(end + 1)];
        for (index, (context, sequence)) in contexts.iter_mut().enumerate() {
            let input = Input { sequence: *sequence, tokens: Some(&tokens[first..end]) };
            let mut encoder = model.gpu.encoder();
            if end < from || targets.is_empty() {
                model.step(context, &mut encoder, &[input], Wanted::Nothing, None)?;
                model.gpu.submit(encoder);
                model.gpu.wait()?;
            } else {
                model.step(context, &mut encoder, &[input], Wanted::All, None)?;
                let all = scorer.submit(&model.gpu, encoder, targets, index == 0)?;
                let skip = from.saturating_sub(first + 1);
                scores[index].extend(all.into_iter().skip(skip));
            }
            progress((end - first) as u64);
        }
    }
    Ok(scores)
}

/// What scores say together.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Summary {
    pub perplexity: f64,
    /// Relative change of perplexity against the reference's, and its standard error. Errors take tokens as
    /// independent of each other; neighbours share a past, so they are somewhat small.
    pub change: f64,
    pub change_error: f64,
    /// Mean KL divergence in nats, and its standard error.
    pub divergence: f64,
    pub divergence_error: f64,
    /// How often both rank the same token first.
    pub agreement: f64,
}

impl Summary {
    pub fn new(scores: &[Score], reference: &[Score]) -> Summary {
        let mean = |values: &dyn Fn(usize) -> f64| {
            let n = scores.len() as f64;
            let mean = (0..scores.len()).map(values).sum::<f64>() / n;
            let variance =
                (0..scores.len()).map(|i| (values(i) - mean).powi(2)).sum::<f64>() / (n - 1.0).max(1.0);
            (mean, (variance / n).sqrt())
        };
        let (loss, _) = mean(&|i| scores[i].loss.into());
        // Losses of the same token with two caches differ far less than losses of different tokens: so the
        // error is that of the differences.
        let (difference, error) = mean(&|i| f64::from(scores[i].loss) - f64::from(reference[i].loss));
        let (divergence, divergence_error) = mean(&|i| scores[i].divergence.into());
        Summary {
            perplexity: loss.exp(),
            change: difference.exp_m1(),
            change_error: difference.exp() * error,
            divergence,
            divergence_error,
            agreement: mean(&|i| scores[i].agrees.into()).0,
        }
    }
}
