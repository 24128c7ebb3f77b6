//! The state of a partly computed softmax-weighted sum.

use crate::config::LayerAttention;
use crate::plan::Extent;
use crate::shape::Shape;

/// One query of one head.
#[derive(Debug, Clone)]
pub struct Row {
    /// The query's elements.
    pub query: Vec<f64>,
    /// Its position: it sees tokens up to this one.
    pub position: u32,
    /// How its layer attends.
    pub attention: LayerAttention,
}

/// Attention of one row over a part of the tokens: `out` is Σ exp(logit − max)·v, `sum` is Σ exp(logit −
/// max).
///
/// The (output, max, sum) state of FlashAttention and FlashInfer.
#[derive(Debug, Clone, PartialEq)]
pub struct Partial {
    /// Largest logit; −∞ if the row sees no token, NaN if one of its logits is no number.
    pub max: f64,
    /// Sum of the weights.
    pub sum: f64,
    /// Weighted sum of the values, per channel.
    pub out: Vec<f64>,
    /// Largest Σ|q·k| of a token, scaled as its logit is: the error bound of f32 attention depends on it.
    pub magnitude: f64,
}

impl Partial {
    /// Attention of `row` over the tokens of `extent`, whose `keys` and `values` are `[token][head_dim]`.
    pub fn over(s: &Shape, extent: &Extent, row: &Row, keys: &[f64], values: &[f64]) -> Partial {
        let head_dim = s.layout.head_dim as usize;
        let to = (row.position + 1).saturating_sub(extent.first_position).min(extent.tokens) as usize;
        let oldest = row.attention.sliding_window.map_or(0, |n| (row.position + 1).saturating_sub(n));
        let from = (oldest.saturating_sub(extent.first_position) as usize).min(to);
        let mut magnitude: f64 = 0.0;
        let mut logits: Vec<f64> = keys
            .chunks(head_dim)
            .take(to)
            .skip(from)
            .map(|key| {
                let (mut logit, mut sum) = (0.0, 0.0);
                for (q, k) in row.query.iter().zip(key) {
                    logit += q * k;
                    sum += (q * k).abs();
                }
                magnitude = magnitude.max(sum * f64::from(s.softmax_scale));
                logit * f64::from(s.softmax_scale)
            })
            .collect();
        let is_number = logits.iter().all(|logit| logit.is_finite());
        if let Some(cap) = row.attention.soft_cap.map(f64::from) {
            for logit in &mut logits {
                *logit = cap * (*logit / cap).tanh();
            }
        }
        let max = match is_number {
            true => logits.iter().copied().fold(f64::NEG_INFINITY, f64::max),
            false => f64::NAN,
        };
        let mut sum = 0.0;
        let mut out = vec![0.0; head_dim];
        for (logit, value) in logits.iter().zip(values.chunks(head_dim).skip(from)) {
            let weight = (logit - max).exp();
            sum += weight;
            for (total, x) in out.iter_mut().zip(value) {
                *total += weight * x;
            }
        }
        Partial { max, sum, out, magnitude }
    }
}
