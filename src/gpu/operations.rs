//! Operations on whole sequences.

use super::cache::KvCache;
use super::class::Class;
use super::work::Work;
use crate::error::Error;
use crate::plan::{Applied, Operation, Planner, SequenceId, all_or_none, the_same};

impl KvCache {
    /// Removes a sequence; what no other sequence shares is free from the next operation on.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::ForeignSequence`].
    pub fn remove_sequence(&mut self, sequence: SequenceId) -> Result<Operation, Error> {
        let remove = |class: &mut Class| class.planner.remove_sequence(sequence);
        Ok(the_same(all_or_none(&mut self.classes, remove, |_, _| {})?))
    }

    /// Cuts a sequence to its first `tokens` tokens.
    ///
    /// Packed blocks that remain whole are not touched. Of a block that is cut, the tokens that remain return
    /// to the window, dequantized, and are packed again when they are old enough. Going back over tokens of
    /// the last step, up to `residual_window` of them, cuts no block; then, as soon as the length is again
    /// the largest it has been, the state is as if the tokens cut had never been. What the GPU must do is
    /// recorded into `encoder`.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::ForeignSequence`]; [`Error::TruncateBeyondEnd`] if the sequence
    /// is shorter; [`Error::TruncateIntoEvicted`] where tokens are gone; [`Error::OutOfMemory`] for the
    /// upload. Nothing has changed then.
    pub fn truncate(
        &mut self,
        encoder: &mut wgpu::CommandEncoder,
        sequence: SequenceId,
        tokens: u32,
    ) -> Result<Operation, Error> {
        Ok(self.operate(encoder, |planner| Ok(((), planner.truncate(sequence, tokens)?)))?.1)
    }

    /// Adds a sequence with the content of another.
    ///
    /// They share every full page of packed tokens; sinks, window and a partly filled last page are copied,
    /// by work that is recorded into `encoder`. What is appended to one is never seen by the other.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::ForeignSequence`], [`Error::TooManySequences`];
    /// [`Error::CapacityExceeded`] or [`Error::OutOfMemory`] for the copied page or the upload. Nothing has
    /// changed then.
    pub fn fork(
        &mut self,
        encoder: &mut wgpu::CommandEncoder,
        sequence: SequenceId,
    ) -> Result<(SequenceId, Operation), Error> {
        self.operate(encoder, |planner| planner.fork(sequence))
    }

    /// Gives each of `sequences` the content that `sequences[parents[i]]` had: one step of a beam search.
    ///
    /// A sequence that is a parent once costs nothing, each further use of it as much as [`Self::fork`]. What
    /// is nobody's parent is dropped.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::ForeignSequence`], [`Error::DuplicateSequence`];
    /// [`Error::Parents`] unless there is one index per sequence; [`Error::CapacityExceeded`] or
    /// [`Error::OutOfMemory`] for copies. Nothing has changed then.
    pub fn reorder(
        &mut self,
        encoder: &mut wgpu::CommandEncoder,
        sequences: &[SequenceId],
        parents: &[usize],
    ) -> Result<Operation, Error> {
        Ok(self.operate(encoder, |planner| Ok(((), planner.reorder(sequences, parents)?)))?.1)
    }

    /// Gives the memory of every slab that holds no token back to the device. The pool grows again when it must.
    ///
    /// Older operations that could be undone only with pages of those slabs no longer can be ([`Error::TooOld`]); discarding the shrink itself brings no
    /// slab back, and nothing needs one.
    pub fn shrink_to_fit(&mut self) -> Operation {
        let shrink = |class: &mut Class| {
            let (operation, slabs) = class.planner.shrink_to_fit();
            for layer in &mut class.layers {
                for &slab in &slabs {
                    layer.remove_slab(slab as usize);
                }
            }
            operation
        };
        the_same(self.classes.iter_mut().map(shrink).collect())
    }

    /// Applies an operation to all classes of layers, records its work and commits it; on failure all of it is taken back.
    fn operate<T: PartialEq + std::fmt::Debug>(
        &mut self,
        encoder: &mut wgpu::CommandEncoder,
        mut plan: impl FnMut(&mut Planner) -> Result<(T, Applied), Error>,
    ) -> Result<(T, Operation), Error> {
        let prepared = all_or_none(
            &mut self.classes,
            |class| class.apply(encoder, &mut plan),
            |class, (_, applied, _)| class.planner.abandon(applied),
        )?;
        let mut pass = prepared.iter().any(|(_, _, work)| work.is_some()).then(|| {
            encoder.begin_compute_pass(&wgpu::ComputePassDescriptor {
                label: Some("kivi operation"),
                timestamp_writes: None,
            })
        });
        let commit = |(class, (result, applied, work)): (&mut Class, (T, Applied, Option<Work>))| {
            if let (Some(pass), Some(work)) = (&mut pass, work) {
                for layer in 0..class.layers.len() {
                    class.dispatch(pass, &work.changes, layer, None);
                }
            }
            (result, class.planner.commit_applied(applied))
        };
        Ok(the_same(self.classes.iter_mut().zip(prepared).map(commit).collect()))
    }
}

impl Class {
    /// Everything of an operation that can fail: all of it, or nothing. No work if the GPU has nothing to do.
    fn apply<T>(
        &mut self,
        encoder: &mut wgpu::CommandEncoder,
        plan: impl FnMut(&mut Planner) -> Result<(T, Applied), Error>,
    ) -> Result<(T, Applied, Option<Work>), Error> {
        let (result, applied) = self.with_room(plan)?;
        match self.prepare_for(encoder, &applied) {
            Ok(work) => Ok((result, applied, work)),
            Err(error) => {
                self.planner.abandon(applied);
                Err(error)
            }
        }
    }

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
        let work = Work::new(self.planner.geometry(), &self.kernels, &applied.plan);
        self.prepare(encoder, &work)?;
        Ok(Some(work))
    }
}
