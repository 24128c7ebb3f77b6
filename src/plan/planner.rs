//! The state machine: sequences, their windows and pages, and the operations that change them.

use super::attention::{Attention, plan_attention, push_by_slab};
use super::pool::{Pool, pages_for};
use super::sequence::{Lengths, Sequence, SequenceId, SequenceView};
use super::{PackBlock, Slot, StepPlan, TokenWrite};
use crate::error::Error;
use crate::geometry::{Geometry, MAX_TOKENS};
use std::collections::VecDeque;

/// What one sequence does in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SequenceStep {
    /// The sequence.
    pub sequence: SequenceId,
    /// New tokens.
    pub append: u32,
    /// Queries: they stand at the newest `attend` positions after the append, and each sees the positions up to its own.
    pub attend: u32,
}

impl SequenceStep {
    /// One new token that attends: an ordinary decode step.
    pub fn decode(sequence: SequenceId) -> SequenceStep {
        SequenceStep { sequence, append: 1, attend: 1 }
    }

    /// `tokens` new tokens, of which none attends.
    pub fn append(sequence: SequenceId, tokens: u32) -> SequenceStep {
        SequenceStep { sequence, append: tokens, attend: 0 }
    }

    /// `tokens` new tokens, all of which attend, as for a prompt or for drafted tokens.
    pub fn extend(sequence: SequenceId, tokens: u32) -> SequenceStep {
        SequenceStep { sequence, append: tokens, attend: tokens }
    }

    /// No new token; queries at the newest `queries` positions.
    pub fn attend(sequence: SequenceId, queries: u32) -> SequenceStep {
        SequenceStep { sequence, append: 0, attend: queries }
    }
}

/// A finished operation, as a handle for `discard`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Operation(pub(crate) u64);

/// How to undo one operation.
#[derive(Debug, Clone)]
struct Undo {
    operation: Operation,
    change: Change,
}

#[derive(Debug, Clone)]
enum Change {
    /// (slot of the sequence, lengths before, pages that it had)
    Step(Vec<(usize, Lengths, usize)>),
    Remove(Sequence),
}

/// A step that has been planned and not yet happened.
#[derive(Debug, Clone)]
pub struct PlannedStep {
    /// The work.
    pub plan: StepPlan,
    /// (slot of the sequence, lengths after, new pages)
    after: Vec<(usize, Lengths, Vec<u32>)>,
}

/// Sequences, windows and pages of a cache. See the [module](super).
#[derive(Debug, Clone)]
pub struct Planner {
    geometry: Geometry,
    pool: Pool,
    sequences: Vec<Option<Sequence>>,
    generation: u32,
    undo: VecDeque<Undo>,
    operations: u64,
}

impl Planner {
    /// An empty cache.
    pub fn new(geometry: Geometry) -> Planner {
        Planner {
            pool: Pool::new(geometry.pages, geometry.pages_per_slab),
            sequences: vec![None; geometry.max_sequences as usize],
            geometry,
            generation: 0,
            undo: VecDeque::new(),
            operations: 0,
        }
    }

    /// The derived sizes.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Adds an empty sequence.
    ///
    /// # Errors
    /// [`Error::TooManySequences`].
    pub fn create_sequence(&mut self) -> Result<SequenceId, Error> {
        // The slot of a sequence that was removed and could come back (by discard) is taken last, the oldest such first; then its removal and what
        // came before it can no longer be undone.
        let removal = |index: usize| {
            let of_slot = |u: &Undo| matches!(&u.change, Change::Remove(s) if s.id.index as usize == index);
            self.undo.iter().rposition(of_slot).map_or(0, |at| at + 1)
        };
        let empty = (0..self.sequences.len()).filter(|i| self.sequences[*i].is_none());
        let index = empty
            .min_by_key(|i| removal(*i))
            .ok_or(Error::TooManySequences { max: self.geometry.max_sequences })?;
        let forgotten = removal(index);
        self.undo.drain(..forgotten);
        self.generation += 1;
        let id = SequenceId { index: index as u32, generation: self.generation };
        self.sequences[index] = Some(Sequence { id, lengths: Lengths::default(), pages: Vec::new() });
        Ok(id)
    }

