//! The least that an executor is: it has no memory and no kernels, and records what it is asked to do.

use crate::reference::NaiveSequence;
use crate::reference::program::{Executor, Machine, Work};
use kivi_wgpu::internals::lifecycle::{self, Lifecycle};
use kivi_wgpu::internals::plan::{NewSlab, Plan, Planner, PoolLimits, PoolSize, Request, SequenceView};
use kivi_wgpu::{CacheConfig, CacheShape, Error, LayerState, Operation, SequenceId, SequenceStep};
use std::sync::Arc;

/// What an executor was asked to do.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Call {
    Grow,
    Shrink,
    Prepare(usize),
    CarryOut,
    Write,
}

#[derive(Debug, Default)]
struct Recorder {
    calls: Vec<Call>,
    pages: Vec<Vec<u32>>,
}

impl lifecycle::Executor for Recorder {
    type Recorder = ();
    /// The number of the preparation.
    type Work = usize;

    fn grow(&mut self, class: usize, slabs: &[NewSlab], size: PoolSize) -> Result<(), Error> {
        self.calls.push(Call::Grow);
        self.pages[class].resize(size.slabs as usize, 0);
        slabs.iter().for_each(|new| self.pages[class][new.slab as usize] = new.pages);
        Ok(())
    }

    fn shrink(&mut self, class: usize, slabs: &[u32]) {
        self.calls.push(Call::Shrink);
        slabs.iter().for_each(|slab| self.pages[class][*slab as usize] = 0);
    }

    fn fit(&mut self, class: usize, size: PoolSize) -> Result<(), Error> {
        assert_eq!(self.pages[class].iter().sum::<u32>(), size.pages);
        Ok(())
    }

    fn prepare(&mut self, (): &mut (), plans: &[Plan]) -> Result<usize, Error> {
        assert_eq!(plans.len(), self.pages.len());
        self.calls.push(Call::Prepare(self.calls.len()));
        Ok(self.calls.len() - 1)
    }

    fn carry_out(&mut self, (): &mut (), plans: &[Plan], work: &usize) {
        assert_eq!(self.calls[*work], Call::Prepare(*work), "only what was prepared is carried out");
        assert!(plans.iter().any(|plan| !plan.is_empty()));
        self.calls.push(Call::CarryOut);
    }

    fn write(&mut self, (): &mut (), views: &[SequenceView], _: &[LayerState]) -> Result<(), Error> {
        assert_eq!(views.len(), self.pages.len());
        self.calls.push(Call::Write);
        Ok(())
    }

    async fn read(&self, _: usize, _: usize, view: &SequenceView) -> Result<LayerState, Error> {
        Ok(LayerState { lengths: view.lengths, ..LayerState::default() })
    }
}

/// A cache whose content nobody knows.
pub struct Recorded(Lifecycle<Recorder>);

impl Recorded {
    pub fn machine(config: &CacheConfig) -> Machine<Recorded> {
        let shape = Arc::new(CacheShape::new(config).unwrap());
        let pool = |s| PoolLimits::new(s, config, 128 << 20).unwrap();
        let pools: Vec<PoolLimits> = shape.classes.iter().map(pool).collect();
        let pages = pools.iter().map(PoolLimits::slabs).collect();
        let recorder = Recorder { calls: Vec::new(), pages };
        Machine::new(config, Recorded(Lifecycle::new(Planner::new(shape, pools), recorder)))
    }
}

impl Executor for Recorded {
    fn create(&mut self) -> Result<SequenceId, Error> {
        self.0.create_sequence()
    }

    fn remove(&mut self, id: SequenceId, _: Work) -> Operation {
        self.0.remove_sequence(id).unwrap()
    }

    fn step(
        &mut self,
        steps: &[SequenceStep],
        _: &[u64],
        _: &[NaiveSequence],
        _: Work,
    ) -> Result<Operation, Error> {
        let mut begun = self.0.begin_step(&mut (), steps)?;
        assert_eq!(self.0.executor().calls[begun.work], Call::Prepare(begun.work));
        (0..self.0.planner().shape().layers()).for_each(|layer| begun.recorded(layer));
        self.0.finish_step(begun)
    }

    fn dropped_step(&mut self, steps: &[SequenceStep], _: &[u64]) {
        drop(self.0.begin_step(&mut (), steps));
    }

    fn truncate(&mut self, id: SequenceId, tokens: u32, _: &NaiveSequence, _: Work) -> Operation {
        self.0.operate(&mut (), Request::Truncate(id, tokens)).unwrap().1
    }

    fn fork(&mut self, id: SequenceId, _: Work) -> Result<(SequenceId, Operation), Error> {
        self.0.fork(&mut (), id)
    }

    fn reorder(&mut self, ids: &[SequenceId], parents: &[usize], _: Work) -> Result<Operation, Error> {
        Ok(self.0.operate(&mut (), Request::Reorder(ids, parents))?.1)
    }

    fn save_and_load(&mut self, id: SequenceId) -> Result<SequenceId, Error> {
        Ok(self.0.load(&mut (), &pollster::block_on(self.0.save(id))?)?.0)
    }

    fn shrink(&mut self) {
        self.0.shrink_to_fit();
    }

    fn free_pages(&self) -> u32 {
        self.0.planner().free_pages(0)
    }

    fn discard(&mut self, operation: Operation) -> Result<(), Error> {
        self.0.discard(operation)
    }

    fn check(&mut self, model: &[(SequenceId, NaiveSequence)]) {
        for (id, naive) in model {
            assert_eq!(self.0.planner().tokens(*id), Ok(naive.tokens.len() as u32));
        }
        for (class, pages) in self.0.executor().pages.iter().enumerate() {
            assert_eq!(self.0.planner().slab_pages(class), *pages);
        }
    }

    fn poison(&mut self) {}
}
