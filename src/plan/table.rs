//! What a planner knows, and how each change of it is undone.

use super::pool::{Page, PageChange, Pool};
use super::sequence::{Held, Sequence};
use crate::error::Error;
use crate::ids::CacheId;
use crate::ids::SequenceId;
use std::collections::{BTreeMap, VecDeque};

/// Sequences, the rings that they have in every layer, and the pages of each class.
#[derive(Debug, Clone)]
pub(super) struct Table {
    cache: CacheId,
    /// By class.
    pub(super) pools: Vec<Pool>,
    /// Rings without a sequence. The next to hand out is the last; freed ones come last in turn, as for
    /// pages.
    rings: VecDeque<u32>,
    pub(super) sequences: BTreeMap<SequenceId, Sequence>,
    last_id: u64,
}

/// One change of a table.
#[derive(Debug, Clone)]
pub(super) enum Change {
    /// In a class.
    Page(usize, PageChange),
    RingTaken(u32),
    RingFreed(u32),
    /// The sequence before; `None`: there was none.
    Sequence(SequenceId, Option<Sequence>),
    /// A step of a sequence: its tokens before, and what it had in each class.
    Step(SequenceId, u32, Vec<Before>),
}

/// What a sequence had in a class before a step, without the pages that it has still.
#[derive(Debug, Clone)]
pub(super) struct Before {
    blocks: u32,
    evicted: u32,
    ring_start: u32,
    /// Number of its pages.
    pages: usize,
    /// The last of them, if the step replaced it.
    replaced: Option<Page>,
    /// Those at the front that are gone.
    gone: Vec<Page>,
}

impl Table {
    pub(super) fn new(cache: CacheId, pools: Vec<Pool>, max_sequences: u32) -> Table {
        let rings = (0..max_sequences).rev().collect();
        Table { cache, pools, rings, sequences: BTreeMap::new(), last_id: 0 }
    }

    pub(super) fn get(&self, id: SequenceId) -> Result<&Sequence, Error> {
        if id.cache != self.cache {
            return Err(Error::ForeignSequence(id));
        }
        self.sequences.get(&id).ok_or(Error::UnknownSequence(id))
    }

    /// The ring that the next sequence gets.
    pub(super) fn next_ring(&self) -> Option<u32> {
        self.rings.back().copied()
    }

    /// Undoes an operation of which nobody has heard: not even an id is gone.
    pub(super) fn take_back(&mut self, changes: Vec<Change>, last_id: u64) {
        self.undo_all(changes);
        self.last_id = last_id;
    }

    /// Undoes changes, the last first.
    pub(super) fn undo_all(&mut self, changes: Vec<Change>) {
        for change in changes.into_iter().rev() {
            self.undo(change);
        }
    }

    fn undo(&mut self, change: Change) {
        match change {
            Change::Page(class, change) => self.pools[class].undo(change),
            Change::RingTaken(ring) => self.rings.push_back(ring),
            // Ids and rings of sequences that were created since do not matter; it is still there, or the
            // record would be gone.
            Change::RingFreed(ring) => self.rings.retain(|free| *free != ring),
            Change::Sequence(id, Some(before)) => {
                self.sequences.insert(id, before);
            }
            Change::Sequence(id, None) => {
                self.sequences.remove(&id);
            }
            Change::Step(id, tokens, classes) => {
                if let Some(sequence) = self.sequences.get_mut(&id) {
                    sequence.tokens = tokens;
                    for (held, before) in sequence.held.iter_mut().zip(classes) {
                        before.restore(held);
                    }
                }
            }
        }
    }
}

impl Before {
    fn restore(self, held: &mut Held) {
        held.pages.splice(0..0, self.gone);
        held.pages.truncate(self.pages);
        if let (Some(page), Some(last)) = (self.replaced, held.pages.last_mut()) {
            *last = page;
        }
        (held.blocks, held.evicted, held.ring_start) = (self.blocks, self.evicted, self.ring_start);
    }
}

