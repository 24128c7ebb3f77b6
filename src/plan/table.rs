//! What a planner knows, and how each change of it is undone.

use super::StepPlan;
use super::identity::CacheId;
use super::pool::{Page, PageChange, Pool};
use super::sequence::{Sequence, SequenceId, SequenceLengths};
use crate::error::Error;
use crate::geometry::Geometry;
use std::collections::{BTreeMap, VecDeque};

/// Sequences, pages, and the homes (rings and sink slots) of sequences.
#[derive(Debug, Clone)]
pub(super) struct Table {
    cache: CacheId,
    pub(super) pool: Pool,
    /// Homes without a sequence. The next to hand out is the last; freed ones come last in turn, as for pages.
    homes: VecDeque<u32>,
    pub(super) sequences: BTreeMap<SequenceId, Sequence>,
    last_id: u64,
}

/// One change of a table.
#[derive(Debug, Clone)]
pub(super) enum Change {
    Page(PageChange),
    HomeTaken(u32),
    HomeFreed(u32),
    /// The sequence before; `None`: there was none.
    Sequence(SequenceId, Option<Sequence>),
    /// A step of a sequence.
    Step(SequenceId, Before),
}

/// What a sequence was before a step, without the pages that it has still.
#[derive(Debug, Clone)]
pub(super) struct Before {
    lengths: SequenceLengths,
    ring_start: u32,
    /// Number of its pages.
    pages: usize,
    /// The last of them, if the step replaced it.
    replaced: Option<Page>,
    /// Those at the front that are gone.
    evicted: Vec<Page>,
}

impl Table {
    pub(super) fn new(g: &Geometry, cache: CacheId) -> Table {
        Table {
            cache,
            pool: Pool::new(&g.slab_pages),
            homes: (0..g.max_sequences).rev().collect(),
            sequences: BTreeMap::new(),
            last_id: 0,
        }
    }

    pub(super) fn get(&self, id: SequenceId) -> Result<&Sequence, Error> {
        if id.cache != self.cache {
            return Err(Error::ForeignSequence(id));
        }
        self.sequences.get(&id).ok_or(Error::UnknownSequence(id))
    }

    /// The home that the next sequence gets.
    pub(super) fn next_home(&self) -> Option<u32> {
        self.homes.back().copied()
    }

    /// Undoes an operation of which nobody has heard: not even an id is gone.
    pub(super) fn take_back(&mut self, applied: Applied) {
        self.undo_all(applied.changes);
        self.last_id = applied.last_id;
    }

    /// Undoes changes, the last first.
    pub(super) fn undo_all(&mut self, changes: Vec<Change>) {
        for change in changes.into_iter().rev() {
            self.undo(change);
        }
    }

    fn undo(&mut self, change: Change) {
        match change {
            Change::Page(change) => self.pool.undo(change),
            Change::HomeTaken(home) => self.homes.push_back(home),
            // Ids and homes of sequences that were created since do not matter; it is still there, or the record would be gone.
            Change::HomeFreed(home) => self.homes.retain(|free| *free != home),
            Change::Sequence(id, Some(before)) => {
                self.sequences.insert(id, before);
            }
            Change::Sequence(id, None) => {
                self.sequences.remove(&id);
            }
            Change::Step(id, before) => {
                if let Some(sequence) = self.sequences.get_mut(&id) {
                    sequence.pages.splice(0..0, before.evicted);
                    sequence.pages.truncate(before.pages);
                    if let (Some(page), Some(last)) = (before.replaced, sequence.pages.last_mut()) {
                        *last = page;
                    }
                    (sequence.lengths, sequence.ring_start) = (before.lengths, before.ring_start);
                }
            }
        }
    }
}

/// What a step makes of a sequence.
#[derive(Debug, Clone)]
pub(super) struct Stepped {
    pub(super) lengths: SequenceLengths,
    pub(super) ring_start: u32,
    /// Takes the place of the last page, which others hold too.
    pub(super) replaced: Option<Page>,
    pub(super) new_pages: Vec<Page>,
}

/// Changes that belong together: all of them happen, or none.
#[derive(Debug)]
pub(super) struct Edit<'a> {
    pub(super) table: &'a mut Table,
    changes: Vec<Change>,
    /// The table's last id before.
    last_id: u64,
}

