//! Unpacked tokens are copied to the slots of another sequence.

use super::{Tensor, Unpacked};
use crate::geometry::Geometry;
use crate::plan::StepPlan;

/// Carries out the copies of unpacked tokens.
pub fn copy_tokens(g: &Geometry, plan: &StepPlan, ring: &mut Unpacked) {
    for copy in &plan.token_copies {
        for tensor in [Tensor::Keys, Tensor::Values] {
            let from = ring.row(g, tensor, copy.from.index(), 0);
            let to = ring.row(g, tensor, copy.to.index(), 0);
            ring.words.copy_within(from..from + g.token_words() as usize, to);
        }
    }
}
