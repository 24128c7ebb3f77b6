//! The state machine: sequences, their windows and pages.

use super::journal::{Applied, Journal, Operation};
use super::pool::{Growth, Pool, PoolLimits, PoolSize};
use super::sequence::{Part, Sequence, SequenceView};
use super::table::{Change, Edit, Table};
use crate::error::Error;
use crate::ids::CacheId;
use crate::ids::SequenceId;
use crate::shape::CacheShape;
use std::collections::HashMap;
use std::sync::Arc;

/// Sequences, windows and pages of a cache.
#[derive(Debug, Clone)]
pub struct Planner {
    pub(super) shape: Arc<CacheShape>,
    pub(super) table: Table,
    journal: Journal,
}

/// How much of a layer's memory is in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Packed blocks; one that several sequences share counts once.
    pub blocks: u64,
    /// Tokens in windows.
    pub window_tokens: u64,
    /// Tokens in sink slots.
    pub sink_tokens: u64,
}

impl Planner {
    /// An empty cache, with a pool for each class.
    pub fn new(shape: Arc<CacheShape>, pools: Vec<PoolLimits>) -> Planner {
        Planner::with_id(CacheId::unique(), shape, pools)
    }

    /// One whose ids another cache takes as its own.
    pub fn with_id(id: CacheId, shape: Arc<CacheShape>, pools: Vec<PoolLimits>) -> Planner {
        let pools = pools.into_iter().map(Pool::new).collect();
        let table = Table::new(id, pools, shape.first().max_sequences);
        Planner { shape, table, journal: Journal::new(id) }
    }

    /// The sizes of the cache.
    pub fn shape(&self) -> &CacheShape {
        &self.shape
    }

    /// Number of format classes.
    pub fn classes(&self) -> usize {
        self.shape.classes.len()
    }

    /// What a sequence has in a class.
    pub(super) fn part<'a>(&'a self, sequence: &'a Sequence, class: usize) -> Part<'a> {
        sequence.part(class, &self.shape.classes[class])
    }

    /// Adds an empty sequence. This is no operation to discard; where the only free ring is that of a
    /// sequence whose removal could be undone, the oldest such removal and what came before it no longer can.
    ///
    /// # Errors
    /// [`Error::TooManySequences`].
    pub fn create_sequence(&mut self) -> Result<SequenceId, Error> {
        let ring = self.ring_for_one()?;
        self.journal.forget(|change| matches!(change, Change::RingFreed(freed) if *freed == ring));
        let classes = self.classes();
        let mut edit = Edit::new(&mut self.table);
        edit.take_ring();
        let id = edit.new_id();
        edit.set(id, Some(Sequence::new(ring, classes)));
        Ok(id)
    }

    /// Tokens of a sequence.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::ForeignSequence`].
    pub fn tokens(&self, id: SequenceId) -> Result<u32, Error> {
        Ok(self.table.get(id)?.tokens)
    }

    /// The sequences of the cache, oldest id first.
    pub fn sequences(&self) -> impl Iterator<Item = SequenceId> {
        self.table.sequences.keys().copied()
    }

    /// Pages of a class that no sequence holds.
    pub fn free_pages(&self, class: usize) -> u32 {
        self.table.pools[class].free_pages()
    }

    /// Those, and the pages by which the pool may grow.
    pub fn available_pages(&self, class: usize) -> u32 {
        self.table.pools[class].available_pages()
    }

    /// How large the pool of a class is.
    pub fn pool_size(&self, class: usize) -> PoolSize {
        self.table.pools[class].size()
    }

    /// Pages of each slab of a class, 0 for one that has been given back.
    pub fn slab_pages(&self, class: usize) -> Vec<u32> {
        self.table.pools[class].slab_pages()
    }

    /// Where the content of a sequence lies in the layers of a class.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::ForeignSequence`].
    pub fn view(&self, class: usize, id: SequenceId) -> Result<SequenceView, Error> {
        Ok(self.part(self.table.get(id)?, class).view())
    }

