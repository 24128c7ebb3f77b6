//! Programs of operations on sequences, and a machine that runs them on an executor and on the naive model at
//! once.

use super::{NaiveSequence, Rules};
use kivi_wgpu::{CacheConfig, Error, Operation, SequenceId, SequenceStep};
use proptest::prelude::*;

/// One operation. Sequences are indices into those that there are, modulo their number; so any program can be
/// run, shrunk or not.
#[derive(Debug, Clone)]
pub enum Op {
    Create,
    Remove(usize),
    /// (sequence, tokens, queries)
    Step(Vec<(usize, u32, u32)>),
    /// To this share of 1000 of the length, then this much less.
    Truncate(usize, u32, u32),
    /// As far back as `truncate` may go in speculative decoding: at most the window.
    Rollback(usize, u32),
    Fork(usize),
    /// Parents of all sequences.
    Reorder(Vec<usize>),
    /// Saved, and loaded beside the original, which is then removed.
    SaveAndLoad(usize),
    Shrink,
    /// A step that is recorded and submitted, and never finished.
    Dropped(usize, u32),
    /// Operations whose encoders are thrown away, then discarded newest first.
    Discarded(Vec<Op>),
}

/// Whether an operation's encoder is submitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    Submitted,
    ThrownAway,
}

/// Something that runs operations and can compare what it holds with the naive model.
pub trait Executor {
    fn create(&mut self) -> Result<SequenceId, Error>;
    fn remove(&mut self, id: SequenceId, work: Work) -> Operation;
    /// Runs a step with these new tokens. `during` are the sequences when its queries attend: the new tokens
    /// have entered, nothing is packed yet.
    fn step(
        &mut self,
        steps: &[SequenceStep],
        tokens: &[u64],
        during: &[NaiveSequence],
        work: Work,
    ) -> Result<Operation, Error>;
    /// Runs a step and does not finish it.
    fn dropped_step(&mut self, steps: &[SequenceStep], tokens: &[u64]);
    /// `before` is the sequence before.
    fn truncate(&mut self, id: SequenceId, tokens: u32, before: &NaiveSequence, work: Work) -> Operation;
    fn fork(&mut self, id: SequenceId, work: Work) -> Result<(SequenceId, Operation), Error>;
    fn reorder(&mut self, ids: &[SequenceId], parents: &[usize], work: Work) -> Result<Operation, Error>;
    fn save_and_load(&mut self, id: SequenceId) -> Result<SequenceId, Error>;
    fn shrink(&mut self);
    fn free_pages(&self) -> u32;
    fn discard(&mut self, operation: Operation) -> Result<(), Error>;
    /// Compares the content of every sequence with the model's.
    fn check(&mut self, model: &[(SequenceId, NaiveSequence)]);
    /// What no sequence holds may be anything from now on.
    fn poison(&mut self);
}

fn tokens() -> impl Strategy<Value = u32> {
    prop_oneof![3 => Just(1u32), 2 => 0u32..40, 2 => 0u32..200, 1 => Just(128u32), 1 => Just(160u32)]
}

fn queries() -> impl Strategy<Value = u32> {
    prop_oneof![0u32..9, 0u32..60]
}

/// Operations that can be discarded.
fn operation() -> impl Strategy<Value = Op> {
    let share = prop_oneof![3 => 0u32..=1000, 1 => Just(1000u32), 1 => Just(0u32)];
    prop_oneof![
        8 => prop::collection::vec((any::<usize>(), tokens(), queries()), 1..4).prop_map(Op::Step),
        2 => (any::<usize>(), share, 0u32..40).prop_map(|(s, share, less)| Op::Truncate(s, share, less)),
        2 => (any::<usize>(), 0u32..140).prop_map(|(s, n)| Op::Rollback(s, n)),
        2 => any::<usize>().prop_map(Op::Fork),
        1 => prop::collection::vec(any::<usize>(), 1..5).prop_map(Op::Reorder),
        1 => any::<usize>().prop_map(Op::Remove),
    ]
}

pub fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        16 => operation(),
        2 => Just(Op::Create),
        1 => Just(Op::Shrink),
        1 => any::<usize>().prop_map(Op::SaveAndLoad),
        2 => (any::<usize>(), tokens()).prop_map(|(s, n)| Op::Dropped(s, n)),
        2 => prop::collection::vec(operation(), 1..4).prop_map(Op::Discarded),
    ]
}

