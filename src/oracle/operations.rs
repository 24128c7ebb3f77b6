//! Operations on whole sequences.

use super::Tensor;
use super::cache::CpuCache;
use super::{copy_blocks::copy_blocks, copy_tokens::copy_tokens, unpack::unpack};
use crate::error::Error;
use crate::plan::{Applied, Operation, Planner, SequenceId};
use crate::snapshot::Snapshot;

impl CpuCache {
    /// Removes a sequence.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn remove_sequence(&mut self, id: SequenceId) -> Result<Operation, Error> {
        self.planner.remove_sequence(id)
    }

    /// Cuts a sequence to its first `tokens` tokens, see [`Planner::truncate`].
    ///
    /// # Errors
    /// As [`Planner::truncate`].
    pub fn truncate(&mut self, id: SequenceId, tokens: u32) -> Result<Operation, Error> {
        let applied = self.planner.truncate(id, tokens)?;
        self.run(applied)
    }

    /// Adds a sequence with the content of another, see [`Planner::fork`].
    ///
    /// # Errors
    /// As [`Planner::fork`].
    pub fn fork(&mut self, id: SequenceId) -> Result<(SequenceId, Operation), Error> {
        let (child, applied) = self.with_room(|planner| planner.fork(id))?;
        Ok((child, self.run(applied)?))
    }

    /// Gives each of `sequences` the content that `sequences[parents[i]]` had, see [`Planner::reorder`].
    ///
    /// # Errors
    /// As [`Planner::reorder`].
    pub fn reorder(&mut self, sequences: &[SequenceId], parents: &[usize]) -> Result<Operation, Error> {
        let applied = self.with_room(|planner| planner.reorder(sequences, parents))?;
        self.run(applied)
    }

    /// What every layer holds of a sequence.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn save(&self, id: SequenceId) -> Result<Snapshot, Error> {
        let g = self.planner.geometry();
        let layers: Result<Vec<_>, Error> = (0..g.layers).map(|layer| self.state(layer, id)).collect();
        Ok(Snapshot::new(g, layers?))
    }

    /// Adds a sequence with the content of a snapshot.
    ///
    /// # Errors
    /// [`Error::SnapshotMismatch`] if it was saved with another configuration; [`Error::TooManySequences`], [`Error::CapacityExceeded`].
    pub fn load(&mut self, snapshot: &Snapshot) -> Result<(SequenceId, Operation), Error> {
        snapshot.check(self.planner.geometry())?;
        let (tokens, blocks) = (snapshot.tokens(), snapshot.blocks());
        let (id, applied) = self.with_room(|planner| planner.insert(tokens, blocks))?;
        let g = self.planner.geometry();
        let view = self.planner.view(id)?;
        let (token, block) = (g.token_words() as usize, g.layout.block_words() as usize);
        for (layer, state) in self.layers.iter_mut().zip(snapshot.layers()) {
            for (slots, tokens) in [(&view.sinks, &state.sinks), (&view.window, &state.window)] {
                for (tensor, words) in [(Tensor::Keys, &tokens.keys), (Tensor::Values, &tokens.values)] {
                    for (slot, words) in slots.iter().zip(words.chunks(token)) {
                        let row = layer.ring.row(g, tensor, slot.index(), 0);
                        layer.ring.words[row..row + token].copy_from_slice(words);
                    }
                }
            }
            for (&(slab, index), words) in view.blocks.iter().zip(state.blocks.chunks(block)) {
                layer.slabs[slab as usize][index as usize * block..][..block].copy_from_slice(words);
            }
        }
        Ok((id, self.planner.commit_applied(applied)))
    }

    /// Gives back every slab of which no page is in use.
    pub fn shrink_to_fit(&mut self) -> Operation {
        let (operation, slabs) = self.planner.shrink_to_fit();
        for layer in &mut self.layers {
            for &slab in &slabs {
                layer.slabs[slab as usize] = Vec::new();
            }
        }
        operation
    }

    /// What `plan` returns, after the pool has grown if it must.
    pub(super) fn with_room<T>(
        &mut self,
        mut plan: impl FnMut(&mut Planner) -> Result<T, Error>,
    ) -> Result<T, Error> {
        match plan(&mut self.planner) {
            Err(Error::CapacityExceeded { needed, available, .. }) if needed <= available => {
                self.grow(needed)?;
                plan(&mut self.planner)
            }
            other => other,
        }
    }

    /// Makes room for `pages` free pages.
    fn grow(&mut self, pages: u32) -> Result<(), Error> {
        let Some(growth) = self.planner.growth(pages, false)? else { return Ok(()) };
        for layer in &mut self.layers {
            layer.slabs.resize(growth.geometry.slabs() as usize, Vec::new());
            for &slab in &growth.slabs {
                layer.slabs[slab as usize] = vec![0; (growth.geometry.slab_bytes(slab) / 4) as usize];
            }
        }
        self.planner.grow(growth);
        Ok(())
    }

    /// Carries an operation out and commits it.
    fn run(&mut self, applied: Applied) -> Result<Operation, Error> {
        match self.planner.sharing() {
            Ok(None) => {}
            Ok(Some(growth)) => self.planner.grow(growth),
            Err(error) => {
                self.planner.abandon(applied);
                return Err(error);
            }
        }
        let (g, plan) = (self.planner.geometry(), &applied.plan);
        for layer in &mut self.layers {
            copy_tokens(g, plan, &mut layer.ring);
            copy_blocks(g, plan, &mut layer.slabs);
            for range in &plan.unpack_slabs {
                let tokens = &plan.unpacks[range.items.start as usize..range.items.end as usize];
                unpack(g, tokens, &layer.slabs[range.slab as usize], &mut layer.ring);
            }
        }
        Ok(self.planner.commit_applied(applied))
    }
}
