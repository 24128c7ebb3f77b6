//! A step's plan in the words that shaders read, and the dispatches that read them.

use super::kernels::{KernelSet, Pass};
use crate::format::Tensor;
use crate::geometry::{Geometry, ITEM_WORDS, PLAN_PARAMS_STRIDE, SPLIT_WORDS, TILE_WORDS};
use crate::plan::{BlockCopyRange, FoldPass, SlabRange, StepPlan};
use std::ops::Range;

/// Parameters of one pass. Twin: `PassParams` in shaders/lib/step.wgsl.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct PassParams {
    /// Word of the plan where the pass's first work item lies.
    pub first: u32,
    /// Number of work items.
    pub count: u32,
    /// Word where the tiles begin.
    pub tiles: u32,
    /// Word where the slot lists begin.
    pub slots: u32,
    /// First KV head.
    pub first_head: u32,
    /// Number of KV heads.
    pub heads: u32,
    /// Positions that a query sees, its own included.
    pub sliding_window: u32,
    /// Soft cap of the logits in base 2, or 0.
    pub soft_cap: f32,
}

/// One dispatch of a layer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Dispatch {
    pub(super) pass: Pass,
    /// The attention class of layers that it is for, or `None` for all.
    pub(super) class: Option<u32>,
    /// The slab that it reads or writes; of two, the one that it writes.
    pub(super) slab: usize,
    /// Of two slabs, the one that it reads.
    pub(super) source: usize,
    /// Byte offset of its parameters in the plan buffer.
    pub(super) params: u32,
    pub(super) groups: [u32; 3],
}

/// The work of one operation, the same for every layer.
#[derive(Debug, Default)]
pub(super) struct Work {
    /// Contents of the plan buffer.
    pub(super) words: Vec<u32>,
    pub(super) append: Option<Dispatch>,
    pub(super) attend: Vec<Dispatch>,
    /// What changes packed blocks, or moves tokens: copies, packs, unpacks.
    pub(super) changes: Vec<Dispatch>,
}

impl Work {
    pub(super) fn new(g: &Geometry, kernels: &KernelSet, plan: &StepPlan) -> Work {
        let passes = passes_of(g, plan);
        let stride = PLAN_PARAMS_STRIDE / 4;
        let mut words = vec![0; passes.len() * stride as usize];
        let here = |words: &Vec<u32>| words.len() as u32;

        let slots = here(&words);
        words.extend(plan.slots.iter().map(|s| s.word()));
        let writes = here(&words);
        words.extend(plan.writes.iter().flat_map(|w| [w.row, w.slot.word()]));
        let packs = here(&words);
        words.extend(plan.packs.iter().flat_map(|p| [p.first_slot, p.block]));
        let tiles = here(&words);
        words.extend(plan.tiles.iter().flat_map(|t| {
            [
                t.first_query,
                t.first_row,
                t.rows,
                t.position,
                t.first_partial,
                t.splits,
                t.first_history,
                t.history_splits,
            ]
        }));
        let items = here(&words);
        words.extend(
            plan.items.iter().flat_map(|i| [i.tile, i.partial, i.source, i.tokens, i.first_position]),
        );

        let splits = here(&words);
        words.extend(plan.splits.iter().flat_map(|s| [s.source, s.tokens, s.first_position]));
        let runs = here(&words);
        words.extend(plan.runs.iter().flat_map(|r| {
            let count = r.splits.end - r.splits.start;
            [r.tile, r.partial, splits + SPLIT_WORDS * r.splits.start, count, u32::from(r.fresh)]
        }));

        let token_copies = here(&words);
        words.extend(plan.token_copies.iter().flat_map(|c| [c.from.word(), c.to.word()]));
        let block_copies = here(&words);
        words.extend(plan.block_copies.iter().flat_map(|c| [c.from, c.to]));
        let unpacks = here(&words);
        words.extend(plan.unpacks.iter().flat_map(|u| [u.block, u.token, u.slot.word()]));

        let mut work = Work::default();
        for (i, PassWork { pass, class, slab, source, range, heads }) in passes.into_iter().enumerate() {
            let (start, count) = (range.start, range.end - range.start);
            let first = match pass {
                Pass::Append => writes + 2 * start,
                Pass::Pack(_) | Pass::RotateRows(_) => packs + 2 * start,
                Pass::RotateQueries => 0,
                Pass::DecodePacked(_) | Pass::DecodeUnpacked(_) => items + ITEM_WORDS * start,
                Pass::PrefillPacked | Pass::PrefillUnpacked => runs + ITEM_WORDS * start,
                Pass::Merge(_) => tiles + TILE_WORDS * start,
                Pass::CopyTokens => token_copies + 2 * start,
                Pass::CopyBlocks | Pass::CopyBlocksAcross => block_copies + 2 * start,
                Pass::Unpack | Pass::UnpackRotated(_) => unpacks + 3 * start,
            };
            let grid = kernels.grid(pass);
            let count = count * grid.per_record;
            let (first_head, heads) = (heads.start, heads.end - heads.start);
            let attention = class.map(|c| g.attention_classes[c as usize]).unwrap_or_default();
            let params = PassParams {
                first,
                count,
                tiles,
                slots,
                first_head,
                heads,
                sliding_window: attention.sliding_window.unwrap_or(u32::MAX),
                // A cap beyond f32 is none that is felt.
                soft_cap: attention
                    .soft_cap
                    .map_or(0.0, |cap| (cap * std::f32::consts::LOG2_E).min(f32::MAX)),
            };
            let at = i * stride as usize;
            words[at..at + 8].copy_from_slice(bytemuck::cast_slice(&[params]));
            let dispatch = Dispatch {
                pass,
                class,
                slab: slab as usize,
                source: source as usize,
                params: i as u32 * PLAN_PARAMS_STRIDE,
                groups: grid.workgroups(count, heads),
            };
            match pass {
                Pass::Append => work.append = Some(dispatch),
                // Before attention, of whichever class.
                Pass::RotateQueries => work.attend.push(dispatch),
                _ if class.is_some() => work.attend.push(dispatch),
                _ => work.changes.push(dispatch),
            }
        }
        work.words = words;
        work
    }

