//! Attention of one layer in one step.

use super::layer::{AttentionOutput, LayerInput, LayerMemory};
use super::{Partial, Row, Tokens, Unpacked};
use super::{attend_packed::attend_packed, attend_unpacked::attend_unpacked, merge::merge};
use crate::plan::{Attend, Extent, Plan};
use crate::shape::Shape;

/// Every row attends to every extent of its sequence, in order of position; then its partial results are
/// joined. `attention` is the layer's way to attend: an index of [`Shape::attention`].
pub(super) fn attend(
    s: &Shape,
    plan: &Plan,
    attention: u32,
    memory: &LayerMemory,
    staging: &Unpacked,
    input: &LayerInput<'_>,
) -> AttentionOutput {
    let head_dim = s.layout.head_dim as usize;
    let rows = plan.queries as usize * s.query_heads as usize;
    let mut output =
        AttentionOutput { out: vec![0.0; rows * head_dim], magnitude: vec![0.0; rows], lse: vec![0.0; rows] };
    for sequence in &plan.attends {
        let extents = &plan.extents[sequence.extents.start as usize..sequence.extents.end as usize];
        for head in 0..s.layout.kv_heads {
            let places = places(s, sequence, head);
            let rows: Vec<Row> = places
                .iter()
                .zip(0..)
                .map(|(&place, row)| Row {
                    query: input.q[place * head_dim..][..head_dim].iter().map(|&x| f64::from(x)).collect(),
                    position: sequence.position + row / s.heads_per_kv,
                    attention: s.attention[attention as usize],
                })
                .collect();
            let over = |extent: &Extent| match extent.slab {
                Some(slab) => {
                    let first = extent.source as usize * s.layout.block_words() as usize;
                    attend_packed(s, &memory.slabs[slab as usize][first..], extent, head, &rows)
                }
                None => {
                    let slots = &plan.slots[extent.source as usize..][..extent.tokens as usize];
                    attend_unpacked(s, Tokens { ring: &memory.ring, staging }, slots, extent, head, &rows)
                }
            };
            let parts: Vec<Vec<Partial>> = extents.iter().map(over).collect();
            for (r, &place) in places.iter().enumerate() {
                let partials: Vec<Partial> = parts.iter().map(|part| part[r].clone()).collect();
                let sink = input.sink_logits.get(place % s.query_heads as usize).copied().map(f64::from);
                let (out, lse) = merge(s.layout.head_dim, &partials, sink);
                output.out[place * head_dim..][..head_dim].copy_from_slice(&out);
                output.lse[place] = lse;
                output.magnitude[place] = partials.iter().fold(0.0, |m, p| m.max(p.magnitude));
            }
        }
    }
    output
}

/// Rows of the step's queries, `[query][query head]`, that belong to a sequence and a KV head.
fn places(s: &Shape, sequence: &Attend, head: u32) -> Vec<usize> {
    let (per_kv, first, query_heads) = (s.heads_per_kv, sequence.first_query, s.query_heads);
    let place = |row: u32| (first + row / per_kv) * query_heads + head * per_kv + row % per_kv;
    (0..sequence.queries * per_kv).map(|row| place(row) as usize).collect()
}
