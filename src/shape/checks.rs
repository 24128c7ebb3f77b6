//! What a configuration may say.

use super::{GROUPS, MAX_TOKENS};
use crate::config::{CacheConfig, LayerAttention};
use crate::error::Error;

pub(super) fn check(ok: bool, name: &'static str, got: u32, allowed: &'static str) -> Result<(), Error> {
    if ok { Ok(()) } else { Err(Error::Unsupported { name, got: got.into(), allowed }) }
}

/// Heads and their sizes.
pub(super) fn heads(c: &CacheConfig) -> Result<(), Error> {
    check((1..=4096).contains(&c.kv_heads), "kv_heads", c.kv_heads, "1 to 4096")?;
    check(c.query_heads > 0, "query_heads", c.query_heads, "1 or more")?;
    if !c.query_heads.is_multiple_of(c.kv_heads) {
        return Err(Error::HeadsDoNotDivide { query_heads: c.query_heads, kv_heads: c.kv_heads });
    }
    let ratio = c.query_heads / c.kv_heads;
    check(ratio <= 16, "query_heads / kv_heads", ratio, "a ratio from 1 to 16")?;
    let fits = c.head_dim.is_multiple_of(8) && (8..=512).contains(&c.head_dim);
    check(fits, "head_dim", c.head_dim, "a multiple of 8 from 8 to 512")?;
    let row = c.kv_heads * c.head_dim;
    check(row <= 1 << 20, "kv_heads * head_dim", row, "at most 1048576")
}

/// Groups and what stays unpacked.
pub(super) fn sizes(c: &CacheConfig) -> Result<(), Error> {
    let format = &c.format;
    check(GROUPS.contains(&format.group_size), "group_size", format.group_size, "16, 32, 64 or 128")?;
    let value_group = format.value_group_size.unwrap_or(format.group_size);
    let fits = GROUPS.contains(&value_group) || value_group == c.head_dim;
    check(fits, "value_group_size", value_group, "16, 32, 64, 128 or head_dim")?;
    let window = format.residual_window;
    check(window <= 1 << 20, "residual_window", window, "at most 1048576")
}

/// What the cache is for: tokens, sequences, steps.
pub(super) fn limits(c: &CacheConfig) -> Result<(), Error> {
    check((1..=MAX_TOKENS).contains(&c.capacity), "capacity", c.capacity, "1 to 2^30 tokens")?;
    if let Some(most) = c.max_capacity {
        let sequences = u64::from(c.max_sequences.max(1)) * u64::from(MAX_TOKENS);
        if !(u64::from(c.capacity)..=sequences).contains(&most.into()) {
            let allowed = "capacity to 2^30 tokens per sequence, or None to grow while there is memory";
            return Err(Error::Unsupported { name: "max_capacity", got: most.into(), allowed });
        }
    }
    let sink_tokens = c.format.sink_tokens;
    if sink_tokens > c.capacity {
        return Err(Error::SinksBeyondCapacity { sink_tokens, capacity: c.capacity });
    }
    if let Some(limit) = c.format.history_limit.filter(|limit| *limit < c.format.residual_window) {
        return Err(Error::Contradiction {
            a: format!("history_limit = {limit}"),
            b: format!("residual_window = {}", c.format.residual_window),
            instead: "tokens of the window are never dropped: raise history_limit or lower residual_window",
        });
    }
    check((1..=65535).contains(&c.max_sequences), "max_sequences", c.max_sequences, "1 to 65535")?;
    check((1..=1 << 20).contains(&c.max_step), "max_step", c.max_step, "1 to 1048576")?;
    let batch = max_batch_tokens(c);
    check((c.max_step..=1 << 20).contains(&batch), "max_batch_tokens", batch, "max_step to 1048576")
}

/// New tokens of all sequences in a step, at most.
pub(super) fn max_batch_tokens(c: &CacheConfig) -> u32 {
    c.max_batch_tokens.unwrap_or(c.max_step.max(c.max_sequences))
}

/// The distinct entries of `layer_attention`, and the index of each layer's.
pub(super) fn attention(c: &CacheConfig) -> Result<(Vec<LayerAttention>, Vec<u32>), Error> {
    let entries = c.layer_attention.len() as u32;
    check([0, c.layers].contains(&entries), "layer_attention entries", entries, "none, or one per layer")?;
    let mut kinds: Vec<LayerAttention> = Vec::new();
    let mut layers = Vec::new();
    for attention in
        c.layer_attention.iter().copied().chain((entries..c.layers).map(|_| LayerAttention::default()))
    {
        if let Some(window) = attention.sliding_window {
            check(window > 0, "sliding_window", window, "1 or more tokens, or None")?;
        }
        if let Some(got) = attention.soft_cap
            && !(got.is_finite() && got > 0.0)
        {
            return Err(Error::SoftCap { got });
        }
        let known = kinds.iter().position(|kind| *kind == attention);
        layers.push(known.unwrap_or(kinds.len()) as u32);
        if known.is_none() {
            kinds.push(attention);
        }
    }
    Ok((kinds, layers))
}
