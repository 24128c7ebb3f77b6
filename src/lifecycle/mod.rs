//! What every executor's cache shares: growth and retry, commit, undo, fork, truncate, reorder, save, load.
//!
//! A [`Lifecycle`] is a [`Planner`] and an [`Executor`]. The planner decides, the executor has memory and
//! kernels; what is done in which order, and what is taken back where something fails, is here and nowhere
//! else.

mod step;

pub use step::Begun;

use crate::error::Error;
use crate::ids::SequenceId;
use crate::plan::{
    Growth, NewSlab, Operation, Plan, Planner, PoolSize, Request, SequenceLengths, SequenceStep, SequenceView,
};
use crate::snapshot::Snapshot;
use crate::state::LayerState;

/// Memory, kernels and recording: what a cache needs besides its state machine.
///
/// What fails changes nothing. Plans come one per format class, layers by class and index within it.
pub trait Executor {
    /// Where the work of an operation is recorded: a host's command encoder, or nothing for an executor that
    /// works at once.
    type Recorder;
    /// The work of one operation, ready to be carried out.
    type Work;

    /// Adds slabs to every layer of a class, whose pool will then be so large.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::LimitTooLow`].
    fn grow(&mut self, class: usize, slabs: &[NewSlab], size: PoolSize) -> Result<(), Error>;

    /// Gives back slabs of every layer of a class.
    fn shrink(&mut self, class: usize, slabs: &[u32]);

    /// Makes room for the plans of a class whose pool is so large, and so much shared.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::LimitTooLow`].
    fn fit(&mut self, class: usize, size: PoolSize) -> Result<(), Error>;

    /// Does everything of an operation that can fail.
    ///
    /// # Errors
    /// What the executor may lack.
    fn prepare(&mut self, recorder: &mut Self::Recorder, plans: &[Plan]) -> Result<Self::Work, Error>;

    /// Copies and unpacks what the plans of an operation on whole sequences say, in every layer.
    fn carry_out(&mut self, recorder: &mut Self::Recorder, plans: &[Plan], work: &Self::Work);

    /// Writes what each layer is to hold of a sequence, which lies where the view of its class says.
    ///
    /// # Errors
    /// What the executor may lack.
    fn write(
        &mut self,
        recorder: &mut Self::Recorder,
        views: &[SequenceView],
        layers: &[LayerState],
    ) -> Result<(), Error>;

    /// Reads what a layer holds of a sequence.
    ///
    /// # Errors
    /// What the executor may lack.
    fn read(
        &self,
        class: usize,
        index: usize,
        view: &SequenceView,
    ) -> impl Future<Output = Result<LayerState, Error>> + Send;
}

/// A cache: what all executors do alike.
#[derive(Debug, Clone)]
pub struct Lifecycle<E> {
    planner: Planner,
    executor: E,
}

impl<E: Executor> Lifecycle<E> {
    /// Of an executor that has the memory that the planner begins with.
    pub fn new(planner: Planner, executor: E) -> Lifecycle<E> {
        Lifecycle { planner, executor }
    }

    /// The sequences and their places.
    pub fn planner(&self) -> &Planner {
        &self.planner
    }

    /// The executor.
    pub fn executor(&self) -> &E {
        &self.executor
    }

    /// The executor, for what is no operation.
    pub fn executor_mut(&mut self) -> &mut E {
        &mut self.executor
    }

    /// Adds an empty sequence, see [`Planner::create_sequence`].
    ///
    /// # Errors
    /// [`Error::TooManySequences`].
    pub fn create_sequence(&mut self) -> Result<SequenceId, Error> {
        self.planner.create_sequence()
    }

