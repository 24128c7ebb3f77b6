//! Operations on whole sequences: what each asks for, and the pages that it takes.

use super::pool::pages_for;
use super::sequence::{Sequence, SequenceLengths};
use super::{Planner, pool::Page};
use crate::error::Error;
use crate::ids::SequenceId;
use std::collections::{HashMap, HashSet};

/// An operation on whole sequences.
#[derive(Debug, Clone, Copy)]
pub enum Request<'a> {
    /// Removes a sequence. Pages that no other sequence holds are free from the next operation on.
    Remove(SequenceId),
    /// Cuts a sequence to its first tokens. Blocks that remain whole are not touched; of a block that is cut,
    /// the tokens that remain return to the window, dequantized.
    Truncate(SequenceId, u32),
    /// Adds a sequence with the content of another. They share full pages; sinks, window and a partly filled
    /// last page are copied.
    Fork(SequenceId),
    /// Adds a sequence of these lengths, by class. What it holds is for the executor to write where
    /// [`Planner::view`] says, before the operation is committed.
    Insert(&'a [SequenceLengths]),
    /// Gives each of the sequences the content that the sequence with its parent's index had: the step of a
    /// beam search from one set of beams to the next. A sequence that is a parent once costs nothing; each
    /// further use of it is a copy as by a fork. What is nobody's parent is dropped.
    Reorder(&'a [SequenceId], &'a [usize]),
}

/// A reorder: who gets what.
pub(super) struct Heirs {
    pub(super) before: Vec<Sequence>,
    /// By parent: who takes its content over; the others copy it.
    heirs: Vec<Option<usize>>,
}

impl Heirs {
    /// Those who copy.
    pub(super) fn copies<'a>(&'a self, parents: &'a [usize]) -> impl Iterator<Item = usize> + 'a {
        (0..parents.len()).filter(|i| self.heirs[parents[*i]] != Some(*i))
    }

    /// The contents that nobody wants.
    pub(super) fn dropped(&self) -> impl Iterator<Item = &Sequence> {
        self.before.iter().zip(&self.heirs).filter(|(_, heir)| heir.is_none()).map(|(sequence, _)| sequence)
    }
}

impl Planner {
    /// The pages that must be free in each class for an operation, which is checked.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::ForeignSequence`] of any; [`Error::TruncateBeyondEnd`] if a
    /// sequence is shorter, [`Error::TruncateIntoEvicted`] where tokens are gone; [`Error::TooManySequences`]
    /// where one is added; [`Error::SequenceLengths`] if no sequence has such lengths;
    /// [`Error::DuplicateSequence`] and [`Error::Parents`] of a reorder; [`Error::CapacityExceeded`] if there
    /// are not that many pages, however far the pool grows.
    pub fn pages_for(&self, request: Request<'_>) -> Result<Vec<u32>, Error> {
        let none = vec![0; self.classes()];
        let pages = match request {
            Request::Remove(id) => self.table.get(id).map(|_| none)?,
            Request::Truncate(id, tokens) => self.check_truncate(id, tokens).map(|()| none)?,
            Request::Fork(id) => {
                let parent = self.table.get(id)?;
                self.ring_for_one()?;
                let open = |class| self.part(parent, class).blocks_on_open_page() > 0;
                (0..self.classes()).map(|class| open(class).into()).collect()
            }
            Request::Insert(lengths) => self.check_insert(lengths)?,
            Request::Reorder(sequences, parents) => {
                let heirs = self.heirs(sequences, parents)?;
                (0..self.classes()).map(|class| self.pages_for_copies(class, &heirs, parents)).collect()
            }
        };
        for (class, &needed) in pages.iter().enumerate() {
            self.check_room(class, needed, |_| 0)?;
        }
        Ok(pages)
    }

    /// A ring for one sequence more.
    pub(super) fn ring_for_one(&self) -> Result<u32, Error> {
        let max = self.shape().first().max_sequences;
        self.table.next_ring().ok_or(Error::TooManySequences { max })
    }

    pub(super) fn check_truncate(&self, id: SequenceId, tokens: u32) -> Result<(), Error> {
        let sequence = self.table.get(id)?;
        if tokens > sequence.tokens {
            return Err(Error::TruncateBeyondEnd { sequence: id, got: tokens, tokens: sequence.tokens });
        }
        for (class, shape) in self.shape().classes.iter().enumerate() {
            let (sinks, lengths) = (shape.sinks, self.part(sequence, class).lengths);
            let first = sinks + lengths.evicted * shape.layout.group;
            if tokens < first && tokens > sinks {
                return Err(Error::TruncateIntoEvicted { sequence: id, got: tokens, first, sinks });
            }
        }
        Ok(())
    }

    fn check_insert(&self, lengths: &[SequenceLengths]) -> Result<Vec<u32>, Error> {
        let classes = &self.shape().classes;
        let odd = |lengths: &SequenceLengths| {
            let &SequenceLengths { tokens, blocks, evicted } = lengths;
            Err(Error::SequenceLengths { tokens, blocks, evicted })
        };
        let first = lengths.first().copied().unwrap_or_default();
        if lengths.len() != classes.len() {
            return odd(&first);
        }
        for (shape, own) in classes.iter().zip(lengths) {
            own.check(shape)?;
            if own.tokens != first.tokens {
                return odd(own);
            }
        }
        self.ring_for_one()?;
        let pages = classes.iter().zip(lengths).map(|(shape, lengths)| {
            pages_for(lengths.blocks, shape.layout.group) - lengths.evicted_pages(shape)
        });
        Ok(pages.collect())
    }

    /// Checks a reorder.
    pub(super) fn heirs(&self, sequences: &[SequenceId], parents: &[usize]) -> Result<Heirs, Error> {
        let n = sequences.len();
        if parents.len() != n || parents.iter().any(|parent| *parent >= n) {
            let largest = parents.iter().max().map_or(0, |parent| *parent as u64);
            return Err(Error::Parents { sequences: n as u64, parents: parents.len() as u64, largest });
        }
        let mut before = Vec::with_capacity(n);
        let mut seen = HashSet::with_capacity(n);
        for &id in sequences {
            if !seen.insert(id) {
                return Err(Error::DuplicateSequence(id));
            }
            before.push(self.table.get(id)?.clone());
        }
        // Who takes a content over: the sequence that had it, if it keeps it, else the first that wants it.
        let mut heirs: Vec<Option<usize>> = vec![None; n];
        for (i, &parent) in parents.iter().enumerate() {
            if heirs[parent].is_none() || parent == i {
                heirs[parent] = Some(i);
            }
        }
        Ok(Heirs { before, heirs })
    }

    /// Pages that a reorder takes in a class, less those that it gives back before.
    fn pages_for_copies(&self, class: usize, heirs: &Heirs, parents: &[usize]) -> u32 {
        let mut dropped: HashMap<Page, u32> = HashMap::new();
        for page in heirs.dropped().flat_map(|sequence| &sequence.held[class].pages) {
            *dropped.entry(*page).or_default() += 1;
        }
        let pool = &self.table.pools[class];
        let gained =
            dropped.iter().filter(|(page, holders)| pool.held_by(**page) == **holders).count() as u32;
        let open = |i: &usize| self.part(&heirs.before[parents[*i]], class).blocks_on_open_page() > 0;
        (heirs.copies(parents).filter(open).count() as u32).saturating_sub(gained)
    }
}
