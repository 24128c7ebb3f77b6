//! A step: which tokens enter where, who attends to what, and which blocks are packed.

use super::journal::Operation;
use super::pool::{Page, pages_for};
use super::sequence::{Part, SequenceLengths};
use super::table::{Edit, Stepped};
use super::{BlockCopy, PackBlock, Plan, Planner, Slot, TokenWrite, push_by_slab};
use crate::error::Error;
use crate::ids::SequenceId;
use crate::shape::{MAX_TOKENS, Shape};
use std::collections::HashSet;
use std::ops::Range;

/// What one sequence does in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct SequenceStep {
    /// The sequence.
    pub sequence: SequenceId,
    /// New tokens.
    pub append: u32,
    /// Queries: they stand at the newest `attend` positions after the append, and each sees the positions up
    /// to its own.
    pub attend: u32,
}

impl SequenceStep {
    /// `append` new tokens, and queries at the newest `attend` positions after them.
    pub fn new(sequence: SequenceId, append: u32, attend: u32) -> SequenceStep {
        SequenceStep { sequence, append, attend }
    }

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

/// A step that has been planned and not yet happened.
#[derive(Debug, Clone)]
pub struct PlannedStep {
    /// The work of each class.
    pub plans: Vec<Plan>,
    /// Of each sequence: its tokens, and what it has in each class.
    after: Vec<(SequenceId, u32, Vec<Stepped>)>,
}

impl Planner {
    /// The pages that must be free in each class for a step, which is checked.
    ///
    /// # Errors
    /// Whatever is wrong with the request, see [`Error`]: unknown or repeated sequences, too many tokens or
    /// queries, no room however far the pool grows.
    pub fn pages_for_step(&self, steps: &[SequenceStep]) -> Result<Vec<u32>, Error> {
        self.check_request(steps)?;
        let pages = (0..self.classes()).map(|class| {
            let needed = self.step_pages(class, steps, u32::MAX).0;
            self.check_room(class, needed, |available| self.step_pages(class, steps, available).1)?;
            Ok(needed)
        });
        pages.collect()
    }

    /// Plans a step without changing anything.
    ///
    /// # Errors
    /// As [`Self::pages_for_step`], and [`Error::CapacityExceeded`] if the pages are not free.
    pub fn plan_step(&self, steps: &[SequenceStep]) -> Result<PlannedStep, Error> {
        self.check_request(steps)?;
        let mut after = Vec::with_capacity(steps.len());
        for step in steps {
            let tokens = self.table.get(step.sequence)?.tokens + step.append;
            after.push((step.sequence, tokens, Vec::with_capacity(self.classes())));
        }
        let mut plans = Vec::with_capacity(self.classes());
        for class in 0..self.classes() {
            let (plan, stepped) = self.plan_class(class, steps)?;
            plans.push(plan);
            after.iter_mut().zip(stepped).for_each(|((_, _, classes), stepped)| classes.push(stepped));
        }
        Ok(PlannedStep { plans, after })
    }

    /// Makes a planned step the state of the cache. No other operation may have happened since it was
    /// planned.
    pub fn commit(&mut self, step: PlannedStep) -> Operation {
        let mut edit = Edit::new(&mut self.table);
        for (id, tokens, classes) in step.after {
            // It takes the pages that the plan has peeked at, in the same order.
            edit.step(id, tokens, classes);
        }
        let (changes, _) = edit.finish();
        self.record(changes)
    }

    fn plan_class(&self, class: usize, steps: &[SequenceStep]) -> Result<(Plan, Vec<Stepped>), Error> {
        let shape = &self.shape.classes[class];
        let pool = &self.table.pools[class];
        let mut builder = Builder { shape, plan: Plan::default(), packs: Vec::new(), staged: 0 };
        let mut stepped = Vec::with_capacity(steps.len());
        let mut peeked = 0;
        let mut next_page = || {
            peeked += 1;
            pool.peek(peeked - 1).ok_or_else(|| {
                let (needed, fits) = self.step_pages(class, steps, self.available_pages(class));
                Error::CapacityExceeded { needed, available: self.available_pages(class), fits }
            })
        };
        for step in steps {
            let before = self.part(self.table.get(step.sequence)?, class);
            let chunk = builder.chunk(before, step);
            let (first, end) = (before.lengths.blocks, chunk.after.blocks);
            // A page that others hold too is copied before it is written.
            let replaced = match before.shared_open_page(pool) {
                Some(page) if first < end => {
                    let own = next_page()?;
                    copy_blocks(shape, page, own, before.open_blocks(), &mut builder.plan);
                    Some(own)
                }
                _ => None,
            };
            let mut new_pages = Vec::new();
            for block in first..end {
                let ordinal = block / shape.layout.blocks_per_page() - before.lengths.evicted_pages(shape);
                let page = match (before.pages.get(ordinal as usize), replaced) {
                    // It is the last that the sequence has.
                    (Some(_), Some(own)) => own,
                    (Some(&page), None) => page,
                    (None, _) => {
                        let new = ordinal as usize - before.pages.len();
                        if new == new_pages.len() {
                            new_pages.push(next_page()?);
                        }
                        new_pages[new]
                    }
                };
                builder.pack(&chunk, block, page);
            }
            let SequenceLengths { blocks, evicted, .. } = chunk.after;
            let gone = chunk.after.evicted_pages(shape) - before.lengths.evicted_pages(shape);
            let ring_start = chunk.ring_start;
            stepped.push(Stepped { blocks, evicted, ring_start, replaced, new_pages, gone });
        }
        Ok((builder.finish(), stepped))
    }