    /// Starts a step: plans it, after the pools have grown if they must, and prepares its work. Nothing has
    /// happened until it is [finished](Self::finish_step).
    ///
    /// # Errors
    /// As [`Planner::pages_for_step`], and what the executor lacks.
    pub fn begin_step(
        &mut self,
        recorder: &mut E::Recorder,
        steps: &[SequenceStep],
    ) -> Result<Begun<E::Work>, Error> {
        let pages = self.planner.pages_for_step(steps)?;
        self.make_room(&pages)?;
        let planned = self.planner.plan_step(steps)?;
        let work = self.executor.prepare(recorder, &planned.plans)?;
        Ok(Begun::new(self.planner.shape(), planned, work))
    }

    /// Makes a step, all of whose layers have been recorded, the state of the cache.
    ///
    /// # Errors
    /// [`Error::LayerMissing`]: tokens were appended and a layer was not recorded.
    pub fn finish_step(&mut self, step: Begun<E::Work>) -> Result<Operation, Error> {
        Ok(self.planner.commit(step.complete()?))
    }

    /// Applies an operation, carries it out and commits it; on failure all of it is taken back. Returns the
    /// sequence that is new, if the operation adds one.
    ///
    /// # Errors
    /// As [`Planner::pages_for`], and what the executor lacks.
    pub fn operate(
        &mut self,
        recorder: &mut E::Recorder,
        request: Request<'_>,
    ) -> Result<(Option<SequenceId>, Operation), Error> {
        self.transact(recorder, request, |_, _, _| Ok(()))
    }

    /// Removes a sequence, see [`Request::Remove`]: nothing is left to carry out.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::ForeignSequence`].
    pub fn remove_sequence(&mut self, id: SequenceId) -> Result<Operation, Error> {
        let applied = self.planner.apply(Request::Remove(id))?;
        Ok(self.planner.commit_applied(applied))
    }

    /// Adds a sequence with the content of another, see [`Request::Fork`].
    ///
    /// # Errors
    /// As [`Planner::pages_for`], and what the executor lacks.
    pub fn fork(
        &mut self,
        recorder: &mut E::Recorder,
        id: SequenceId,
    ) -> Result<(SequenceId, Operation), Error> {
        let (created, operation) = self.operate(recorder, Request::Fork(id))?;
        // A fork adds a sequence.
        Ok((created.unwrap_or(id), operation))
    }

    /// Adds a sequence with the content of a snapshot.
    ///
    /// # Errors
    /// [`Error::SnapshotMismatch`] if it was saved with another configuration; as [`Planner::pages_for`], and
    /// what the executor lacks.
    pub fn load(
        &mut self,
        recorder: &mut E::Recorder,
        snapshot: &Snapshot,
    ) -> Result<(SequenceId, Operation), Error> {
        let shape = self.planner.shape();
        snapshot.check(&shape.classes)?;
        let lengths: Vec<SequenceLengths> =
            shape.classes.iter().map(|class| snapshot.lengths_of(class)).collect();
        let write = |lifecycle: &mut Self, recorder: &mut E::Recorder, created: Option<SequenceId>| {
            let views = lifecycle.views(created)?;
            lifecycle.executor.write(recorder, &views, snapshot.layers())
        };
        let (created, operation) = self.transact(recorder, Request::Insert(&lengths), write)?;
        Ok((created.ok_or_else(no_sequence)?, operation))
    }

    /// Where a sequence that has just been made lies, by class.
    fn views(&self, id: Option<SequenceId>) -> Result<Vec<SequenceView>, Error> {
        let id = id.ok_or_else(no_sequence)?;
        (0..self.planner.classes()).map(|class| self.planner.view(class, id)).collect()
    }

    /// What a layer holds of a sequence.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::ForeignSequence`], [`Error::LayerOutOfRange`], and what the
    /// executor lacks.
    pub async fn state(&self, layer: u32, id: SequenceId) -> Result<LayerState, Error> {
        let (class, index) = self.planner.shape().place(layer)?;
        let view = self.planner.view(class, id)?;
        self.executor.read(class, index, &view).await
    }

