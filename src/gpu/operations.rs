//! Operations on whole sequences.

use super::cache::KvCache;
use super::work::Work;
use crate::error::Error;
use crate::plan::{Applied, Operation, SequenceId};

impl KvCache {
    /// Removes a sequence; what no other sequence shares is free from the next operation on.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn remove_sequence(&mut self, sequence: SequenceId) -> Result<Operation, Error> {
        self.planner.remove_sequence(sequence)
    }

    /// Cuts a sequence to its first `tokens` tokens.
    ///
    /// Packed blocks that remain whole are not touched. Of a block that is cut, the tokens that remain return to the window, dequantized, and are packed
    /// again when they are old enough. Going back over tokens of the last step, up to `residual_window` of them, cuts no block; then, as soon as the length is again
    /// the largest it has been, the state is as if the tokens cut had never been. What the GPU must do is recorded into `encoder`.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`]; [`Error::TruncateBeyondEnd`] if the sequence is shorter; [`Error::OutOfMemory`] for the upload. Nothing has changed then.
    pub fn truncate(
        &mut self,
        encoder: &mut wgpu::CommandEncoder,
        sequence: SequenceId,
        tokens: u32,
    ) -> Result<Operation, Error> {
        let applied = self.planner.truncate(sequence, tokens)?;
        self.carry_out(encoder, applied)
    }

    /// Adds a sequence with the content of another.
    ///
    /// They share every full page of packed tokens; sinks, window and a partly filled last page are copied, by work that is recorded into `encoder`. What
    /// is appended to one is never seen by the other.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::TooManySequences`]; [`Error::CapacityExceeded`] or [`Error::OutOfMemory`] for the copied page or the upload.
    /// Nothing has changed then.
    pub fn fork(
        &mut self,
        encoder: &mut wgpu::CommandEncoder,
        sequence: SequenceId,
    ) -> Result<(SequenceId, Operation), Error> {
        let (child, applied) = self.with_room(|planner| planner.fork(sequence))?;
        Ok((child, self.carry_out(encoder, applied)?))
    }

    /// Gives each of `sequences` the content that `sequences[parents[i]]` had: one step of a beam search.
    ///
    /// A sequence that is a parent once costs nothing, each further use of it as much as [`Self::fork`]. What is nobody's parent is dropped.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::DuplicateSequence`]; [`Error::Parents`] unless there is one index per sequence; [`Error::CapacityExceeded`] or
    /// [`Error::OutOfMemory`] for copies. Nothing has changed then.
    pub fn reorder(
        &mut self,
        encoder: &mut wgpu::CommandEncoder,
        sequences: &[SequenceId],
        parents: &[usize],
    ) -> Result<Operation, Error> {
        let applied = self.with_room(|planner| planner.reorder(sequences, parents))?;
        self.carry_out(encoder, applied)
    }

    /// Gives the memory of every slab that holds no token back to the device. The pool grows again when it must.
    ///
    /// Older operations that could be undone only with pages of those slabs no longer can be ([`Error::TooOld`]); discarding the shrink itself brings no
    /// slab back, and nothing needs one.
    pub fn shrink_to_fit(&mut self) -> Operation {
        let (operation, slabs) = self.planner.shrink_to_fit();
        for layer in &mut self.layers {
            for &slab in &slabs {
                layer.remove_slab(slab as usize);
            }
        }
        operation
    }

    /// Records the work of an operation and commits it; on failure it is taken back.
    fn carry_out(
        &mut self,
        encoder: &mut wgpu::CommandEncoder,
        applied: Applied,
    ) -> Result<Operation, Error> {
        let work = match self.prepare_for(encoder, &applied) {
            Ok(work) => work,
            Err(error) => {
                self.planner.abandon(applied);
                return Err(error);
            }
        };
        if let Some(work) = work {
            let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor {
                label: Some("kivi operation"),
                timestamp_writes: None,
            });
            for layer in 0..self.layers.len() {
                self.dispatch(&mut pass, &work.changes, layer, None);
            }
        }
        Ok(self.planner.commit_applied(applied))
    }

    /// Everything that can fail. `None` if the GPU has nothing to do.
    fn prepare_for(
        &mut self,
        encoder: &mut wgpu::CommandEncoder,
        applied: &Applied,
    ) -> Result<Option<Work>, Error> {
        if let Some(growth) = self.planner.sharing()? {
            self.grow(growth)?;
        }
        if applied.plan.is_empty() {
            return Ok(None);
        }
        let work = Work::new(self.planner.geometry(), self.variant(), &applied.plan);
        self.prepare(encoder, &work)?;
        Ok(Some(work))
    }
}
