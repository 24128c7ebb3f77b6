//! One sequence: how long it is and where its tokens lie.

use super::Slot;
use super::pool::{Page, Pool};
use crate::error::Error;
use crate::shape::{MAX_TOKENS, Shape};
use std::ops::Range;

/// How long a sequence is in a format class.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SequenceLengths {
    /// Tokens.
    pub tokens: u32,
    /// Groups of tokens that have been packed.
    pub blocks: u32,
    /// How many of those, the oldest, are gone: see
    /// [`LayerFormat::history_limit`](crate::LayerFormat::history_limit).
    pub evicted: u32,
}

impl SequenceLengths {
    /// Of a sequence to which `tokens` tokens have been appended and that was never truncated.
    pub(crate) fn of(s: &Shape, tokens: u32) -> SequenceLengths {
        let after_sinks = tokens.saturating_sub(s.sinks);
        let blocks = after_sinks.saturating_sub(s.window) / s.layout.group;
        let mut lengths = SequenceLengths { tokens, blocks, evicted: 0 };
        lengths.evict(s);
        lengths
    }

    /// Tokens in the window.
    pub(crate) fn window(&self, s: &Shape) -> u32 {
        self.tokens - self.sinks(s) - self.blocks * s.layout.group
    }

    /// Tokens in sink slots.
    pub(crate) fn sinks(&self, s: &Shape) -> u32 {
        self.tokens.min(s.sinks)
    }

    /// Pages of packed tokens that are gone.
    pub(super) fn evicted_pages(&self, s: &Shape) -> u32 {
        self.evicted / s.layout.blocks_per_page()
    }

    /// Blocks that a sequence may lose by the rule of the class, once it has this many tokens.
    fn too_old(&self, s: &Shape) -> u32 {
        let limit = s.history_limit.unwrap_or(u32::MAX);
        let old = self.tokens.saturating_sub(s.sinks).saturating_sub(limit);
        self.blocks.min(old / s.layout.group)
    }

    /// What is left after a step: blocks all of whose tokens are too old are gone.
    pub(super) fn evict(&mut self, s: &Shape) {
        self.evicted = self.evicted.max(self.too_old(s));
    }

    /// Whether a sequence of this shape can have these lengths.
    ///
    /// # Errors
    /// [`Error::SequenceLengths`].
    pub(crate) fn check(&self, s: &Shape) -> Result<(), Error> {
        let &SequenceLengths { tokens, blocks, evicted } = self;
        let packed = u64::from(blocks) * u64::from(s.layout.group);
        let window = u64::from(tokens.saturating_sub(s.sinks)).checked_sub(packed);
        let fits = window.is_some_and(|n| n <= u64::from(s.held_tokens()));
        // A sequence that was longer once may have lost more than the rule says now.
        let evictable = evicted <= blocks && (evicted == 0 || s.history_limit.is_some());
        if tokens > MAX_TOKENS || !fits || !evictable || self.too_old(s) > evicted {
            return Err(Error::SequenceLengths { tokens, blocks, evicted });
        }
        Ok(())
    }
}

/// What a sequence has in all classes.
#[derive(Debug, Clone)]
pub(super) struct Sequence {
    /// Which ring and sink slots of every layer are its own.
    pub(super) ring: u32,
    pub(super) tokens: u32,
    /// By class.
    pub(super) held: Vec<Held>,
}

/// What a sequence has in one class.
#[derive(Debug, Clone, Default)]
pub(super) struct Held {
    pub(super) blocks: u32,
    pub(super) evicted: u32,
    /// Ring slot of the oldest token of the window.
    pub(super) ring_start: u32,
    /// Pages that are not gone, oldest first; the last may be partly filled.
    pub(super) pages: Vec<Page>,
}

impl Sequence {
    pub(super) fn new(ring: u32, classes: usize) -> Sequence {
        Sequence { ring, tokens: 0, held: vec![Held::default(); classes] }
    }

