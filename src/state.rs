//! The logical content of one layer of one sequence.

use crate::plan::SequenceLengths;

/// Unpacked tokens in order of position, as words of the window format: `[token][kv head][row word]`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UnpackedTokens {
    /// Keys.
    pub keys: Vec<u32>,
    /// Values.
    pub values: Vec<u32>,
}

/// What a layer holds of a sequence. Two caches with equal states continue equally, on any backend.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LayerState {
    /// How long the sequence is.
    pub lengths: SequenceLengths,
    /// The first positions, never packed.
    pub sinks: UnpackedTokens,
    /// Packed blocks that are not gone, oldest first, one after the other.
    pub blocks: Vec<u32>,
    /// The residual window, oldest first.
    pub window: UnpackedTokens,
}
