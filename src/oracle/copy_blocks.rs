//! Packed blocks are copied to a page of their own.

use crate::geometry::Geometry;
use crate::plan::StepPlan;

/// Carries out the copies of blocks.
pub fn copy_blocks(g: &Geometry, plan: &StepPlan, slabs: &mut [Vec<u32>]) {
    let words = g.layout.block_words() as usize;
    for range in &plan.copy_slabs {
        for copy in &plan.block_copies[range.items.start as usize..range.items.end as usize] {
            let block = slabs[range.from as usize][copy.from as usize * words..][..words].to_vec();
            slabs[range.to as usize][copy.to as usize * words..][..words].copy_from_slice(&block);
        }
    }
}
