//! Operations on whole sequences, applied.

use super::journal::Applied;
use super::pool::pages_for;
use super::request::Request;
use super::sequence::{Held, Sequence, SequenceLengths};
use super::step::copy_blocks;
use super::table::Edit;
use super::{Plan, Planner, SlabRange, TokenCopy, TokenUnpack};
use crate::error::Error;
use crate::ids::SequenceId;
use crate::shape::{CacheShape, Shape};

impl Planner {
    /// Applies an operation. An executor carries its plans out, then commits it.
    ///
    /// # Errors
    /// As [`Self::pages_for`], and [`Error::CapacityExceeded`] if the pages are not free. Nothing has changed
    /// then.
    pub fn apply(&mut self, request: Request<'_>) -> Result<Applied, Error> {
        let pages = self.pages_for(request)?;
        for (class, needed) in pages.into_iter().enumerate() {
            let available = self.available_pages(class);
            if needed > self.free_pages(class) {
                return Err(Error::CapacityExceeded { needed, available, fits: 0 });
            }
        }
        let plans = vec![Plan::default(); self.classes()];
        match request {
            Request::Remove(id) => self.remove(id, plans),
            Request::Truncate(id, tokens) => self.truncate(id, tokens, plans),
            Request::Fork(id) => self.fork(id, plans),
            Request::Insert(lengths) => self.insert(lengths, plans),
            Request::Reorder(sequences, parents) => self.reorder(sequences, parents, plans),
        }
    }

    fn remove(&mut self, id: SequenceId, plans: Vec<Plan>) -> Result<Applied, Error> {
        let sequence = self.table.get(id)?.clone();
        let mut edit = Edit::new(&mut self.table);
        edit.release(&sequence);
        edit.set(id, None);
        Ok(applied(edit, plans, None))
    }

    fn truncate(&mut self, id: SequenceId, tokens: u32, mut plans: Vec<Plan>) -> Result<Applied, Error> {
        let before = self.table.get(id)?.clone();
        let mut after = Sequence { tokens, ..before.clone() };
        let mut released = Vec::with_capacity(plans.len());
        for (class, shape) in self.shape.classes.iter().enumerate() {
            let held = &mut after.held[class];
            let pages = cut(shape, tokens, held);
            released.push(held.pages.split_off(pages));
            plan_cut(shape, class, &before, &after, &mut plans[class]);
        }
        let mut edit = Edit::new(&mut self.table);
        for (class, pages) in released.iter().enumerate() {
            edit.release_pages(class, pages);
        }
        edit.set(id, Some(after));
        Ok(applied(edit, plans, None))
    }

    fn fork(&mut self, id: SequenceId, mut plans: Vec<Plan>) -> Result<Applied, Error> {
        let parent = self.table.get(id)?.clone();
        let mut edit = Edit::new(&mut self.table);
        let child = copy_of(&self.shape, &mut edit, &parent, &mut plans);
        let child = child.map(|child| (edit.new_id(), child));
        let after = child.map(|(id, child)| After { created: Some(id), sequences: vec![(id, child)] });
        finished(edit, plans, after)
    }

    fn insert(&mut self, lengths: &[SequenceLengths], plans: Vec<Plan>) -> Result<Applied, Error> {
        let mut edit = Edit::new(&mut self.table);
        let tokens = lengths.first().map_or(0, |lengths| lengths.tokens);
        let held = self.shape.classes.iter().zip(lengths).enumerate().map(|(class, (shape, lengths))| {
            let pages = pages_for(lengths.blocks, shape.layout.group) - lengths.evicted_pages(shape);
            let pages = (0..pages).map(|_| edit.take_page(class)).collect::<Option<Vec<_>>>()?;
            Some(Held { blocks: lengths.blocks, evicted: lengths.evicted, ring_start: 0, pages })
        });
        let held: Option<Vec<Held>> = held.collect();
        let ring = edit.take_ring();
        let sequence = held.zip(ring).map(|(held, ring)| {
            let id = edit.new_id();
            After { created: Some(id), sequences: vec![(id, Sequence { ring, tokens, held })] }
        });
        finished(edit, plans, sequence)
    }