pub fn program(longest: usize) -> impl Strategy<Value = Vec<Op>> {
    prop::collection::vec(op(), 1..longest)
}

/// An executor and the model that it should agree with.
pub struct Machine<E> {
    pub executor: E,
    rules: Rules,
    max_step: u32,
    max_sequences: usize,
    /// Whether the pool may ever be full.
    may_be_full: bool,
    pub model: Vec<(SequenceId, NaiveSequence)>,
    next_name: u64,
}

impl<E: Executor> Machine<E> {
    /// The executor has no sequence.
    pub fn new(config: &CacheConfig, executor: E) -> Machine<E> {
        Machine {
            executor,
            rules: Rules::of(config),
            max_step: config.max_step,
            max_sequences: config.max_sequences as usize,
            may_be_full: config.format.history_limit.is_none() || config.max_capacity.is_some(),
            model: Vec::new(),
            next_name: 0,
        }
    }

    /// Runs a program, with a first sequence to begin with.
    pub fn run(&mut self, program: &[Op]) {
        self.apply(&Op::Create);
        for op in program {
            self.apply(op);
        }
    }

    fn fresh(&mut self, n: u32) -> Vec<u64> {
        let first = self.next_name;
        self.next_name += u64::from(n);
        (first..self.next_name).collect()
    }

    /// Index and id of a sequence, if there is any.
    fn pick(&self, which: usize) -> Option<(usize, SequenceId)> {
        let at = which.checked_rem(self.model.len())?;
        Some((at, self.model[at].0))
    }

    /// Steps within the limits of a cache.
    fn steps(&self, wanted: &[(usize, u32, u32)]) -> Vec<SequenceStep> {
        let mut steps: Vec<SequenceStep> = Vec::new();
        for &(which, tokens, queries) in wanted {
            let Some((at, sequence)) = self.pick(which) else { continue };
            let append = tokens.min(self.max_step);
            let naive = &self.model[at].1;
            // Queries whose own token is gone are refused.
            let gone = if naive.evicted > 0 { self.rules.sinks + naive.evicted } else { 0 };
            let length = (naive.tokens.len() - gone) as u32;
            let attend = queries.min(length + append).min(self.max_step);
            if steps.iter().all(|s| s.sequence != sequence) {
                steps.push(SequenceStep::new(sequence, append, attend));
            }
        }
        steps
    }

    pub fn apply(&mut self, op: &Op) {
        self.apply_unpoisoned(op);
        self.executor.poison();
    }

    pub fn apply_unpoisoned(&mut self, op: &Op) {
        match op {
            Op::Create => match self.executor.create() {
                Ok(id) => self.model.push((id, NaiveSequence::default())),
                Err(Error::TooManySequences { max }) => {
                    assert_eq!((self.model.len(), self.max_sequences), (max as usize, max as usize));
                }
                Err(error) => panic!("{error}"),
            },
            Op::Shrink => self.executor.shrink(),
            Op::SaveAndLoad(which) => {
                if let Some((at, id)) = self.pick(*which)
                    && let Some(loaded) = room(self.executor.save_and_load(id), self.may_be_full)
                {
                    self.executor.remove(id, Work::Submitted);
                    self.model[at].0 = loaded;
                }
            }
            Op::Dropped(which, tokens) => {
                let steps = self.steps(&[(*which, *tokens, 1)]);
                let names = self.fresh(steps.iter().map(|s| s.append).sum());
                self.executor.dropped_step(&steps, &names);
            }
            Op::Discarded(ops) => {
                let before = self.model.clone();
                let operations: Vec<Operation> =
                    ops.iter().filter_map(|op| self.operate(op, Work::ThrownAway)).collect();
                if let [first, .., _] = operations[..] {
                    assert!(matches!(self.executor.discard(first), Err(Error::NotLatest { .. })));
                }
                for operation in operations.into_iter().rev() {
                    self.executor.discard(operation).unwrap();
                }
                self.model = before;
            }
            // Its pages are handed out last: a removal can be undone even after a step of another sequence
            // was dropped, if that step found others.
            Op::Remove(which) if which % 4 == 1 && self.model.len() > 1 => {
                let before = self.model.clone();
                let spare = u32::from(self.executor.free_pages() > 0);
                let operation = self.operate(op, Work::ThrownAway);
                self.apply_unpoisoned(&Op::Dropped(*which, spare));
                self.executor.discard(operation.unwrap()).unwrap();
                self.model = before;
            }
            op => {
                self.operate(op, Work::Submitted);
            }
        }
        self.executor.check(&self.model);
    }