impl<'a> Edit<'a> {
    pub(super) fn new(table: &'a mut Table) -> Edit<'a> {
        Edit { last_id: table.last_id, table, changes: Vec::new() }
    }

    /// An id that no sequence has had.
    pub(super) fn new_id(&mut self) -> SequenceId {
        self.table.last_id += 1;
        SequenceId { number: self.table.last_id, cache: self.table.cache }
    }

    pub(super) fn take_page(&mut self) -> Option<Page> {
        let (page, change) = self.table.pool.take()?;
        self.changes.push(Change::Page(change));
        Some(page)
    }

    pub(super) fn share_page(&mut self, page: Page) {
        self.changes.push(Change::Page(self.table.pool.share(page)));
    }

    pub(super) fn release_pages(&mut self, pages: &[Page]) {
        for &page in pages {
            self.changes.push(Change::Page(self.table.pool.release(page)));
        }
    }

    pub(super) fn take_home(&mut self) -> Option<u32> {
        let home = self.table.homes.pop_back()?;
        self.changes.push(Change::HomeTaken(home));
        Some(home)
    }

    pub(super) fn free_home(&mut self, home: u32) {
        self.table.homes.push_front(home);
        self.changes.push(Change::HomeFreed(home));
    }

    /// Puts `sequence` in the place of what `id` was.
    pub(super) fn set(&mut self, id: SequenceId, sequence: Option<Sequence>) {
        let before = match sequence {
            Some(sequence) => self.table.sequences.insert(id, sequence),
            None => self.table.sequences.remove(&id),
        };
        self.changes.push(Change::Sequence(id, before));
    }

    /// What a step makes of a sequence; it loses the `evicted` oldest pages.
    pub(super) fn step(&mut self, id: SequenceId, step: Stepped, evicted: u32) {
        let Some(sequence) = self.table.sequences.get_mut(&id) else { return };
        let (lengths, ring_start, pages) = (sequence.lengths, sequence.ring_start, sequence.pages.len());
        let mut replaced = None;
        if let (Some(page), Some(last)) = (step.replaced, sequence.pages.last_mut()) {
            replaced = Some(std::mem::replace(last, page));
        }
        sequence.pages.extend(step.new_pages);
        let evicted: Vec<Page> = sequence.pages.drain(..evicted as usize).collect();
        (sequence.lengths, sequence.ring_start) = (step.lengths, step.ring_start);
        let before = Before { lengths, ring_start, pages, replaced, evicted: evicted.clone() };
        self.changes.push(Change::Step(id, before));
        self.release_pages(replaced.as_slice());
        self.release_pages(&evicted);
    }

    /// Undoes everything.
    pub(super) fn abandon(self) {
        self.table.undo_all(self.changes);
    }

    /// What was done.
    pub(super) fn finish(self) -> Vec<Change> {
        self.changes
    }

    /// What was done, to be carried out by `plan`.
    pub(super) fn applied(self, plan: StepPlan) -> Applied {
        Applied { plan, changes: self.changes, last_id: self.last_id }
    }
}

/// An operation that a planner has applied and that its executor is about to carry out: [`Planner::commit_applied`](super::Planner::commit_applied) keeps it,
/// [`Planner::abandon`](super::Planner::abandon) takes it back.
#[derive(Debug)]
#[must_use = "an operation is either committed or abandoned"]
pub struct Applied {
    /// The work.
    pub plan: StepPlan,
    pub(super) changes: Vec<Change>,
    last_id: u64,
}

/// A finished operation, as a handle for `discard`. No other cache takes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Operation {
    number: u64,
    cache: CacheId,
}

/// The latest operations, and how to undo them.
#[derive(Debug, Clone)]
pub(super) struct Journal {
    cache: CacheId,
    records: VecDeque<(Operation, Vec<Change>)>,
    operations: u64,
}

impl Journal {
    pub(super) fn new(cache: CacheId) -> Journal {
        Journal { cache, records: VecDeque::new(), operations: 0 }
    }

    /// Adds an operation; of the older ones, `max_undo` in all are kept.
    pub(super) fn record(&mut self, changes: Vec<Change>, max_undo: u32) -> Operation {
        self.operations += 1;
        let operation = Operation { number: self.operations, cache: self.cache };
        self.records.push_back((operation, changes));
        while self.records.len() > max_undo as usize {
            self.records.pop_front();
        }
        operation
    }

    /// Forgets the latest operation that made a change of which `needs` is true, and all before it: they can no longer be undone.
    pub(super) fn forget(&mut self, needs: impl Fn(&Change) -> bool) {
        let last = self.records.iter().rposition(|(_, changes)| changes.iter().any(&needs));
        self.records.drain(..last.map_or(0, |at| at + 1));
    }

    /// Whether `operation` can be undone: if it is the latest.
    pub(super) fn check_discard(&self, operation: Operation, max_undo: u32) -> Result<(), Error> {
        if operation.cache != self.cache {
            return Err(Error::ForeignOperation);
        }
        let latest = self.records.back().map(|(operation, _)| *operation);
        if latest != Some(operation) {
            let known = self.records.iter().any(|(recorded, _)| *recorded == operation);
            return Err(match latest {
                Some(latest) if known => Error::NotLatest { given: operation.number, latest: latest.number },
                _ => Error::TooOld { given: operation.number, max_undo },
            });
        }
        Ok(())
    }

    /// Undoes `operation` if it is the latest.
    pub(super) fn discard(
        &mut self,
        operation: Operation,
        table: &mut Table,
        max_undo: u32,
    ) -> Result<(), Error> {
        self.check_discard(operation, max_undo)?;
        if let Some((_, changes)) = self.records.pop_back() {
            table.undo_all(changes);
        }
        Ok(())
    }
}
