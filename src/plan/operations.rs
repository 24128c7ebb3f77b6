//! Operations on whole sequences: removal, truncation, forks and reorders.

use super::planner::Planner;
use super::pool::pages_for;
use super::sequence::{Sequence, SequenceId, SequenceLengths};
use super::step::copy_blocks;
use super::table::{Applied, Edit, Operation};
use super::{SlabRange, StepPlan, TokenCopy, TokenUnpack};
use crate::error::Error;
use crate::geometry::Geometry;
use std::collections::HashSet;

impl Planner {
    /// Removes a sequence. Pages that no other sequence holds are free from the next operation on.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::ForeignSequence`].
    pub fn remove_sequence(&mut self, id: SequenceId) -> Result<Operation, Error> {
        let sequence = self.table.get(id)?.clone();
        let mut edit = Edit::new(&mut self.table);
        edit.release_pages(&sequence.pages);
        edit.free_home(sequence.home);
        edit.set(id, None);
        let changes = edit.finish();
        Ok(self.record(changes))
    }

    /// Cuts a sequence to its first `tokens` tokens. Blocks that remain whole are not touched; of a block
    /// that is cut, the tokens that remain return to the window, dequantized. The operation is applied; an
    /// executor carries its plan out (empty if no block is cut), then commits it.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::ForeignSequence`]; [`Error::TruncateBeyondEnd`] if the sequence
    /// is shorter; [`Error::TruncateIntoEvicted`] where tokens are gone.
    pub fn truncate(&mut self, id: SequenceId, tokens: u32) -> Result<Applied, Error> {
        let g = self.geometry().clone();
        let before = self.table.get(id)?.clone();
        if tokens > before.lengths.tokens {
            return Err(Error::TruncateBeyondEnd {
                sequence: id,
                got: tokens,
                tokens: before.lengths.tokens,
            });
        }
        let group = g.layout.group;
        let kept = tokens.saturating_sub(g.sinks);
        let mut lengths = before.lengths;
        (lengths.tokens, lengths.blocks) = (tokens, lengths.blocks.min(kept / group));
        let first = g.sinks + lengths.evicted * group;
        if tokens < first {
            if tokens > g.sinks {
                return Err(Error::TruncateIntoEvicted { sequence: id, got: tokens, first, sinks: g.sinks });
            }
            lengths.evicted = 0;
        }
        let evicted = before.lengths.evicted_pages(&g) as usize;
        let pages = (pages_for(lengths.blocks, group) as usize).saturating_sub(evicted);
        let pages = before.pages[..pages].to_vec();
        let after = Sequence { home: before.home, lengths, ring_start: before.ring_start, pages };

        let mut plan = StepPlan::default();
        if lengths.blocks < before.lengths.blocks && !kept.is_multiple_of(group) {
            // All of the window is gone; these are its only tokens now.
            let (slab, block) = before.block(&g, lengths.blocks);
            let unpack = |token| TokenUnpack { block, token, slot: after.ring_slot(&g, token) };
            plan.unpacks = (0..kept % group).map(unpack).collect();
            plan.unpack_slabs.push(SlabRange { slab, items: 0..kept % group });
        }
        let mut edit = Edit::new(&mut self.table);
        edit.release_pages(&before.pages[after.pages.len()..]);
        edit.set(id, Some(after));
        Ok(edit.applied(plan))
    }

    /// Adds a sequence with the content of another. They share full pages; sinks, window and a partly filled
    /// last page are copied. The operation is applied; an executor carries its plan out, then commits it.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::ForeignSequence`], [`Error::TooManySequences`],
    /// [`Error::CapacityExceeded`] for the copied page.
    pub fn fork(&mut self, id: SequenceId) -> Result<(SequenceId, Applied), Error> {
        let g = self.geometry().clone();
        let parent = self.table.get(id)?.clone();
        let available = self.available_pages();
        let mut edit = Edit::new(&mut self.table);
        let home = edit.take_home().ok_or(Error::TooManySequences { max: g.max_sequences })?;
        let mut plan = StepPlan::default();
        let Some(child) = copy_of(&g, &mut edit, &parent, home, &mut plan) else {
            edit.abandon();
            return Err(Error::CapacityExceeded { needed: 1, available, fits: 0 });
        };
        let child_id = edit.new_id();
        edit.set(child_id, Some(child));
        Ok((child_id, edit.applied(plan)))
    }