    /// What every layer holds of a sequence.
    ///
    /// # Errors
    /// As [`Self::state`].
    pub async fn save(&self, id: SequenceId) -> Result<Snapshot, Error> {
        let shape = self.planner.shape();
        let mut layers = Vec::with_capacity(shape.places.len());
        for layer in 0..shape.layers() {
            layers.push(self.state(layer, id).await?);
        }
        Ok(Snapshot::new(&shape.classes, layers))
    }

    /// Gives back every slab of which no page is in use, see [`Planner::shrink_to_fit`].
    pub fn shrink_to_fit(&mut self) -> Operation {
        let (operation, slabs) = self.planner.shrink_to_fit();
        for (class, slabs) in slabs.iter().enumerate() {
            self.executor.shrink(class, slabs);
        }
        operation
    }

    /// Undoes the latest operation, see [`Planner::discard`].
    ///
    /// # Errors
    /// [`Error::NotLatest`], [`Error::TooOld`], [`Error::ForeignOperation`].
    pub fn discard(&mut self, operation: Operation) -> Result<(), Error> {
        self.planner.discard(operation)
    }

    /// Adds exactly the slabs that are missing for `pages` free pages in a class.
    ///
    /// # Errors
    /// [`Error::CapacityExceeded`], and what the executor lacks.
    pub fn reserve(&mut self, class: usize, pages: u32) -> Result<(), Error> {
        self.grow(class, pages, true)
    }

    /// Applies an operation; `write` does what goes beyond its plans.
    fn transact(
        &mut self,
        recorder: &mut E::Recorder,
        request: Request<'_>,
        write: impl FnOnce(&mut Self, &mut E::Recorder, Option<SequenceId>) -> Result<(), Error>,
    ) -> Result<(Option<SequenceId>, Operation), Error> {
        let pages = self.planner.pages_for(request)?;
        self.make_room(&pages)?;
        let applied = self.planner.apply(request)?;
        let prepared = self.prepare(recorder, &applied.plans).and_then(|work| {
            write(self, recorder, applied.created)?;
            Ok(work)
        });
        match prepared {
            Ok(work) => {
                if let Some(work) = work {
                    self.executor.carry_out(recorder, &applied.plans, &work);
                }
                Ok((applied.created, self.planner.commit_applied(applied)))
            }
            Err(error) => {
                self.planner.abandon(applied);
                Err(error)
            }
        }
    }

    /// Prepares an operation that has been applied: no work if there is nothing to carry out.
    fn prepare(&mut self, recorder: &mut E::Recorder, plans: &[Plan]) -> Result<Option<E::Work>, Error> {
        for class in 0..self.planner.classes() {
            // Sequences may share more than before.
            self.executor.fit(class, self.planner.pool_size(class))?;
        }
        if plans.iter().all(Plan::is_empty) {
            return Ok(None);
        }
        self.executor.prepare(recorder, plans).map(Some)
    }

    /// Makes sure that so many pages of each class are free. Where the usual growth fails, less may still
    /// fit.
    fn make_room(&mut self, pages: &[u32]) -> Result<(), Error> {
        for (class, &pages) in pages.iter().enumerate() {
            self.grow(class, pages, false).or_else(|_| self.grow(class, pages, true))?;
        }
        Ok(())
    }

    fn grow(&mut self, class: usize, pages: u32, exactly: bool) -> Result<(), Error> {
        if let Some(growth) = self.planner.growth(class, pages, exactly)? {
            let Growth { slabs, size, .. } = &growth;
            self.executor.grow(class, slabs, *size)?;
            self.planner.grow(&growth);
        }
        Ok(())
    }
}

/// The result of a future that needs no waiting. `None` where it has to wait.
pub(crate) fn now_or_never<T>(future: impl Future<Output = T>) -> Option<T> {
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    match std::pin::pin!(future).poll(&mut context) {
        std::task::Poll::Ready(value) => Some(value),
        std::task::Poll::Pending => None,
    }
}

/// What cannot be: an insertion adds a sequence.
fn no_sequence() -> Error {
    Error::SnapshotCorrupt { detail: "it makes no sequence".into() }
}