    /// All of it.
    pub(super) fn dispatches(&self) -> impl Iterator<Item = &Dispatch> {
        self.append.iter().chain(&self.attend).chain(&self.changes)
    }
}

/// A pass, its slabs, its range of work, and its KV heads.
struct PassWork {
    pass: Pass,
    class: Option<u32>,
    slab: u32,
    source: u32,
    range: Range<u32>,
    heads: Range<u32>,
}

/// The passes of a step in order.
fn passes_of(g: &Geometry, plan: &StepPlan) -> Vec<PassWork> {
    let all = 0..g.layout.kv_heads;
    let mut passes = Vec::new();
    let mut push_from = |pass, class, source, slab, range: &Range<u32>, heads: &Range<u32>| {
        if !range.is_empty() {
            let (range, heads) = (range.clone(), heads.clone());
            passes.push(PassWork { pass, class, slab, source, range, heads });
        }
    };
    let mut push = |pass, class, slab, range: &Range<u32>, heads: &Range<u32>| {
        push_from(pass, class, slab, slab, range, heads);
    };
    push(Pass::Append, None, 0, &(0..plan.writes.len() as u32), &all);
    if g.layout.keys.rotated {
        push(Pass::RotateQueries, None, 0, &(0..plan.queries), &all);
    }
    for round in &plan.rounds {
        let (rows, heads, class) = (round.row_tile, &round.heads, Some(round.class));
        for SlabRange { slab, items } in &round.history {
            push(Pass::DecodePacked(rows), class, *slab, items, heads);
        }
        push(Pass::DecodeUnpacked(rows), class, 0, &round.window, heads);
        for FoldPass { slab, runs } in &round.fold {
            match slab {
                Some(slab) => push(Pass::PrefillPacked, class, *slab, runs, heads),
                None => push(Pass::PrefillUnpacked, class, 0, runs, heads),
            }
        }
        push(Pass::Merge(rows), class, 0, &round.tiles, heads);
    }
    push(Pass::CopyTokens, None, 0, &(0..plan.token_copies.len() as u32), &all);
    // Between attention, which reads the old place, and the packs that fill the new one.
    for BlockCopyRange { from, to, items } in &plan.copy_slabs {
        let pass = if from == to { Pass::CopyBlocks } else { Pass::CopyBlocksAcross };
        push_from(pass, None, *from, *to, items, &all);
    }
    let mut push = |pass, slab, range: &Range<u32>| push_from(pass, None, slab, slab, range, &all);
    for SlabRange { slab, items } in &plan.pack_slabs {
        for tensor in [Tensor::Keys, Tensor::Values] {
            if g.layout.tensor(tensor).rotates_apart() {
                push(Pass::RotateRows(tensor), *slab, items);
            }
            push(Pass::Pack(tensor), *slab, items);
        }
    }
    for SlabRange { slab, items } in &plan.unpack_slabs {
        let rotated = [Tensor::Keys, Tensor::Values].map(|t| (t, g.layout.tensor(t).format.rotated));
        if rotated.iter().any(|(_, rotated)| !rotated) {
            push(Pass::Unpack, *slab, items);
        }
        for (tensor, _) in rotated.into_iter().filter(|(_, rotated)| *rotated) {
            push(Pass::UnpackRotated(tensor), *slab, items);
        }
    }
    passes
}