    /// Adds a sequence of these lengths. The operation is applied; what the sequence holds is for the executor to
    /// write where [`Self::view`] says, before it commits.
    ///
    /// # Errors
    /// [`Error::SequenceLengths`] if no sequence of this geometry has such lengths; [`Error::TooManySequences`], [`Error::CapacityExceeded`].
    pub fn insert(&mut self, lengths: SequenceLengths) -> Result<(SequenceId, Applied), Error> {
        let g = self.geometry().clone();
        lengths.check(&g)?;
        let none = Error::TooManySequences { max: g.max_sequences };
        let home = self.table.next_home().ok_or(none)?;
        let pages = pages_for(lengths.blocks, g.layout.group) - lengths.evicted_pages(&g);
        let available = self.available_pages();
        if pages > self.free_pages() {
            return Err(Error::CapacityExceeded { needed: pages, available, fits: 0 });
        }
        let mut edit = Edit::new(&mut self.table);
        edit.take_home();
        let pages = (0..pages).filter_map(|_| edit.take_page()).collect();
        let id = edit.new_id();
        edit.set(id, Some(Sequence { home, lengths, ring_start: 0, pages }));
        Ok((id, edit.applied(StepPlan::default())))
    }

    /// Gives each of `sequences` the content that `sequences[parents[i]]` had: the step of a beam search from
    /// one set of beams to the next. A sequence that is a parent once costs nothing; each further use of it
    /// is a copy as by [`Self::fork`]. What is nobody's parent is dropped. The operation is applied; an
    /// executor carries its plan out, then commits it.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::ForeignSequence`], [`Error::DuplicateSequence`],
    /// [`Error::Parents`], [`Error::CapacityExceeded`] for the copied pages.
    pub fn reorder(&mut self, sequences: &[SequenceId], parents: &[usize]) -> Result<Applied, Error> {
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
        let copies = || (0..n).filter(|i| heirs[parents[*i]] != Some(*i));

        let g = self.geometry().clone();
        let available = self.available_pages();
        let free = self.free_pages();
        let mut edit = Edit::new(&mut self.table);
        for (sequence, heir) in before.iter().zip(&heirs) {
            if heir.is_none() {
                edit.release_pages(&sequence.pages);
                edit.free_home(sequence.home);
            }
        }
        let gained = edit.table.pool.free_pages() - free;
        let mut after: Vec<Sequence> = parents.iter().map(|parent| before[*parent].clone()).collect();
        let mut plan = StepPlan::default();
        for i in copies() {
            // As many contents were dropped as are copied, so there is a home.
            let home = edit.take_home().unwrap_or_default();
            let Some(copy) = copy_of(&g, &mut edit, &before[parents[i]], home, &mut plan) else {
                edit.abandon();
                let open = |i: &usize| before[parents[*i]].blocks_on_open_page(&g) > 0;
                let needed = copies().filter(open).count() as u32 - gained;
                return Err(Error::CapacityExceeded { needed, available, fits: 0 });
            };
            after[i] = copy;
        }
        for (&id, sequence) in sequences.iter().zip(after) {
            edit.set(id, Some(sequence));
        }
        Ok(edit.applied(plan))
    }
}

/// The content of `source` in another home, or `None` if a page is missing.
fn copy_of(
    g: &Geometry,
    edit: &mut Edit<'_>,
    source: &Sequence,
    home: u32,
    plan: &mut StepPlan,
) -> Option<Sequence> {
    let mut copy = Sequence { home, ..source.clone() };
    let open = source.blocks_on_open_page(g);
    let full = copy.pages.len() - usize::from(open > 0);
    for &page in &source.pages[..full] {
        edit.share_page(page);
    }
    if open > 0 {
        copy.pages[full] = edit.take_page()?;
        copy_blocks(g, source.pages[full], copy.pages[full], source.open_blocks(g), plan);
    }
    let from = source.sinks(g).into_iter().chain(source.window(g));
    let to = copy.sinks(g).into_iter().chain(copy.window(g));
    plan.token_copies.extend(from.zip(to).map(|(from, to)| TokenCopy { from, to }));
    Some(copy)
}
