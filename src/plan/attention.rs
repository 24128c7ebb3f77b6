//! Tiles, splits and rounds: how the attention of a step is cut into workgroups.
//!
//! Every cut depends only on the sequence's own length and on its own number of queries: a split is a page of history, or up to 256 consecutive
//! sinks, or up to 256 consecutive tokens of the window. So a row's result never depends on its batch, on the scratch, or on where a page lies.

#[cfg(feature = "wgpu")]
use super::Slot;
use super::fold::plan_folds;
use super::pool::Page;
use super::sequence::SequenceLengths;
use super::{AttendItem, Round, RowTile, SlabRange, StepPlan};
use crate::format::PAGE_TOKENS;
use crate::geometry::Geometry;
use std::ops::Range;

/// What one sequence attends to.
pub(super) struct Attention<'a> {
    /// Row of the sequence's first query among the step's.
    pub(super) first_query: u32,
    pub(super) queries: u32,
    /// Position of the first query.
    pub(super) position: u32,
    /// Sinks in the cache, new ones included.
    pub(super) sinks: u32,
    /// Index in `StepPlan::slots` of the first sink.
    pub(super) sink_slots: u32,
    /// Pages of the history that are not gone.
    pub(super) pages: &'a [Page],
    /// Before the step.
    pub(super) lengths: SequenceLengths,
    /// Unpacked tokens after the history, new ones included.
    pub(super) window: u32,
    /// Index in `StepPlan::slots` of the first.
    pub(super) window_slots: u32,
}

/// A stretch of consecutive positions that one workgroup reads.
pub(super) struct Split {
    /// The slab, or `None` for unpacked tokens.
    pub(super) slab: Option<u32>,
    pub(super) source: u32,
    pub(super) tokens: u32,
    pub(super) first_position: u32,
}

impl Attention<'_> {
    /// The splits that some query sees, in order of position.
    pub(super) fn splits(&self, g: &Geometry, sliding_window: Option<u32>) -> Vec<Split> {
        let unpacked = |first_slot: u32, tokens: u32, position: u32| {
            (0..tokens).step_by(PAGE_TOKENS as usize).map(move |i| Split {
                slab: None,
                source: first_slot + i,
                tokens: PAGE_TOKENS.min(tokens - i),
                first_position: position + i,
            })
        };
        let (group, per_page) = (g.layout.group, g.layout.blocks_per_page());
        let SequenceLengths { blocks, evicted, .. } = self.lengths;
        let pages = self.pages.iter().zip(self.lengths.evicted_pages(g)..).map(|(page, ordinal)| {
            // Of the oldest page some blocks may be gone.
            let first = evicted.max(ordinal * per_page);
            let end = blocks.min((ordinal + 1) * per_page);
            Split {
                slab: Some(page.slab),
                source: page.index * per_page + first % per_page,
                tokens: (end - first) * group,
                first_position: g.sinks + first * group,
            }
        });
        // The first query sees positions from here on, the others from later ones.
        let from = sliding_window.map_or(0, |n| (self.position + 1).saturating_sub(n));
        unpacked(self.sink_slots, self.sinks, 0)
            .chain(pages)
            .chain(unpacked(self.window_slots, self.window, g.sinks + blocks * group))
            .filter(|split| split.tokens > 0 && split.first_position + split.tokens > from)
            .collect()
    }
}

/// A plan that attends by the newest `queries` positions of a sequence whose history is the first `blocks`
/// blocks of the pool, on its first page, and whose other tokens are in `window`. For trying kernels out.
#[cfg(feature = "wgpu")]
pub(crate) fn plan_attention_over(g: &Geometry, queries: u32, blocks: u32, window: &[Slot]) -> StepPlan {
    let held = window.len() as u32;
    let lengths =
        SequenceLengths { tokens: g.sinks + blocks * g.layout.group + held, blocks, ..Default::default() };
    debug_assert!(queries <= blocks * g.layout.group + held, "each query is one of the tokens");
    let mut plan = StepPlan { queries, slots: window.to_vec(), ..StepPlan::default() };
    let page = [Page { slab: 0, index: 0 }];
    let sequence = Attention {
        first_query: 0,
        queries,
        position: lengths.tokens - queries,
        sinks: 0,
        sink_slots: 0,
        pages: &page[..usize::from(blocks > 0)],
        lengths,
        window: held,
        window_slots: 0,
    };
    plan_attention(g, &[sequence], &mut plan);
    plan
}

