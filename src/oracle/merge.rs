//! Joins the partial results of a row.

use super::Partial;

/// The attention output over all the tokens that `partials` cover, per channel; zeros if there is none.
///
/// A part in which the row sees nothing has sum 0 and does not count.
pub fn merge(head_dim: u32, partials: &[Partial]) -> Vec<f64> {
    let max = partials.iter().map(|p| p.max).fold(f64::NEG_INFINITY, f64::max);
    let mut out = vec![0.0; head_dim as usize];
    let mut sum = 0.0;
    for part in partials.iter().filter(|p| p.sum > 0.0) {
        let weight = (part.max - max).exp();
        sum += weight * part.sum;
        for (total, x) in out.iter_mut().zip(&part.out) {
            *total += weight * x;
        }
    }
    if sum > 0.0 {
        for x in &mut out {
            *x /= sum;
        }
    }
    out
}