    /// What of a layer's memory holds tokens, in a class.
    pub fn usage(&self, class: usize) -> Usage {
        let mut usage = Usage::default();
        // By page: a bit per block that some sequence has.
        let mut blocks_of: HashMap<_, u32> = HashMap::new();
        for sequence in self.table.sequences.values() {
            let part = self.part(sequence, class);
            usage.window_tokens += u64::from(part.lengths.window(part.shape));
            usage.sink_tokens += u64::from(part.lengths.sinks(part.shape));
            for (page, ordinal) in part.pages.iter().zip(part.lengths.evicted_pages(part.shape)..) {
                let blocks = part.blocks_on(ordinal);
                let bits = |n: u32| (1u32 << n) - 1;
                *blocks_of.entry(*page).or_default() |= bits(blocks.end) & !bits(blocks.start);
            }
        }
        usage.blocks = blocks_of.values().map(|bits| u64::from(bits.count_ones())).sum();
        usage
    }

    /// Keeps an operation.
    pub fn commit_applied(&mut self, applied: Applied) -> Operation {
        self.record(applied.changes)
    }

    /// Takes an operation back. No other may have happened since.
    pub fn abandon(&mut self, applied: Applied) {
        self.table.take_back(applied.changes, applied.last_id);
    }

    /// Whether a class can have `needed` free pages; `fits` says what a step could append with as many as
    /// there are.
    pub(super) fn check_room(
        &self,
        class: usize,
        needed: u32,
        fits: impl FnOnce(u32) -> u32,
    ) -> Result<(), Error> {
        let available = self.available_pages(class);
        if needed > available {
            return Err(Error::CapacityExceeded { needed, available, fits: fits(available) });
        }
        Ok(())
    }

    /// What a pool must get so that `pages` of its pages are free: half as many again as it has, unless
    /// `exactly`. `None` if nothing is missing.
    ///
    /// # Errors
    /// [`Error::CapacityExceeded`] if the pool may not grow that much.
    pub fn growth(&self, class: usize, pages: u32, exactly: bool) -> Result<Option<Growth>, Error> {
        self.check_room(class, pages, |_| 0)?;
        let growth = self.table.pools[class].growth(pages, exactly);
        Ok(growth.map(|(slabs, size)| Growth { class, slabs, size }))
    }

    /// Adds the slabs of a growth. Nothing else may have happened since it was planned.
    pub fn grow(&mut self, growth: &Growth) {
        for &slab in &growth.slabs {
            self.table.pools[growth.class].add_slab(slab);
        }
    }

    /// Gives back every slab of which no page is in use; returns those of each class. The pools grow again
    /// when they must.
    ///
    /// Operations that could be undone only with pages of these slabs no longer can be. Discarding the shrink
    /// itself brings no slab back.
    pub fn shrink_to_fit(&mut self) -> (Operation, Vec<Vec<u32>>) {
        let slabs: Vec<Vec<u32>> = self.table.pools.iter().map(Pool::empty_slabs).collect();
        self.journal.forget(|change| match change {
            Change::Page(class, change) => slabs[*class].contains(&change.page().slab),
            _ => false,
        });
        for (pool, slabs) in self.table.pools.iter_mut().zip(&slabs) {
            slabs.iter().for_each(|slab| pool.remove_slab(*slab));
        }
        (self.record(Vec::new()), slabs)
    }

    /// Undoes the latest operation. Neither its own work nor that of a step begun since (and dropped) may
    /// have been submitted.
    ///
    /// # Errors
    /// [`Error::NotLatest`], [`Error::TooOld`], [`Error::ForeignOperation`].
    pub fn discard(&mut self, operation: Operation) -> Result<(), Error> {
        self.journal.discard(operation, &mut self.table, self.shape.max_undo)
    }

    pub(super) fn record(&mut self, changes: Vec<Change>) -> Operation {
        self.journal.record(changes, self.shape.max_undo)
    }
}
