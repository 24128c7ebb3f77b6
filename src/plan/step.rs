//! A step: which tokens enter where, who attends to what, and which blocks are packed.

use super::attention::{Attention, plan_attention, push_by_slab};
use super::planner::Planner;
use super::pool::{Page, pages_for};
use super::sequence::{Sequence, SequenceId, SequenceLengths};
use super::table::{Edit, Operation, Stepped};
use super::{BlockCopy, PackBlock, Slot, StepPlan, TokenWrite};
use crate::error::Error;
use crate::geometry::{Geometry, MAX_TOKENS};
use std::collections::HashSet;
use std::ops::Range;

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

/// A step that has been planned and not yet happened.
#[derive(Debug, Clone)]
pub struct PlannedStep {
    /// The work.
    pub plan: StepPlan,
    after: Vec<(SequenceId, Stepped)>,
}

impl Planner {
    /// Plans a step without changing anything.
    ///
    /// # Errors
    /// Whatever is wrong with the request, see [`Error`]: unknown or repeated sequences, too many tokens or queries, no room.
    pub fn plan_step(&self, steps: &[SequenceStep]) -> Result<PlannedStep, Error> {
        let g = self.geometry();
        self.check_request(steps)?;
        let mut planned = PlannedStep { plan: StepPlan::default(), after: Vec::with_capacity(steps.len()) };
        let mut attention = Vec::with_capacity(steps.len());
        let mut packs = Vec::new();
        let mut staged = 0;
        let mut peeked = 0;
        let mut next_page = || {
            peeked += 1;
            self.table.pool.peek(peeked - 1).ok_or_else(|| self.no_room(steps))
        };
        for step in steps {
            let before = self.table.get(step.sequence)?;
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
                    pages: &before.pages,
                    lengths: before.lengths,
                    window: chunk.window,
                    window_slots,
                });
            }

            let per_page = g.layout.blocks_per_page();
            let (first, end) = (before.lengths.blocks, chunk.after.blocks);
            // A page that others hold too is copied before it is written.
            let replaced = match before.shared_open_page(g, &self.table.pool) {
                Some(page) if first < end => {
                    let own = next_page()?;
                    copy_blocks(g, page, own, before.open_blocks(g), plan);
                    Some(own)
                }
                _ => None,
            };
            let mut new_pages = Vec::new();
            for block in first..end {
                let ordinal = (block / per_page - before.lengths.evicted_pages(g)) as usize;
                let page = match (before.pages.get(ordinal), replaced) {
                    // It is the last that the sequence has.
                    (Some(_), Some(own)) => own,
                    (Some(&page), None) => page,
                    (None, _) => {
                        let new = ordinal - before.pages.len();
                        if new == new_pages.len() {
                            new_pages.push(next_page()?);
                        }
                        new_pages[new]
                    }
                };
                let first_slot = plan.slots.len() as u32;
                let first_token = (block - first) * g.layout.group;
                plan.slots.extend((first_token..first_token + g.layout.group).map(|i| chunk.window_token(i)));
                let block = page.index * per_page + block % per_page;
                packs.push((page.slab, PackBlock { first_slot, block }));
            }
            plan.tokens += step.append;
            plan.queries += step.attend;
            let (lengths, ring_start) = (chunk.after, chunk.ring_start);
            planned.after.push((step.sequence, Stepped { lengths, ring_start, replaced, new_pages }));
        }
        let plan = &mut planned.plan;
        plan_attention(g, &attention, plan);
        plan.pack_slabs = push_by_slab(&mut plan.packs, packs);
        plan.uses_staging = staged > 0;
        Ok(planned)
    }

    /// Makes a planned step the state of the cache. No other operation may have happened since it was planned.
    pub fn commit(&mut self, step: PlannedStep) -> Operation {
        let g = &self.geometry;
        let mut edit = Edit::new(&mut self.table);
        for (id, stepped) in step.after {
            // The pages that the plan has peeked at, in the same order.
            for _ in 0..stepped.replaced.iter().len() + stepped.new_pages.len() {
                edit.take_page();
            }
            // It was there when the step was planned.
            let before = edit.table.get(id).map_or(0, |sequence| sequence.lengths.evicted_pages(g));
            let evicted = stepped.lengths.evicted_pages(g) - before;
            edit.step(id, stepped, evicted);
        }
        let changes = edit.finish();
        self.record(changes)
    }

    fn check_request(&self, steps: &[SequenceStep]) -> Result<(), Error> {
        let g = self.geometry();
        let mut seen = HashSet::with_capacity(steps.len());
        let (mut total, mut queries) = (0, 0);
        for step in steps {
            let before = self.table.get(step.sequence)?.lengths;
            if !seen.insert(step.sequence) {
                return Err(Error::DuplicateSequence(step.sequence));
            }
            if step.append > g.max_step {
                return Err(Error::StepTooLong { got: step.append, max: g.max_step });
            }
            let tokens = u64::from(before.tokens) + u64::from(step.append);
            if tokens > u64::from(MAX_TOKENS) {
                return Err(Error::SequenceTooLong { tokens, max: MAX_TOKENS });
            }
            if step.attend > g.max_step {
                return Err(Error::TooManyQueries { got: step.attend.into(), max: g.max_step });
            }
            // Those from the newest back to the first that is gone.
            let gone = if before.evicted > 0 { g.sinks + before.evicted * g.layout.group } else { 0 };
            let newest = tokens as u32 - gone;
            if step.attend > newest {
                return Err(Error::QueriesExceedTokens { got: step.attend, tokens: newest });
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
        let g = self.geometry();
        let (group, per_page) = (g.layout.group, g.layout.blocks_per_page());
        let available = self.available_pages();
        let mut needed = 0;
        let mut fits = None;
        for step in steps {
            let Ok(s) = self.table.get(step.sequence) else { continue };
            let (_, after) = lengths_after(g, &s.lengths, step.append);
            let (have, evicted) = (s.pages.len() as u32, s.lengths.evicted_pages(g));
            let shared = after.blocks > s.lengths.blocks && s.shared_open_page(g, &self.table.pool).is_some();
            let more = pages_for(after.blocks, group).saturating_sub(evicted + have) + u32::from(shared);
            if fits.is_none() && needed + more > available {
                // Up to one token before the window would complete a block that has no page.
                let free = available - needed;
                let blocks = match shared && free == 0 {
                    true => s.lengths.blocks,
                    false => (evicted + have + free - u32::from(shared)) * per_page,
                };
                let most =
                    u64::from(g.sinks) + u64::from(blocks) * u64::from(group) + u64::from(g.held_tokens());
                fits = Some(most.saturating_sub(u64::from(s.lengths.tokens)) as u32);
            }
            needed += more;
        }
        Error::CapacityExceeded { needed, available, fits: fits.unwrap_or(0) }
    }
}

/// Adds the copy of some blocks of a page.
pub(super) fn copy_blocks(g: &Geometry, from: Page, to: Page, blocks: Range<u32>, plan: &mut StepPlan) {
    let per_page = g.layout.blocks_per_page();
    plan.copy_blocks(
        from.slab,
        to.slab,
        blocks.map(|i| BlockCopy { from: from.index * per_page + i, to: to.index * per_page + i }),
    );
}

/// New sinks and the lengths after `append` more tokens.
fn lengths_after(g: &Geometry, before: &SequenceLengths, append: u32) -> (u32, SequenceLengths) {
    let mut after = *before;
    after.tokens += append;
    let sinks = after.sinks(g) - before.sinks(g);
    let window = after.window(g);
    // While the window holds W + G tokens or more, its oldest G become one block.
    after.blocks += window.saturating_sub(g.window) / g.layout.group;
    after.evict(g);
    (sinks, after)
}

/// Where the tokens of one sequence lie during a step.
struct Chunk<'a> {
    g: &'a Geometry,
    before: &'a Sequence,
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
    /// Places `append` new tokens: in the ring if they fit, else those that this very step packs go through the staging buffer.
    fn new(g: &'a Geometry, before: &'a Sequence, append: u32, staged: &mut u32) -> Chunk<'a> {
        let (sinks, after) = lengths_after(g, &before.lengths, append);
        let held = before.lengths.window(g);
        let new = append - sinks;
        let window = held + new;
        let packed = (after.blocks - before.lengths.blocks) * g.layout.group;
        let through_staging = if window <= g.ring_tokens { 0 } else { packed - held };
        let ring_packed = packed - through_staging;
        let ring_start = (before.ring_start + ring_packed) % g.ring_tokens;
        let first_staged = *staged;
        *staged += through_staging;
        Chunk { g, before, after, ring_start, sinks, held, window, staged: through_staging, first_staged }
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