    /// Its part in the class number `class`, which has this shape.
    pub(super) fn part<'a>(&'a self, class: usize, shape: &'a Shape) -> Part<'a> {
        let Held { blocks, evicted, ring_start, ref pages } = self.held[class];
        let lengths = SequenceLengths { tokens: self.tokens, blocks, evicted };
        Part { shape, ring: self.ring, lengths, ring_start, pages }
    }
}

/// A sequence in one class.
#[derive(Debug, Clone, Copy)]
pub(super) struct Part<'a> {
    pub(super) shape: &'a Shape,
    pub(super) ring: u32,
    pub(super) lengths: SequenceLengths,
    pub(super) ring_start: u32,
    pub(super) pages: &'a [Page],
}

impl Part<'_> {
    /// Its first slot.
    fn base(&self) -> u32 {
        self.ring * self.shape.sequence_slots()
    }

    /// Blocks on the last page if that has room for more.
    pub(super) fn blocks_on_open_page(&self) -> u32 {
        self.lengths.blocks % self.shape.layout.blocks_per_page()
    }

    /// The last page, if it has room for more blocks and other sequences hold it too.
    pub(super) fn shared_open_page(&self, pool: &Pool) -> Option<Page> {
        let page = *self.pages.last()?;
        (self.blocks_on_open_page() > 0 && pool.is_shared(page)).then_some(page)
    }

    /// The blocks on its page number `ordinal`, counted from the first that it ever had, which are filled and
    /// not gone.
    pub(super) fn blocks_on(&self, ordinal: u32) -> Range<u32> {
        let per_page = self.shape.layout.blocks_per_page();
        let first = ordinal * per_page;
        let SequenceLengths { blocks, evicted, .. } = self.lengths;
        evicted.saturating_sub(first)..per_page.min(blocks - first)
    }

    /// Those on the last page if that has room for more.
    pub(super) fn open_blocks(&self) -> Range<u32> {
        match self.blocks_on_open_page() {
            0 => 0..0,
            _ => self.blocks_on(self.lengths.blocks / self.shape.layout.blocks_per_page()),
        }
    }

    /// Slots of the sinks.
    pub(super) fn sinks(&self) -> Vec<Slot> {
        (0..self.lengths.sinks(self.shape)).map(|p| self.sink_slot(p)).collect()
    }

    /// Slots of the window, oldest token first.
    pub(super) fn window(&self) -> Vec<Slot> {
        (0..self.lengths.window(self.shape)).map(|i| self.ring_slot(i)).collect()
    }

    /// (slab, block within the slab) of block `block`.
    pub(super) fn block(&self, block: u32) -> (u32, u32) {
        let per_page = self.shape.layout.blocks_per_page();
        let page = self.pages[(block / per_page - self.lengths.evicted_pages(self.shape)) as usize];
        (page.slab, page.index * per_page + block % per_page)
    }

    /// Slot of the sink at `position`.
    pub(super) fn sink_slot(&self, position: u32) -> Slot {
        Slot::ring(self.base() + position)
    }

    /// Slot of the `i`-th token written to the ring, counted from the oldest one of the window.
    pub(super) fn ring_slot(&self, i: u32) -> Slot {
        let slot = (self.ring_start + i) % self.shape.ring_tokens;
        Slot::ring(self.base() + self.shape.sinks + slot)
    }

    /// Where its content lies.
    pub(super) fn view(&self) -> SequenceView {
        let SequenceLengths { blocks, evicted, .. } = self.lengths;
        SequenceView {
            lengths: self.lengths,
            sinks: self.sinks(),
            blocks: (evicted..blocks).map(|block| self.block(block)).collect(),
            window: self.window(),
        }
    }
}

/// Where the content of a sequence lies in the layers of a class between steps: what a reader of the buffers
/// needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SequenceView {
    /// How long it is.
    pub lengths: SequenceLengths,
    /// Slots of the sinks, in order of position.
    pub sinks: Vec<Slot>,
    /// (slab, index of the block within the slab) of each packed block that is not gone, oldest first.
    pub blocks: Vec<(u32, u32)>,
    /// Slots of the window's tokens, oldest first.
    pub window: Vec<Slot>,
}