    fn check_request(&self, steps: &[SequenceStep]) -> Result<(), Error> {
        let limits = self.shape.first();
        let mut seen = HashSet::with_capacity(steps.len());
        let (mut total, mut queries) = (0, 0);
        for step in steps {
            let sequence = self.table.get(step.sequence)?;
            if !seen.insert(step.sequence) {
                return Err(Error::DuplicateSequence(step.sequence));
            }
            if step.append > limits.max_step {
                return Err(Error::StepTooLong { got: step.append, max: limits.max_step });
            }
            let tokens = u64::from(sequence.tokens) + u64::from(step.append);
            if tokens > u64::from(MAX_TOKENS) {
                return Err(Error::SequenceTooLong { tokens, max: MAX_TOKENS });
            }
            if step.attend > limits.max_step {
                return Err(Error::TooManyQueries { got: step.attend.into(), max: limits.max_step });
            }
            for (class, shape) in self.shape.classes.iter().enumerate() {
                // Those from the newest back to the first that is gone.
                let evicted = self.part(sequence, class).lengths.evicted;
                let gone = if evicted > 0 { shape.sinks + evicted * shape.layout.group } else { 0 };
                let newest = tokens as u32 - gone;
                if step.attend > newest {
                    return Err(Error::QueriesExceedTokens { got: step.attend, tokens: newest });
                }
            }
            total += u64::from(step.append);
            queries += u64::from(step.attend);
        }
        if total > u64::from(limits.max_batch_tokens) {
            return Err(Error::BatchTooLong { got: total, max: limits.max_batch_tokens });
        }
        if queries > u64::from(limits.max_batch_tokens) {
            return Err(Error::TooManyQueries { got: queries, max: limits.max_batch_tokens });
        }
        if steps.iter().all(|s| s.append == 0 && s.attend == 0) {
            return Err(Error::EmptyStep);
        }
        Ok(())
    }

    /// Pages that a step takes in a class, and the tokens that the first sequence could append which finds
    /// none if there are `available`.
    fn step_pages(&self, class: usize, steps: &[SequenceStep], available: u32) -> (u32, u32) {
        let shape = &self.shape.classes[class];
        let (group, per_page) = (shape.layout.group, shape.layout.blocks_per_page());
        let mut needed = 0;
        let mut fits = None;
        for step in steps {
            let Ok(sequence) = self.table.get(step.sequence) else { continue };
            let part = self.part(sequence, class);
            let (_, after) = lengths_after(shape, &part.lengths, step.append);
            let (have, evicted) = (part.pages.len() as u32, part.lengths.evicted_pages(shape));
            let packs = after.blocks > part.lengths.blocks;
            let shared = packs && part.shared_open_page(&self.table.pools[class]).is_some();
            let more = pages_for(after.blocks, group).saturating_sub(evicted + have) + u32::from(shared);
            if fits.is_none() && needed + more > available {
                // Up to one token before the window would complete a block that has no page.
                let free = available - needed;
                let blocks = match shared && free == 0 {
                    true => part.lengths.blocks,
                    false => (evicted + have + free - u32::from(shared)) * per_page,
                };
                let most = u64::from(shape.sinks)
                    + u64::from(blocks) * u64::from(group)
                    + u64::from(shape.held_tokens());
                fits = Some(most.saturating_sub(u64::from(part.lengths.tokens)) as u32);
            }
            needed += more;
        }
        (needed, fits.unwrap_or(0))
    }
}

/// The plan of a step in a class, as far as it is made.
struct Builder<'a> {
    shape: &'a Shape,
    plan: Plan,
    packs: Vec<(u32, PackBlock)>,
    /// Tokens in the staging buffer.
    staged: u32,
}

