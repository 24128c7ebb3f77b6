//! The executor: memory of all layers, and what plans do to it.

use super::layer::{AttentionOutput, LayerInput, LayerMemory};
use super::{Tensor, Tokens, Unpacked};
use super::{append::append, attend::attend, copy_blocks::copy_blocks, copy_tokens::copy_tokens};
use super::{pack_block, unpack::unpack};
use crate::error::Error;
use crate::lifecycle::Executor;
use crate::plan::{NewSlab, Plan, PoolLimits, PoolSize, SequenceView, Slot};
use crate::shape::{CacheShape, Shape};
use crate::state::{LayerState, UnpackedTokens};
use std::sync::Arc;

/// Memory of the layers of one class.
#[derive(Debug, Clone)]
struct ClassMemory {
    layers: Vec<LayerMemory>,
    staging: Unpacked,
}

/// Memory of a cache.
#[derive(Debug, Clone)]
pub(super) struct Memory {
    shape: Arc<CacheShape>,
    classes: Vec<ClassMemory>,
}

impl Memory {
    pub(super) fn new(shape: Arc<CacheShape>, pools: &[PoolLimits]) -> Memory {
        let classes = shape.classes.iter().zip(pools).map(|(s, pool)| {
            let slabs = pool.slabs().into_iter().map(|pages| slab(s, pages)).collect();
            let layer = LayerMemory { slabs, ring: Unpacked::new(s, s.unpacked_slots()) };
            ClassMemory { layers: vec![layer; s.layers.len()], staging: Unpacked::new(s, s.staging_tokens) }
        });
        Memory { classes: classes.collect(), shape }
    }

    /// Carries a step out in a layer.
    pub(super) fn step(
        &mut self,
        (class, index): (usize, usize),
        plan: &Plan,
        input: &LayerInput<'_>,
    ) -> AttentionOutput {
        let s = &self.shape.classes[class];
        let ClassMemory { layers, staging } = &mut self.classes[class];
        let memory = &mut layers[index];
        append(s, plan, Tensor::Keys, input.k, &mut memory.ring, staging);
        append(s, plan, Tensor::Values, input.v, &mut memory.ring, staging);
        let output = attend(s, plan, s.layer_attention[index], memory, staging, input);
        copy_blocks(s, plan, &mut memory.slabs);
        let tokens = Tokens { ring: &memory.ring, staging };
        let block_words = s.layout.block_words() as usize;
        for range in &plan.pack_slabs {
            let slab = &mut memory.slabs[range.slab as usize];
            for pack in &plan.packs[range.items.start as usize..range.items.end as usize] {
                let slots = &plan.slots[pack.first_slot as usize..][..s.layout.group as usize];
                let block = &mut slab[pack.block as usize * block_words..][..block_words];
                pack_block(s, tokens, slots, block);
            }
        }
        output
    }

    /// What a layer holds of a sequence.
    pub(super) fn state(&self, class: usize, index: usize, view: &SequenceView) -> LayerState {
        let s = &self.shape.classes[class];
        let memory = &self.classes[class].layers[index];
        let rows = |slots: &[Slot]| {
            let tensor = |tensor| {
                let row = |slot: &Slot| memory.ring.row(s, tensor, slot.index(), 0);
                let words = s.token_words() as usize;
                slots.iter().flat_map(|slot| memory.ring.words[row(slot)..][..words].to_vec()).collect()
            };
            UnpackedTokens { keys: tensor(Tensor::Keys), values: tensor(Tensor::Values) }
        };
        let words = s.layout.block_words() as usize;
        LayerState {
            lengths: view.lengths,
            sinks: rows(&view.sinks),
            blocks: view
                .blocks
                .iter()
                .flat_map(|&(slab, b)| &memory.slabs[slab as usize][b as usize * words..][..words])
                .copied()
                .collect(),
            window: rows(&view.window),
        }
    }
}

fn slab(s: &Shape, pages: u32) -> Vec<u32> {
    vec![0; (u64::from(pages) * s.layout.page_words()) as usize]
}

impl Executor for Memory {
    type Recorder = ();
    type Work = ();

    fn grow(&mut self, class: usize, slabs: &[NewSlab], size: PoolSize) -> Result<(), Error> {
        let s = &self.shape.classes[class];
        for layer in &mut self.classes[class].layers {
            layer.slabs.resize(size.slabs as usize, Vec::new());
            for new in slabs {
                layer.slabs[new.slab as usize] = slab(s, new.pages);
            }
        }
        Ok(())
    }

    fn shrink(&mut self, class: usize, slabs: &[u32]) {
        for layer in &mut self.classes[class].layers {
            slabs.iter().for_each(|slab| layer.slabs[*slab as usize] = Vec::new());
        }
    }

    fn fit(&mut self, _: usize, _: PoolSize) -> Result<(), Error> {
        // Plans are read where they are.
        Ok(())
    }

    fn prepare(&mut self, (): &mut (), _: &[Plan]) -> Result<(), Error> {
        Ok(())
    }

    fn carry_out(&mut self, (): &mut (), plans: &[Plan], (): &()) {
        for ((s, class), plan) in self.shape.classes.iter().zip(&mut self.classes).zip(plans) {
            for layer in &mut class.layers {
                copy_tokens(s, plan, &mut layer.ring);
                copy_blocks(s, plan, &mut layer.slabs);
                for range in &plan.unpack_slabs {
                    let tokens = &plan.unpacks[range.items.start as usize..range.items.end as usize];
                    unpack(s, tokens, &layer.slabs[range.slab as usize], &mut layer.ring);
                }
            }
        }
    }

    fn write(&mut self, (): &mut (), views: &[SequenceView], layers: &[LayerState]) -> Result<(), Error> {
        for (&(class, index), state) in self.shape.places.iter().zip(layers) {
            let (s, view) = (&self.shape.classes[class], &views[class]);
            let layer = &mut self.classes[class].layers[index];
            let (token, block) = (s.token_words() as usize, s.layout.block_words() as usize);
            for (slots, tokens) in [(&view.sinks, &state.sinks), (&view.window, &state.window)] {
                for (tensor, words) in [(Tensor::Keys, &tokens.keys), (Tensor::Values, &tokens.values)] {
                    for (slot, words) in slots.iter().zip(words.chunks(token)) {
                        let row = layer.ring.row(s, tensor, slot.index(), 0);
                        layer.ring.words[row..row + token].copy_from_slice(words);
                    }
                }
            }
            for (&(slab, index), words) in view.blocks.iter().zip(state.blocks.chunks(block)) {
                layer.slabs[slab as usize][index as usize * block..][..block].copy_from_slice(words);
            }
        }
        Ok(())
    }

    fn read(
        &self,
        class: usize,
        index: usize,
        view: &SequenceView,
    ) -> impl Future<Output = Result<LayerState, Error>> + Send {
        std::future::ready(Ok(self.state(class, index, view)))
    }
}