    /// Removes a sequence; its pages are free from the next operation on.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn remove_sequence(&mut self, id: SequenceId) -> Result<Operation, Error> {
        let index = self.find(id)?;
        let Some(sequence) = self.sequences[index].take() else {
            return Err(Error::UnknownSequence(id));
        };
        self.pool.give_last(&sequence.pages);
        Ok(self.record(Change::Remove(sequence)))
    }

    /// Tokens of a sequence.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn tokens(&self, id: SequenceId) -> Result<u32, Error> {
        Ok(self.sequence(self.find(id)?).lengths.tokens)
    }

    /// The sequences of the cache.
    pub fn sequences(&self) -> impl Iterator<Item = SequenceId> {
        self.sequences.iter().flatten().map(|s| s.id)
    }

    /// Pages that no sequence holds.
    pub fn free_pages(&self) -> u32 {
        self.pool.free_pages()
    }

    /// Where the content of a sequence lies.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn view(&self, id: SequenceId) -> Result<SequenceView, Error> {
        let g = &self.geometry;
        let s = self.sequence(self.find(id)?);
        let per_page = g.layout.blocks_per_page();
        Ok(SequenceView {
            tokens: s.lengths.tokens,
            sinks: (0..s.lengths.sinks(g)).map(|p| s.sink_slot(g, p)).collect(),
            blocks: (0..s.lengths.blocks)
                .map(|b| {
                    let page = s.pages[(b / per_page) as usize];
                    (self.pool.slab(page), self.pool.page_in_slab(page) * per_page + b % per_page)
                })
                .collect(),
            window: (0..s.lengths.window(g)).map(|i| s.ring_slot(g, i)).collect(),
        })
    }

    /// Plans a step without changing anything.
    ///
    /// # Errors
    /// Whatever is wrong with the request, see [`Error`]: unknown or repeated sequences, too many tokens or queries, no room.
    pub fn plan_step(&self, steps: &[SequenceStep]) -> Result<PlannedStep, Error> {
        let g = &self.geometry;
        self.check_request(steps)?;
        let mut planned = PlannedStep { plan: StepPlan::default(), after: Vec::with_capacity(steps.len()) };
        let mut attention = Vec::with_capacity(steps.len());
        let mut packs = Vec::new();
        let mut new_pages = 0;
        let mut staged = 0;
        for step in steps {
            let index = self.find(step.sequence)?;
            let before = self.sequence(index);
            let plan = &mut planned.plan;
            let chunk = Chunk::new(g, before, step.append, &mut staged);
            plan.writes.extend(
                (0..step.append).map(|i| TokenWrite { row: plan.tokens + i, slot: chunk.new_token(i) }),
            );

            if step.attend > 0 {
                let sink_slots = plan.slots.len() as u32;
                let sinks = before.lengths.sinks(g) + chunk.sinks;
                plan.slots.extend((0..sinks).map(|p| before.sink_slot(g, p)));
                let window_slots = plan.slots.len() as u32;
                plan.slots.extend((0..chunk.window).map(|i| chunk.window_token(i)));
                attention.push(Attention {
                    first_query: plan.queries,
                    queries: step.attend,
                    position: chunk.after.tokens - step.attend,
                    sinks,
                    sink_slots,
                    pages: &before.pages[..pages_for(before.lengths.blocks, g.layout.group) as usize],
                    blocks: before.lengths.blocks,
                    window: chunk.window,
                    window_slots,
                });
            }

            let per_page = g.layout.blocks_per_page();
            let mut pages = Vec::new();
            for block in before.lengths.blocks..chunk.after.blocks {
                let ordinal = (block / per_page) as usize;
                let page =
                    match before.pages.get(ordinal).or(pages.get(ordinal.wrapping_sub(before.pages.len()))) {
                        Some(&page) => page,
                        None => {
                            let page = self.pool.peek(new_pages).ok_or_else(|| self.no_room(steps))?;
                            new_pages += 1;
                            pages.push(page);
                            page
                        }
                    };
                let first_slot = plan.slots.len() as u32;
                let first_token = (block - before.lengths.blocks) * g.layout.group;
                plan.slots.extend((first_token..first_token + g.layout.group).map(|i| chunk.window_token(i)));
                let block = self.pool.page_in_slab(page) * per_page + block % per_page;
                packs.push((self.pool.slab(page), PackBlock { first_slot, block }));
            }
            plan.tokens += step.append;
            plan.queries += step.attend;
            planned.after.push((index, chunk.after, pages));
        }
        let plan = &mut planned.plan;
        plan_attention(g, &self.pool, &attention, plan);
        plan.pack_slabs = push_by_slab(&mut plan.packs, packs);
        plan.uses_staging = staged > 0;
        Ok(planned)
    }

    /// Makes a planned step the state of the cache. No other operation may have happened since it was planned.
    pub fn commit(&mut self, step: PlannedStep) -> Operation {
        let mut before = Vec::with_capacity(step.after.len());
        for (index, after, pages) in step.after {
            let Some(sequence) = &mut self.sequences[index] else { continue };
            before.push((index, sequence.lengths, sequence.pages.len()));
            self.pool.take(pages.len() as u32);
            sequence.pages.extend(pages);
            sequence.lengths = after;
        }
        self.record(Change::Step(before))
    }

    /// Undoes the latest operation. Neither its own work nor that of a step begun since (and dropped) may have been submitted.
    ///
    /// # Errors
    /// [`Error::NotLatest`], [`Error::TooOld`].
    pub fn discard(&mut self, operation: Operation) -> Result<(), Error> {
        let latest = self.undo.back().map(|u| u.operation);
        if latest != Some(operation) {
            let oldest = self.undo.front().map_or(u64::MAX, |u| u.operation.0);
            let forgotten = operation.0 < oldest && operation.0 <= self.operations;
            return Err(if forgotten && latest.is_none_or(|l| operation < l) {
                Error::TooOld { given: operation.0, max_undo: self.geometry.max_undo }
            } else {
                Error::NotLatest { given: operation.0, latest: latest.map(|o| o.0) }
            });
        }
        match self.undo.pop_back().map(|u| u.change) {
            Some(Change::Step(before)) => {
                for (index, lengths, pages) in before.into_iter().rev() {
                    let Some(sequence) = &mut self.sequences[index] else { continue };
                    self.pool.give(sequence.pages.drain(pages..).rev());
                    sequence.lengths = lengths;
                }
            }
            Some(Change::Remove(sequence)) => {
                self.pool.take_back(sequence.pages.len());
                let index = sequence.id.index as usize;
                self.sequences[index] = Some(sequence);
            }
            None => {}
        }
        Ok(())
    }

    fn record(&mut self, change: Change) -> Operation {
        self.operations += 1;
        let operation = Operation(self.operations);
        self.undo.push_back(Undo { operation, change });
        while self.undo.len() > self.geometry.max_undo as usize {
            self.undo.pop_front();
        }
        operation
    }

    fn find(&self, id: SequenceId) -> Result<usize, Error> {
        let index = id.index as usize;
        match self.sequences.get(index) {
            Some(Some(s)) if s.id == id => Ok(index),
            _ => Err(Error::UnknownSequence(id)),
        }
    }

    /// The sequence in a slot that `find` has returned.
    fn sequence(&self, index: usize) -> &Sequence {
        self.sequences[index].as_ref().expect("find returns slots in use")
    }

    fn check_request(&self, steps: &[SequenceStep]) -> Result<(), Error> {
        let g = &self.geometry;
        let mut seen = vec![false; self.sequences.len()];
        let (mut total, mut queries) = (0, 0);
        for step in steps {
            let index = self.find(step.sequence)?;
            if std::mem::replace(&mut seen[index], true) {
                return Err(Error::DuplicateSequence(step.sequence));
            }
            if step.append > g.max_step {
                return Err(Error::StepTooLong { got: step.append, max: g.max_step });
            }
            let tokens = u64::from(self.sequence(index).lengths.tokens) + u64::from(step.append);
            if tokens > u64::from(MAX_TOKENS) {
                return Err(Error::SequenceTooLong { tokens, max: MAX_TOKENS });
            }
            if step.attend > g.max_step {
                return Err(Error::TooManyQueries { got: step.attend.into(), max: g.max_step });
            }
            if u64::from(step.attend) > tokens {
                return Err(Error::QueriesExceedTokens { got: step.attend, tokens: tokens as u32 });
            }
            total += u64::from(step.append);
            queries += u64::from(step.attend);
        }
        if total > u64::from(g.max_batch_tokens) {
            return Err(Error::BatchTooLong { got: total, max: g.max_batch_tokens });
        }
        if queries > u64::from(g.max_batch_tokens) {
            return Err(Error::TooManyQueries { got: queries, max: g.max_batch_tokens });
        }
        if steps.iter().all(|s| s.append == 0 && s.attend == 0) {
            return Err(Error::EmptyStep);
        }
        Ok(())
    }

    /// The error for a step that finds no free page, with what would fit.
    fn no_room(&self, steps: &[SequenceStep]) -> Error {
        let g = &self.geometry;
        let (group, per_page) = (g.layout.group, g.layout.blocks_per_page());
        let mut needed = 0;
        let mut fits = 0;
        let mut found = false;
        for step in steps {
            let Ok(index) = self.find(step.sequence) else { continue };
            let s = self.sequence(index);
            let (_, after) = lengths_after(g, &s.lengths, step.append);
            let have = s.pages.len() as u32;
            let more = pages_for(after.blocks, group).saturating_sub(have);
            if !found && needed + more > self.free_pages() {
                found = true;
                // Up to one token before the window would complete a block that has no page.
                let pages = have + self.free_pages() - needed;
                let most = u64::from(g.sinks)
                    + u64::from(pages * per_page) * u64::from(group)
                    + u64::from(g.held_tokens());
                fits = most.saturating_sub(u64::from(s.lengths.tokens)) as u32;
            }
            needed += more;
        }
        Error::CapacityExceeded { needed, free: self.free_pages(), fits }
    }
}