/// What a step makes of a sequence in a class.
#[derive(Debug, Clone)]
pub(super) struct Stepped {
    pub(super) blocks: u32,
    pub(super) evicted: u32,
    pub(super) ring_start: u32,
    /// Takes the place of the last page, which others hold too.
    pub(super) replaced: Option<Page>,
    pub(super) new_pages: Vec<Page>,
    /// Pages at the front that are gone.
    pub(super) gone: u32,
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

    pub(super) fn take_page(&mut self, class: usize) -> Option<Page> {
        let (page, change) = self.table.pools[class].take()?;
        self.changes.push(Change::Page(class, change));
        Some(page)
    }

    pub(super) fn share_page(&mut self, class: usize, page: Page) {
        let change = self.table.pools[class].share(page);
        self.changes.push(Change::Page(class, change));
    }

    pub(super) fn release_pages(&mut self, class: usize, pages: &[Page]) {
        for &page in pages {
            let change = self.table.pools[class].release(page);
            self.changes.push(Change::Page(class, change));
        }
    }

    /// Lets go of everything that a sequence has.
    pub(super) fn release(&mut self, sequence: &Sequence) {
        for (class, held) in sequence.held.iter().enumerate() {
            self.release_pages(class, &held.pages);
        }
        self.table.rings.push_front(sequence.ring);
        self.changes.push(Change::RingFreed(sequence.ring));
    }

    pub(super) fn take_ring(&mut self) -> Option<u32> {
        let ring = self.table.rings.pop_back()?;
        self.changes.push(Change::RingTaken(ring));
        Some(ring)
    }

    /// Puts `sequence` in the place of what `id` was.
    pub(super) fn set(&mut self, id: SequenceId, sequence: Option<Sequence>) {
        let before = match sequence {
            Some(sequence) => self.table.sequences.insert(id, sequence),
            None => self.table.sequences.remove(&id),
        };
        self.changes.push(Change::Sequence(id, before));
    }

    /// What a step makes of a sequence in each class. The pages that it takes are the next to be taken.
    pub(super) fn step(&mut self, id: SequenceId, tokens: u32, classes: Vec<Stepped>) {
        for (class, step) in classes.iter().enumerate() {
            for _ in 0..step.replaced.iter().len() + step.new_pages.len() {
                self.take_page(class);
            }
        }
        let Some(sequence) = self.table.sequences.get_mut(&id) else { return };
        let tokens_before = std::mem::replace(&mut sequence.tokens, tokens);
        let mut before = Vec::with_capacity(classes.len());
        for (held, step) in sequence.held.iter_mut().zip(classes) {
            let pages = held.pages.len();
            let mut replaced = None;
            if let (Some(page), Some(last)) = (step.replaced, held.pages.last_mut()) {
                replaced = Some(std::mem::replace(last, page));
            }
            held.pages.extend(step.new_pages);
            let gone: Vec<Page> = held.pages.drain(..step.gone as usize).collect();
            let Held { blocks, evicted, ring_start, .. } = *held;
            (held.blocks, held.evicted, held.ring_start) = (step.blocks, step.evicted, step.ring_start);
            before.push(Before { blocks, evicted, ring_start, pages, replaced, gone });
        }
        let released: Vec<(Option<Page>, Vec<Page>)> =
            before.iter().map(|before| (before.replaced, before.gone.clone())).collect();
        self.changes.push(Change::Step(id, tokens_before, before));
        for (class, (replaced, gone)) in released.into_iter().enumerate() {
            self.release_pages(class, replaced.as_slice());
            self.release_pages(class, &gone);
        }
    }

    /// Undoes everything.
    pub(super) fn abandon(self) {
        self.table.undo_all(self.changes);
    }

    /// What was done, and the last id before.
    pub(super) fn finish(self) -> (Vec<Change>, u64) {
        (self.changes, self.last_id)
    }
}