    fn operate(&mut self, op: &Op, work: Work) -> Option<Operation> {
        match op {
            Op::Step(wanted) => {
                let steps = self.steps(wanted);
                let names = self.fresh(steps.iter().map(|s| s.append).sum());
                let mut rest = &names[..];
                let mut during = Vec::new();
                for step in &steps {
                    let (own, tail) = rest.split_at(step.append as usize);
                    rest = tail;
                    let (_, naive) = self.model.iter().find(|(id, _)| *id == step.sequence).unwrap();
                    let mut naive = naive.clone();
                    naive.enter(own.iter().copied());
                    during.push(naive);
                }
                let operation = room(self.executor.step(&steps, &names, &during, work), self.may_be_full)?;
                for (step, mut naive) in steps.iter().zip(during) {
                    naive.pack(&self.rules);
                    let known = self.model.iter_mut().find(|(id, _)| *id == step.sequence);
                    known.unwrap().1 = naive;
                }
                Some(operation)
            }
            Op::Truncate(which, share, less) => {
                let (at, _) = self.pick(*which)?;
                let length = self.model[at].1.tokens.len() as u64;
                let tokens = (length * u64::from(*share) / 1000).saturating_sub(u64::from(*less));
                Some(self.truncate(at, tokens as usize, work))
            }
            Op::Rollback(which, n) => {
                let (at, _) = self.pick(*which)?;
                let back = (*n as usize).min(self.rules.window);
                let tokens = self.model[at].1.tokens.len().saturating_sub(back);
                Some(self.truncate(at, tokens, work))
            }
            Op::Fork(which) => {
                let (at, id) = self.pick(*which)?;
                let (child, operation) = room(self.executor.fork(id, work), self.may_be_full)?;
                let naive = self.model[at].1.clone();
                self.model.push((child, naive));
                Some(operation)
            }
            Op::Reorder(parents) => {
                let n = self.model.len().min(parents.len());
                if n == 0 {
                    return None;
                }
                let parents: Vec<usize> = parents[..n].iter().map(|parent| parent % n).collect();
                let ids: Vec<SequenceId> = self.model[..n].iter().map(|(id, _)| *id).collect();
                let operation = room(self.executor.reorder(&ids, &parents, work), self.may_be_full)?;
                let before: Vec<NaiveSequence> = self.model.iter().map(|(_, naive)| naive.clone()).collect();
                for (i, parent) in parents.into_iter().enumerate() {
                    self.model[i].1 = before[parent].clone();
                }
                Some(operation)
            }
            Op::Remove(which) => {
                let (at, id) = self.pick(*which)?;
                self.model.remove(at);
                Some(self.executor.remove(id, work))
            }
            other => panic!("{other:?} cannot be discarded"),
        }
    }

    fn truncate(&mut self, at: usize, tokens: usize, work: Work) -> Operation {
        let (id, naive) = &mut self.model[at];
        // Among tokens that are gone nothing can be cut.
        let (sinks, first) = (self.rules.sinks, self.rules.sinks + naive.evicted);
        let tokens = if (sinks + 1..first).contains(&tokens) { first } else { tokens };
        let operation = self.executor.truncate(*id, tokens as u32, naive, work);
        naive.truncate(tokens, &self.rules);
        operation
    }
}

/// `None` if there was nothing to do or no room.
fn room<T>(result: Result<T, Error>, may_be_full: bool) -> Option<T> {
    match result {
        Ok(x) => Some(x),
        Err(full @ Error::CapacityExceeded { .. }) if !may_be_full => panic!("{full}"),
        Err(Error::EmptyStep | Error::CapacityExceeded { .. } | Error::TooManySequences { .. }) => None,
        Err(error) => panic!("{error}"),
    }
}
