//! Joins the partial results of a row.

use super::Partial;

/// The attention output over all the tokens that `partials` cover, per channel (zeros if there is none), and
/// the log-sum-exp of the row's logits (−∞ if there is none).
///
/// A part in which the row sees nothing has sum 0 and does not count. A learned `sink` is one more logit, of
/// a token without a value; of none if it is −∞. If a part or the sink is no number, neither is the row.
pub fn merge(head_dim: u32, partials: &[Partial], sink: Option<f64>) -> (Vec<f64>, f64) {
    let sink = sink.filter(|sink| *sink != f64::NEG_INFINITY);
    if partials.iter().any(|p| p.max.is_nan()) || sink.is_some_and(|sink| !sink.is_finite()) {
        return (vec![f64::NAN; head_dim as usize], f64::NAN);
    }
    let maxima = partials.iter().map(|p| p.max).chain(sink);
    let max = maxima.fold(f64::NEG_INFINITY, f64::max);
    let mut out = vec![0.0; head_dim as usize];
    let mut sum = sink.map_or(0.0, |sink| (sink - max).exp());
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
    (out, if sum > 0.0 { max + sum.ln() } else { f64::NEG_INFINITY })
}