/// Adds the attention of all sequences to `plan`, for each class of layers.
pub(super) fn plan_attention(g: &Geometry, sequences: &[Attention<'_>], plan: &mut StepPlan) {
    for class in 0..g.attention_classes.len() as u32 {
        plan_class(g, sequences, class, plan);
        plan_folds(g, sequences, class, plan);
    }
}

fn plan_class(g: &Geometry, sequences: &[Attention<'_>], class: u32, plan: &mut StepPlan) {
    let kv_heads = g.layout.kv_heads;
    let sliding_window = g.attention_classes[class as usize].sliding_window;
    for row_tile in g.split_tiles() {
        let mut round = RoundBuilder::new(class, row_tile, 0..kv_heads, plan);
        for sequence in sequences
            .iter()
            .filter(|s| s.queries > 0 && !g.folds(s.queries) && g.row_tile(s.queries) == row_tile)
        {
            let splits = sequence.splits(g, sliding_window);
            let partial_rows = splits.len() as u32 * row_tile;
            let rows = sequence.queries * g.heads_per_group;
            let first_history = splits.iter().take_while(|split| split.slab.is_none()).count() as u32;
            let history_splits = splits.iter().filter(|split| split.slab.is_some()).count() as u32;
            for first_row in (0..rows).step_by(row_tile as usize) {
                let tile = RowTile {
                    first_query: sequence.first_query,
                    first_row,
                    rows: row_tile.min(rows - first_row),
                    position: sequence.position,
                    first_partial: 0,
                    splits: splits.len() as u32,
                    first_history,
                    history_splits,
                };
                // As many heads at a time as the scratch holds; the geometry sees to it that one does.
                let heads = (g.scratch_cells / partial_rows).clamp(1, kv_heads);
                if heads < kv_heads {
                    // Evenly: a round of few heads leaves the device idle.
                    let heads = kv_heads.div_ceil(kv_heads.div_ceil(heads));
                    // Rounds of the same tile and other heads: they differ in nothing else, and so share its work list.
                    round.finish(plan);
                    let mut alone = RoundBuilder::new(class, row_tile, 0..heads, plan);
                    alone.add(tile, &splits, plan);
                    let at = plan.rounds.len();
                    alone.finish(plan);
                    for first in (heads..kv_heads).step_by(heads as usize) {
                        let heads = first..kv_heads.min(first + heads);
                        plan.rounds.push(Round { heads, ..plan.rounds[at].clone() });
                    }
                    round = RoundBuilder::new(class, row_tile, 0..kv_heads, plan);
                    continue;
                }
                if (round.partial_rows + partial_rows) * kv_heads > g.scratch_cells {
                    round.finish(plan);
                    round = RoundBuilder::new(class, row_tile, 0..kv_heads, plan);
                }
                round.add(tile, &splits, plan);
            }
        }
        round.finish(plan);
    }
}

struct RoundBuilder {
    class: u32,
    row_tile: u32,
    heads: Range<u32>,
    first_tile: u32,
    partial_rows: u32,
    history: Vec<(u32, AttendItem)>,
    window: Vec<AttendItem>,
}

impl RoundBuilder {
    fn new(class: u32, row_tile: u32, heads: Range<u32>, plan: &StepPlan) -> RoundBuilder {
        RoundBuilder {
            class,
            row_tile,
            heads,
            first_tile: plan.tiles.len() as u32,
            partial_rows: 0,
            history: Vec::new(),
            window: Vec::new(),
        }
    }

    fn add(&mut self, tile: RowTile, splits: &[Split], plan: &mut StepPlan) {
        let index = plan.tiles.len() as u32;
        plan.tiles.push(RowTile { first_partial: self.partial_rows, ..tile });
        for split in splits {
            let (tile, partial) = (index, self.partial_rows);
            self.partial_rows += self.row_tile;
            let &Split { source, tokens, first_position, .. } = split;
            let item = AttendItem { tile, partial, source, tokens, first_position };
            match split.slab {
                Some(slab) => self.history.push((slab, item)),
                None => self.window.push(item),
            }
        }
    }

    /// Adds the round to the plan, if it has a tile.
    fn finish(self, plan: &mut StepPlan) {
        let tiles = self.first_tile..plan.tiles.len() as u32;
        if tiles.is_empty() {
            return;
        }
        let history = push_by_slab(&mut plan.items, self.history);
        let first = plan.items.len() as u32;
        plan.items.extend(self.window);
        plan.rounds.push(Round {
            class: self.class,
            row_tile: self.row_tile,
            heads: self.heads,
            tiles,
            history,
            window: first..plan.items.len() as u32,
            fold: Vec::new(),
        });
    }
}

/// Appends `work` to `list` in order of slabs and returns the range of each slab in use.
pub(super) fn push_by_slab<T>(list: &mut Vec<T>, mut work: Vec<(u32, T)>) -> Vec<SlabRange> {
    work.sort_by_key(|(slab, _)| *slab);
    let mut ranges: Vec<SlabRange> = Vec::new();
    for (slab, item) in work {
        let at = list.len() as u32;
        list.push(item);
        match ranges.last_mut() {
            Some(last) if last.slab == slab => last.items.end = at + 1,
            _ => ranges.push(SlabRange { slab, items: at..at + 1 }),
        }
    }
    ranges
}
