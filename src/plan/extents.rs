//! What each sequence attends to in a step.

use super::Plan;
use super::sequence::Part;
use crate::format::PAGE_TOKENS;
use std::ops::Range;

/// A stretch of consecutive positions: a page of packed tokens, or up to as many consecutive sinks or tokens
/// of the window. Attention is divided at these places and no others, whatever the executor: they depend only
/// on the sequence's own length, so that where a page lies, and what else is in a batch, never changes a bit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// The slab, or `None` for unpacked tokens.
    pub slab: Option<u32>,
    /// Packed: the first block within its slab. Unpacked: index in [`Plan::slots`] of the first token.
    pub source: u32,
    /// Tokens, 1 to 256.
    pub tokens: u32,
    /// Position of the first; the others follow without gaps. A query sees positions up to its own, from its
    /// sliding window's first on.
    pub first_position: u32,
}

/// A sequence attends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attend {
    /// Row of the sequence's first query among the step's.
    pub first_query: u32,
    /// Queries: one per position.
    pub queries: u32,
    /// Position of the first.
    pub position: u32,
    /// Range of [`Plan::extents`], in order of position.
    pub extents: Range<u32>,
}

impl Plan {
    /// Adds the attention of a sequence by its newest `queries` positions: to `sinks` sinks, to its packed
    /// tokens, and to the tokens of its window, all of which lie in the slots from an index of `slots` on.
    pub(super) fn attend(
        &mut self,
        part: &Part<'_>,
        position: u32,
        queries: u32,
        (sinks, sink_slots): (u32, u32),
        (window, window_slots): (u32, u32),
    ) {
        let unpacked = |first_slot: u32, tokens: u32, position: u32| {
            (0..tokens).step_by(PAGE_TOKENS as usize).map(move |i| Extent {
                slab: None,
                source: first_slot + i,
                tokens: PAGE_TOKENS.min(tokens - i),
                first_position: position + i,
            })
        };
        let end = part.shape.sinks + part.lengths.blocks * part.shape.layout.group;
        let start = self.extents.len() as u32;
        self.extents.extend(unpacked(sink_slots, sinks, 0));
        self.extents.extend(part.page_extents());
        self.extents.extend(unpacked(window_slots, window, end));
        let extents = start..self.extents.len() as u32;
        self.attends.push(Attend { first_query: self.queries, queries, position, extents });
    }
}

impl Part<'_> {
    /// Its packed tokens, oldest first.
    fn page_extents(&self) -> impl Iterator<Item = Extent> {
        let (group, per_page) = (self.shape.layout.group, self.shape.layout.blocks_per_page());
        let (sinks, lengths) = (self.shape.sinks, self.lengths);
        let pages = self.pages.iter().zip(lengths.evicted_pages(self.shape)..);
        let extents = pages.map(move |(page, ordinal)| {
            // Of the oldest page some blocks may be gone.
            let first = lengths.evicted.max(ordinal * per_page);
            let end = lengths.blocks.min((ordinal + 1) * per_page);
            Extent {
                slab: Some(page.slab),
                source: page.index * per_page + first % per_page,
                tokens: (end - first) * group,
                first_position: sinks + first * group,
            }
        });
        extents.filter(|extent| extent.tokens > 0)
    }
}

/// A plan that attends by the newest `queries` positions of a sequence whose packed tokens are the first
/// `blocks` blocks of the pool, on its first page, and whose other tokens are in `window`. For trying kernels
/// out.
#[cfg(feature = "wgpu")]
pub(crate) fn attend_over(
    shape: &crate::shape::Shape,
    queries: u32,
    blocks: u32,
    window: &[super::Slot],
) -> Plan {
    use super::{SequenceLengths, pool::Page};
    let held = window.len() as u32;
    let tokens = shape.sinks + blocks * shape.layout.group + held;
    debug_assert!(queries <= blocks * shape.layout.group + held, "each query is one of the tokens");
    let pages = [Page { slab: 0, index: 0 }];
    let part = Part {
        shape,
        ring: 0,
        lengths: SequenceLengths { tokens, blocks, evicted: 0 },
        ring_start: 0,
        pages: &pages[..usize::from(blocks > 0)],
    };
    let mut plan = Plan { slots: window.to_vec(), ..Plan::default() };
    plan.attend(&part, tokens - queries, queries, (0, 0), (held, 0));
    plan.queries = queries;
    plan
}