/// New sinks and the lengths after `append` more tokens, the ring's start left as it was.
fn lengths_after(g: &Geometry, before: &Lengths, append: u32) -> (u32, Lengths) {
    let mut after = *before;
    after.tokens += append;
    let sinks = after.sinks(g) - before.sinks(g);
    let window = after.window(g);
    // While the window holds W + G tokens or more, its oldest G become one block.
    after.blocks += window.saturating_sub(g.window) / g.layout.group;
    (sinks, after)
}

/// Where the tokens of one sequence lie during a step.
struct Chunk<'a> {
    g: &'a Geometry,
    before: &'a Sequence,
    after: Lengths,
    /// New tokens that become sinks.
    sinks: u32,
    /// Tokens in the window before the step.
    held: u32,
    /// Tokens in the window during the step: those before, and the new ones that are no sinks.
    window: u32,
    /// New tokens in the staging buffer; they come first after the tokens held before.
    staged: u32,
    first_staged: u32,
}

impl<'a> Chunk<'a> {
    /// Places `append` new tokens: in the ring if they fit, else those that this very step packs go through the staging buffer.
    fn new(g: &'a Geometry, before: &'a Sequence, append: u32, staged: &mut u32) -> Chunk<'a> {
        let (sinks, mut after) = lengths_after(g, &before.lengths, append);
        let held = before.lengths.window(g);
        let new = append - sinks;
        let window = held + new;
        let packed = (after.blocks - before.lengths.blocks) * g.layout.group;
        let through_staging = if window <= g.ring_tokens { 0 } else { packed - held };
        let ring_packed = packed - through_staging;
        after.ring_start = (before.lengths.ring_start + ring_packed) % g.ring_tokens;
        let first_staged = *staged;
        *staged += through_staging;
        Chunk { g, before, after, sinks, held, window, staged: through_staging, first_staged }
    }

    /// Slot of the `i`-th new token.
    fn new_token(&self, i: u32) -> Slot {
        if i < self.sinks {
            self.before.sink_slot(self.g, self.before.lengths.tokens + i)
        } else {
            self.window_token(self.held + i - self.sinks)
        }
    }

    /// Slot of the `i`-th token of the window during the step.
    fn window_token(&self, i: u32) -> Slot {
        if i < self.held {
            self.before.ring_slot(self.g, i)
        } else if i < self.held + self.staged {
            Slot::staging(self.first_staged + i - self.held)
        } else {
            self.before.ring_slot(self.g, i - self.staged)
        }
    }
}
