//! The state machine: sequences, their windows and pages.

use super::identity::CacheId;
use super::sequence::{Sequence, SequenceId, SequenceView};
use super::table::{Applied, Change, Edit, Journal, Operation, Table};
use crate::error::Error;
use crate::geometry::Geometry;
use std::collections::HashMap;

/// Sequences, windows and pages of a cache. See the [module](super).
#[derive(Debug, Clone)]
pub struct Planner {
    pub(super) geometry: Geometry,
    pub(super) table: Table,
    journal: Journal,
}

/// Slabs that a pool is about to get, or longer plans. An executor makes them, then calls [`Planner::grow`].
#[derive(Debug, Clone)]
pub struct Growth {
    /// The geometry with the new slabs.
    pub geometry: Geometry,
    /// The slabs that are new.
    pub slabs: Vec<u32>,
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
    /// An empty cache.
    pub fn new(geometry: Geometry) -> Planner {
        Planner::of(CacheId::unique(), geometry)
    }

    /// A class of layers of an empty cache.
    pub(crate) fn of(cache: CacheId, geometry: Geometry) -> Planner {
        Planner { table: Table::new(&geometry, cache), geometry, journal: Journal::new(cache) }
    }

    /// The derived sizes.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Adds an empty sequence. This is no operation to discard; where the only free slots are those of sequences whose removal could be undone, the
    /// oldest such removal and what came before it no longer can.
    ///
    /// # Errors
    /// [`Error::TooManySequences`].
    pub fn create_sequence(&mut self) -> Result<SequenceId, Error> {
        let none = Error::TooManySequences { max: self.geometry.max_sequences };
        let home = self.table.next_home().ok_or(none)?;
        self.journal.forget(|change| matches!(change, Change::HomeFreed(freed) if *freed == home));
        let mut edit = Edit::new(&mut self.table);
        edit.take_home();
        let id = edit.new_id();
        edit.set(id, Some(Sequence::new(home)));
        Ok(id)
    }

    /// Tokens of a sequence.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::ForeignSequence`].
    pub fn tokens(&self, id: SequenceId) -> Result<u32, Error> {
        Ok(self.table.get(id)?.lengths.tokens)
    }

    /// The sequences of the cache, oldest id first.
    pub fn sequences(&self) -> impl Iterator<Item = SequenceId> {
        self.table.sequences.keys().copied()
    }

    /// Pages that no sequence holds.
    pub fn free_pages(&self) -> u32 {
        self.table.pool.free_pages()
    }

    /// Free pages, and those by which the pool may grow.
    pub(crate) fn available_pages(&self) -> u32 {
        self.free_pages() + self.geometry.max_pages.saturating_sub(self.geometry.pages())
    }

    /// Where the content of a sequence lies.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::ForeignSequence`].
    pub fn view(&self, id: SequenceId) -> Result<SequenceView, Error> {
        let g = &self.geometry;
        let s = self.table.get(id)?;
        Ok(SequenceView {
            lengths: s.lengths,
            sinks: s.sinks(g),
            blocks: (s.lengths.evicted..s.lengths.blocks).map(|block| s.block(g, block)).collect(),
            window: s.window(g),
        })
    }

    /// What of a layer's memory holds tokens.
    pub fn usage(&self) -> Usage {
        let g = &self.geometry;
        let mut usage = Usage::default();
        // By page: a bit per block that some sequence has.
        let mut blocks_of: HashMap<_, u32> = HashMap::new();
        for s in self.table.sequences.values() {
            usage.window_tokens += u64::from(s.lengths.window(g));
            usage.sink_tokens += u64::from(s.lengths.sinks(g));
            for (page, ordinal) in s.pages.iter().zip(s.lengths.evicted_pages(g)..) {
                let blocks = s.blocks_on(g, ordinal);
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
        self.table.take_back(applied);
    }

    /// What attention must be prepared for if more sequences share pages than before: plans are as long as if each had pages of its own. `None` if it is
    /// prepared. Only forks and reorders can make it necessary.
    ///
    /// # Errors
    /// [`Error::LimitTooLow`] if attention could not follow.
    pub fn sharing(&self) -> Result<Option<Growth>, Error> {
        let surplus = self.table.pool.surplus();
        if surplus <= self.geometry.shared_pages {
            return Ok(None);
        }
        // A power of two, so that not every fork asks again.
        let geometry = self.geometry.with_shared_pages(surplus.next_power_of_two())?;
        Ok(Some(Growth { geometry, slabs: Vec::new() }))
    }

    /// What the pool must get so that `pages` of its pages are free: half as many again as it has, unless `exactly`. `None` if nothing is missing.
    ///
    /// # Errors
    /// [`Error::CapacityExceeded`] if the pool may not grow that much; [`Error::LimitTooLow`] if attention could not follow.
    pub fn growth(&self, pages: u32, exactly: bool) -> Result<Option<Growth>, Error> {
        let available = self.available_pages();
        if pages > available {
            return Err(Error::CapacityExceeded { needed: pages, available, fits: 0 });
        }
        let missing = pages.saturating_sub(self.free_pages());
        if missing == 0 {
            return Ok(None);
        }
        let (geometry, slabs) = self.geometry.grown(missing, exactly)?;
        Ok(Some(Growth { geometry, slabs }))
    }

    /// Adds the slabs of a growth. Nothing else may have happened since it was planned.
    pub fn grow(&mut self, growth: Growth) {
        self.geometry = growth.geometry;
        for slab in growth.slabs {
            self.table.pool.add_slab(slab, self.geometry.slab_pages(slab));
        }
    }

    /// Gives back every slab of which no page is in use; returns them. The pool grows again when it must.
    ///
    /// Operations that could be undone only with pages of these slabs no longer can be. Discarding the shrink itself brings no slab back.
    pub fn shrink_to_fit(&mut self) -> (Operation, Vec<u32>) {
        let slabs = self.table.pool.empty_slabs();
        self.journal.forget(|change| match change {
            Change::Page(change) => slabs.contains(&change.page().slab),
            _ => false,
        });
        for &slab in &slabs {
            self.table.pool.remove_slab(slab);
            self.geometry.slab_pages[slab as usize] = 0;
        }
        (self.record(Vec::new()), slabs)
    }

    /// Undoes the latest operation. Neither its own work nor that of a step begun since (and dropped) may have been submitted.
    ///
    /// # Errors
    /// [`Error::NotLatest`], [`Error::TooOld`], [`Error::ForeignOperation`].
    pub fn discard(&mut self, operation: Operation) -> Result<(), Error> {
        self.journal.discard(operation, &mut self.table, self.geometry.max_undo)
    }

    /// Whether [`Self::discard`] would succeed.
    ///
    /// # Errors
    /// As [`Self::discard`].
    pub fn check_discard(&self, operation: Operation) -> Result<(), Error> {
        self.journal.check_discard(operation, self.geometry.max_undo)
    }

    pub(super) fn record(&mut self, changes: Vec<Change>) -> Operation {
        self.journal.record(changes, self.geometry.max_undo)
    }
}