    fn reorder(
        &mut self,
        sequences: &[SequenceId],
        parents: &[usize],
        mut plans: Vec<Plan>,
    ) -> Result<Applied, Error> {
        let heirs = self.heirs(sequences, parents)?;
        let mut edit = Edit::new(&mut self.table);
        heirs.dropped().for_each(|sequence| edit.release(sequence));
        let mut after: Vec<Sequence> = parents.iter().map(|parent| heirs.before[*parent].clone()).collect();
        let copied = heirs.copies(parents).try_for_each(|i| {
            after[i] = copy_of(&self.shape, &mut edit, &heirs.before[parents[i]], &mut plans)?;
            Some(())
        });
        let sequences = sequences.iter().copied().zip(after).collect();
        let after = copied.map(|()| After { created: None, sequences });
        finished(edit, plans, after)
    }
}

/// What an operation makes of sequences.
struct After {
    /// The one that is new.
    created: Option<SequenceId>,
    sequences: Vec<(SequenceId, Sequence)>,
}

/// What has been done, if all of it could be.
fn finished(mut edit: Edit<'_>, plans: Vec<Plan>, after: Option<After>) -> Result<Applied, Error> {
    let Some(After { created, sequences }) = after else {
        // There was a ring and there were pages: `pages_for` has counted them.
        edit.abandon();
        return Err(Error::CapacityExceeded { needed: 0, available: 0, fits: 0 });
    };
    for (id, sequence) in sequences {
        edit.set(id, Some(sequence));
    }
    Ok(applied(edit, plans, created))
}

fn applied(edit: Edit<'_>, plans: Vec<Plan>, created: Option<SequenceId>) -> Applied {
    let (changes, last_id) = edit.finish();
    Applied { plans, created, changes, last_id }
}

/// Cuts what a sequence has in a class to `tokens` tokens, but for its pages: returns how many of them it
/// keeps.
fn cut(shape: &Shape, tokens: u32, held: &mut Held) -> usize {
    let group = shape.layout.group;
    let gone = held.evicted / shape.layout.blocks_per_page();
    let kept = tokens.saturating_sub(shape.sinks);
    held.blocks = held.blocks.min(kept / group);
    if tokens < shape.sinks + held.evicted * group {
        // To sinks, or nothing.
        held.evicted = 0;
    }
    pages_for(held.blocks, group).saturating_sub(gone) as usize
}

/// Plans the return of a cut block's tokens to the window.
fn plan_cut(shape: &Shape, class: usize, before: &Sequence, after: &Sequence, plan: &mut Plan) {
    let (before, after) = (before.part(class, shape), after.part(class, shape));
    let (blocks, group) = (after.lengths.blocks, shape.layout.group);
    let kept = after.lengths.tokens.saturating_sub(shape.sinks) % group;
    if blocks < before.lengths.blocks && kept > 0 {
        // All of the window is gone; these are its only tokens now.
        let (slab, block) = before.block(blocks);
        plan.unpacks =
            (0..kept).map(|token| TokenUnpack { block, token, slot: after.ring_slot(token) }).collect();
        plan.unpack_slabs.push(SlabRange { slab, items: 0..kept });
    }
}

/// The content of `source` in another ring, or `None` if a page or a ring is missing.
fn copy_of(
    shape: &CacheShape,
    edit: &mut Edit<'_>,
    source: &Sequence,
    plans: &mut [Plan],
) -> Option<Sequence> {
    let mut copy = Sequence { ring: edit.take_ring()?, ..source.clone() };
    for (class, (shape, plan)) in shape.classes.iter().zip(plans).enumerate() {
        let from = source.part(class, shape);
        let open = from.blocks_on_open_page();
        let full = from.pages.len() - usize::from(open > 0);
        for &page in &from.pages[..full] {
            edit.share_page(class, page);
        }
        if open > 0 {
            let own = edit.take_page(class)?;
            copy.held[class].pages[full] = own;
            copy_blocks(shape, from.pages[full], own, from.open_blocks(), plan);
        }
        let to = copy.part(class, shape);
        let slots = from.sinks().into_iter().chain(from.window());
        let places = to.sinks().into_iter().chain(to.window());
        plan.token_copies
            .extend(slots.zip(places).map(|(source, destination)| TokenCopy { source, destination }));
    }
    Some(copy)
}