impl<'a> Builder<'a> {
    /// Plans the new tokens and the attention of a sequence.
    fn chunk(&mut self, before: Part<'a>, step: &SequenceStep) -> Chunk<'a> {
        let shape = self.shape;
        let chunk = Chunk::new(before, step.append, &mut self.staged);
        let plan = &mut self.plan;
        let rows = (0..step.append).map(|i| TokenWrite { row: plan.tokens + i, slot: chunk.new_token(i) });
        plan.writes.extend(rows);
        if step.attend > 0 {
            let sink_slots = plan.slots.len() as u32;
            let sinks = before.lengths.sinks(shape) + chunk.sinks;
            plan.slots.extend((0..sinks).map(|p| before.sink_slot(p)));
            let window_slots = plan.slots.len() as u32;
            plan.slots.extend((0..chunk.window).map(|i| chunk.window_token(i)));
            let position = chunk.after.tokens - step.attend;
            plan.attend(&before, position, step.attend, (sinks, sink_slots), (chunk.window, window_slots));
        }
        plan.tokens += step.append;
        plan.queries += step.attend;
        chunk
    }

    /// Plans to pack block `block` of a sequence, on a page.
    fn pack(&mut self, chunk: &Chunk<'_>, block: u32, page: Page) {
        let (group, per_page) = (self.shape.layout.group, self.shape.layout.blocks_per_page());
        let first_slot = self.plan.slots.len() as u32;
        let first_token = (block - chunk.before.lengths.blocks) * group;
        self.plan.slots.extend((first_token..first_token + group).map(|i| chunk.window_token(i)));
        let block = page.index * per_page + block % per_page;
        self.packs.push((page.slab, PackBlock { first_slot, block }));
    }

    fn finish(self) -> Plan {
        let mut plan = self.plan;
        plan.pack_slabs = push_by_slab(&mut plan.packs, self.packs);
        plan.uses_staging = self.staged > 0;
        plan
    }
}

/// Adds the copy of some blocks of a page.
pub(super) fn copy_blocks(shape: &Shape, from: Page, to: Page, blocks: Range<u32>, plan: &mut Plan) {
    let per_page = shape.layout.blocks_per_page();
    plan.copy_blocks(
        from.slab,
        to.slab,
        blocks.map(|i| BlockCopy { source: from.index * per_page + i, destination: to.index * per_page + i }),
    );
}

/// New sinks and the lengths after `append` more tokens.
fn lengths_after(shape: &Shape, before: &SequenceLengths, append: u32) -> (u32, SequenceLengths) {
    let mut after = *before;
    after.tokens += append;
    let sinks = after.sinks(shape) - before.sinks(shape);
    let window = after.window(shape);
    // While the window holds W + G tokens or more, its oldest G become one block.
    after.blocks += window.saturating_sub(shape.window) / shape.layout.group;
    after.evict(shape);
    (sinks, after)
}

/// Where the tokens of one sequence lie during a step.
struct Chunk<'a> {
    before: Part<'a>,
    after: SequenceLengths,
    /// Ring slot of the oldest token of the window after the step.
    ring_start: u32,
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
    /// Places `append` new tokens: in the ring if they fit, else those that this very step packs go through
    /// the staging buffer.
    fn new(before: Part<'a>, append: u32, staged: &mut u32) -> Chunk<'a> {
        let shape = before.shape;
        let (sinks, after) = lengths_after(shape, &before.lengths, append);
        let held = before.lengths.window(shape);
        let new = append - sinks;
        let window = held + new;
        let packed = (after.blocks - before.lengths.blocks) * shape.layout.group;
        let through_staging = if window <= shape.ring_tokens { 0 } else { packed - held };
        let ring_packed = packed - through_staging;
        let ring_start = (before.ring_start + ring_packed) % shape.ring_tokens;
        let first_staged = *staged;
        *staged += through_staging;
        Chunk { before, after, ring_start, sinks, held, window, staged: through_staging, first_staged }
    }

    /// Slot of the `i`-th new token.
    fn new_token(&self, i: u32) -> Slot {
        if i < self.sinks {
            self.before.sink_slot(self.before.lengths.tokens + i)
        } else {
            self.window_token(self.held + i - self.sinks)
        }
    }

    /// Slot of the `i`-th token of the window during the step.
    fn window_token(&self, i: u32) -> Slot {
        if i < self.held {
            self.before.ring_slot(i)
        } else if i < self.held + self.staged {
            Slot::staging(self.first_staged + i - self.held)
        } else {
            self.before.ring_slot(i - self.staged)
        }
    }
}
