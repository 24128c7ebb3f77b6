//! Operations on whole sequences.

use super::cache::CpuCache;
use super::class::Class;
use crate::error::Error;
use crate::geometry::Geometry;
use crate::plan::{Applied, Operation, Planner, SequenceId, all_or_none, the_same};
use crate::snapshot::Snapshot;

impl CpuCache {
    /// Removes a sequence.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::ForeignSequence`].
    pub fn remove_sequence(&mut self, id: SequenceId) -> Result<Operation, Error> {
        Ok(the_same(all_or_none(&mut self.classes, |class| class.planner.remove_sequence(id), |_, _| {})?))
    }

    /// Cuts a sequence to its first `tokens` tokens, see [`Planner::truncate`].
    ///
    /// # Errors
    /// As [`Planner::truncate`].
    pub fn truncate(&mut self, id: SequenceId, tokens: u32) -> Result<Operation, Error> {
        Ok(self.run(|planner| Ok(((), planner.truncate(id, tokens)?)))?.1)
    }

    /// Adds a sequence with the content of another, see [`Planner::fork`].
    ///
    /// # Errors
    /// As [`Planner::fork`].
    pub fn fork(&mut self, id: SequenceId) -> Result<(SequenceId, Operation), Error> {
        self.run(|planner| planner.fork(id))
    }

    /// Gives each of `sequences` the content that `sequences[parents[i]]` had, see [`Planner::reorder`].
    ///
    /// # Errors
    /// As [`Planner::reorder`].
    pub fn reorder(&mut self, sequences: &[SequenceId], parents: &[usize]) -> Result<Operation, Error> {
        Ok(self.run(|planner| Ok(((), planner.reorder(sequences, parents)?)))?.1)
    }

    /// What every layer holds of a sequence.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::ForeignSequence`].
    pub fn save(&self, id: SequenceId) -> Result<Snapshot, Error> {
        let layers: Result<Vec<_>, Error> = (0..self.layers()).map(|layer| self.state(layer, id)).collect();
        Ok(Snapshot::new(&self.geometries(), layers?))
    }

    /// Adds a sequence with the content of a snapshot.
    ///
    /// # Errors
    /// [`Error::SnapshotMismatch`] if it was saved with another configuration; [`Error::TooManySequences`], [`Error::CapacityExceeded`].
    pub fn load(&mut self, snapshot: &Snapshot) -> Result<(SequenceId, Operation), Error> {
        snapshot.check(&self.geometries())?;
        let insert = |planner: &mut Planner| {
            let lengths = snapshot.lengths_of(planner.geometry());
            planner.insert(lengths)
        };
        let (id, operation) = self.run(insert)?;
        for class in &mut self.classes {
            let view = class.planner.view(id)?;
            for (index, layer) in class.geometry().layer_ids.clone().into_iter().enumerate() {
                class.write(index, &view, &snapshot.layers()[layer as usize]);
            }
        }
        Ok((id, operation))
    }

    /// Gives back every slab of which no page is in use.
    pub fn shrink_to_fit(&mut self) -> Operation {
        let shrink = |class: &mut Class| {
            let (operation, slabs) = class.planner.shrink_to_fit();
            for layer in &mut class.layers {
                for &slab in &slabs {
                    layer.slabs[slab as usize] = Vec::new();
                }
            }
            operation
        };
        the_same(self.classes.iter_mut().map(shrink).collect())
    }

    fn geometries(&self) -> Vec<&Geometry> {
        self.classes.iter().map(|class| class.geometry()).collect()
    }

    /// Applies an operation to all classes, or to none; carries it out and commits it.
    fn run<T: PartialEq + std::fmt::Debug>(
        &mut self,
        mut plan: impl FnMut(&mut Planner) -> Result<(T, Applied), Error>,
    ) -> Result<(T, Operation), Error> {
        let applied = all_or_none(
            &mut self.classes,
            |class| class.apply(&mut plan),
            |class, (_, applied)| class.planner.abandon(applied),
        )?;
        let commit = |(class, (result, applied)): (&mut Class, (T, Applied))| {
            class.carry_out(&applied.plan);
            (result, class.planner.commit_applied(applied))
        };
        Ok(the_same(self.classes.iter_mut().zip(applied).map(commit).collect()))
    }
}
