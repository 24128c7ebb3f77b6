//! Packed blocks are copied to a page of their own.

use crate::plan::Plan;
use crate::shape::Shape;

/// Carries out the copies of blocks.
pub fn copy_blocks(s: &Shape, plan: &Plan, slabs: &mut [Vec<u32>]) {
    let words = s.layout.block_words() as usize;
    for range in &plan.copy_slabs {
        for copy in &plan.block_copies[range.items.start as usize..range.items.end as usize] {
            let block = slabs[range.from as usize][copy.source as usize * words..][..words].to_vec();
            slabs[range.to as usize][copy.destination as usize * words..][..words].copy_from_slice(&block);
        }
    }
}
