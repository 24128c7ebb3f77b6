//! Unpacked tokens are copied to the slots of another sequence.

use super::{Tensor, Unpacked};
use crate::plan::Plan;
use crate::shape::Shape;

/// Carries out the copies of unpacked tokens.
pub fn copy_tokens(s: &Shape, plan: &Plan, ring: &mut Unpacked) {
    for copy in &plan.token_copies {
        for tensor in [Tensor::Keys, Tensor::Values] {
            let from = ring.row(s, tensor, copy.source.index(), 0);
            let to = ring.row(s, tensor, copy.destination.index(), 0);
            ring.words.copy_within(from..from + s.token_words() as usize, to);
        }
    }
}
