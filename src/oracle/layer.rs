//! One layer: what it is given in a step, what it answers, and what it holds.

use super::Unpacked;

/// Inputs of one layer in one step, sequences one after the other.
#[derive(Debug, Clone, Copy, Default)]
pub struct LayerInput<'a> {
    /// New keys after RoPE, `[token][kv head][head_dim]`.
    pub k: &'a [f32],
    /// New values, `[token][kv head][head_dim]`.
    pub v: &'a [f32],
    /// Queries after RoPE, `[query][query head][head_dim]`.
    pub q: &'a [f32],
    /// Learned sink logits, `[query head]`; empty if the layer has none.
    pub sink_logits: &'a [f32],
}

/// Attention of one layer in one step. What a query that is not finite attends to is NaN.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct AttentionOutput {
    /// `[query][query head][head_dim]`.
    pub out: Vec<f64>,
    /// Largest Σ|q·k| of a token, scaled as logits are, `[query][query head]`.
    pub magnitude: Vec<f64>,
    /// Log-sum-exp of the scaled logits, sink logit included, `[query][query head]`.
    pub lse: Vec<f64>,
}

/// Memory of one layer.
#[derive(Debug, Clone)]
pub(super) struct LayerMemory {
    pub(super) slabs: Vec<Vec<u32>>,
    pub(super) ring: Unpacked,
}
