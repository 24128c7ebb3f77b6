//! The latest operations, and how to undo them.

use super::Plan;
use super::table::{Change, Table};
use crate::error::Error;
use crate::ids::CacheId;
use crate::ids::SequenceId;
use std::collections::VecDeque;

/// An operation that a planner has applied and that its executor is about to carry out:
/// [`Planner::commit_applied`](super::Planner::commit_applied) keeps it,
/// [`Planner::abandon`](super::Planner::abandon) takes it back.
#[derive(Debug)]
#[must_use = "an operation is either committed or abandoned"]
pub struct Applied {
    /// The work of each class.
    pub plans: Vec<Plan>,
    /// The sequence that is new.
    pub created: Option<SequenceId>,
    pub(super) changes: Vec<Change>,
    pub(super) last_id: u64,
}

/// A finished operation, as a handle for `discard`. No other cache takes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Operation {
    number: u64,
    cache: CacheId,
}

/// Of a cache.
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

    /// Forgets the latest operation that made a change of which `needs` is true, and all before it: they can
    /// no longer be undone.
    pub(super) fn forget(&mut self, needs: impl Fn(&Change) -> bool) {
        let last = self.records.iter().rposition(|(_, changes)| changes.iter().any(&needs));
        self.records.drain(..last.map_or(0, |at| at + 1));
    }

    /// Undoes `operation` if it is the latest.
    pub(super) fn discard(
        &mut self,
        operation: Operation,
        table: &mut Table,
        max_undo: u32,
    ) -> Result<(), Error> {
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
        if let Some((_, changes)) = self.records.pop_back() {
            table.undo_all(changes);
        }
        Ok(())
    }
}
