//! A step's plan in the words that shaders read, and the dispatches that read them.

use super::kernels::{KernelSet, Pass, Reads};
use super::params::PassParams;
use crate::format::Tensor;
use crate::memory::PASS_BYTES;
use crate::plan::{
    BlockCopy, BlockCopyRange, PackBlock, Plan, Record, SlabRange, TokenCopy, TokenUnpack, TokenWrite,
};
use crate::schedule::{AttendPass, RowTile, Schedule, Split, TileRun, Tiles};
use crate::shape::Shape;
use std::ops::Range;

/// One dispatch of a layer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Dispatch {
    pub(super) pass: Pass,
    /// The way to attend of the layers that it is for, an index of [`Shape::attention`], or `None` for all.
    pub(super) attention: Option<u32>,
    /// The slab that it reads or writes; of two, the one that it writes.
    pub(super) slab: usize,
    /// Of two slabs, the one that it reads.
    pub(super) source: usize,
    /// Byte offset of its parameters in the plan buffer.
    pub(super) params: u32,
    pub(super) workgroups: [u32; 3],
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

/// Where the lists of a plan begin, in words of the plan buffer.
#[derive(Debug, Clone, Copy)]
struct Places {
    slots: u32,
    writes: u32,
    packs: u32,
    tiles: u32,
    runs: u32,
    token_copies: u32,
    block_copies: u32,
    unpacks: u32,
}

impl Places {
    /// Appends the lists to `words`.
    fn write(words: &mut Vec<u32>, plan: &Plan, schedule: &Schedule) -> Places {
        fn append<T: bytemuck::Pod>(words: &mut Vec<u32>, list: &[T]) -> u32 {
            let first = words.len() as u32;
            words.extend_from_slice(bytemuck::cast_slice(list));
            first
        }
        let splits = append(words, &schedule.splits);
        let in_words =
            |run: &TileRun| TileRun { first_split: splits + Split::WORDS * run.first_split, ..*run };
        let runs: Vec<TileRun> = schedule.runs.iter().map(in_words).collect();
        Places {
            slots: append(words, &plan.slots),
            writes: append(words, &plan.writes),
            packs: append(words, &plan.packs),
            tiles: append(words, &schedule.tiles),
            runs: append(words, &runs),
            token_copies: append(words, &plan.token_copies),
            block_copies: append(words, &plan.block_copies),
            unpacks: append(words, &plan.unpacks),
        }
    }

    /// The word of the record number `start` of a pass's list.
    fn first(&self, pass: Pass, start: u32) -> u32 {
        let (list, words) = match pass {
            Pass::Append => (self.writes, TokenWrite::WORDS),
            Pass::Pack(_) | Pass::RotateRows(_) => (self.packs, PackBlock::WORDS),
            // It reads no list.
            Pass::RotateQueries => (0, 0),
            Pass::Decode(..) | Pass::PrefillPacked | Pass::PrefillUnpacked => (self.runs, TileRun::WORDS),
            Pass::Merge(_) => (self.tiles, RowTile::WORDS),
            Pass::CopyTokens => (self.token_copies, TokenCopy::WORDS),
            Pass::CopyBlocks | Pass::CopyBlocksAcross => (self.block_copies, BlockCopy::WORDS),
            Pass::Unpack | Pass::UnpackRotated(_) => (self.unpacks, TokenUnpack::WORDS),
        };
        list + words * start
    }
}

impl Work {
    /// Of a plan, whose partial results have a scratch of so many. Nothing if the plan is empty.
    pub(super) fn new(
        s: &Shape,
        tiles: &Tiles,
        scratch_partials: u32,
        kernels: &KernelSet,
        plan: &Plan,
    ) -> Work {
        let schedule = Schedule::new(s, tiles, scratch_partials, plan);
        let passes = passes_of(s, kernels.variant().decode_reads(), plan, &schedule);
        let mut work = Work::default();
        if passes.is_empty() {
            return work;
        }
        work.words = vec![0; passes.len() * PASS_BYTES as usize / 4];
        let places = Places::write(&mut work.words, plan, &schedule);
        for (i, pass) in passes.into_iter().enumerate() {
            let grid = kernels.grid(pass.pass);
            let count = (pass.range.end - pass.range.start) * grid.per_record;
            let heads = pass.heads.end - pass.heads.start;
            let attention = pass.attention.map(|at| s.attention[at as usize]).unwrap_or_default();
            // A cap beyond f32 is none that is felt.
            let in_base_2 = |cap: f32| (cap * std::f32::consts::LOG2_E).min(f32::MAX);
            let params = PassParams {
                first: places.first(pass.pass, pass.range.start),
                count,
                tiles: places.tiles,
                slots: places.slots,
                first_head: pass.heads.start,
                heads,
                sliding_window: attention.sliding_window.unwrap_or(u32::MAX),
                soft_cap: attention.soft_cap.map_or(0.0, in_base_2),
            };
            let params: &[u32] = bytemuck::cast_slice(std::slice::from_ref(&params));
            let at = i * PASS_BYTES as usize / 4;
            work.words[at..at + params.len()].copy_from_slice(params);
            let dispatch = Dispatch {
                pass: pass.pass,
                attention: pass.attention,
                slab: pass.slab as usize,
                source: pass.source as usize,
                params: i as u32 * PASS_BYTES,
                workgroups: grid.workgroups(count, heads),
            };
            match pass.pass {
                Pass::Append => work.append = Some(dispatch),
                // Before attention, of whichever kind.
                Pass::RotateQueries => work.attend.push(dispatch),
                _ if pass.attention.is_some() => work.attend.push(dispatch),
                _ => work.changes.push(dispatch),
            }
        }
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
    attention: Option<u32>,
    slab: u32,
    source: u32,
    range: Range<u32>,
    heads: Range<u32>,
}

/// The passes of a step in order; those of decode steps read what the kernels say.
fn passes_of(s: &Shape, decode: &[Reads], plan: &Plan, schedule: &Schedule) -> Vec<PassWork> {
    let all = 0..s.layout.kv_heads;
    let mut passes = Vec::new();
    let mut push_from = |pass, attention, source, slab, range: &Range<u32>, heads: &Range<u32>| {
        if !range.is_empty() {
            let (range, heads) = (range.clone(), heads.clone());
            passes.push(PassWork { pass, attention, slab, source, range, heads });
        }
    };
    let mut push = |pass, attention, slab, range: &Range<u32>, heads: &Range<u32>| {
        push_from(pass, attention, slab, slab, range, heads);
    };
    push(Pass::Append, None, 0, &(0..plan.writes.len() as u32), &all);
    if s.layout.keys.rotated {
        push(Pass::RotateQueries, None, 0, &(0..plan.queries), &all);
    }
    for round in &schedule.rounds {
        let (rows, heads, attention) = (round.row_tile, &round.heads, Some(round.attention));
        for AttendPass { slab, runs, unpacked } in &round.passes {
            let first_packed = runs.start + unpacked;
            let slab_or_any = slab.unwrap_or(0);
            if round.prefill {
                let pass = if slab.is_some() { Pass::PrefillPacked } else { Pass::PrefillUnpacked };
                push(pass, attention, slab_or_any, runs, heads);
                continue;
            }
            for &reads in decode {
                let runs = match reads {
                    Reads::Both => runs.clone(),
                    Reads::Unpacked => runs.start..first_packed,
                    Reads::Packed => first_packed..runs.end,
                };
                push(Pass::Decode(reads, rows), attention, slab_or_any, &runs, heads);
            }
        }
        push(Pass::Merge(rows), attention, 0, &round.tiles, heads);
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
            if s.layout.tensor(tensor).rotates_apart() {
                push(Pass::RotateRows(tensor), *slab, items);
            }
            push(Pass::Pack(tensor), *slab, items);
        }
    }
    for SlabRange { slab, items } in &plan.unpack_slabs {
        let rotated = [Tensor::Keys, Tensor::Values].map(|t| (t, s.layout.tensor(t).format.rotated));
        if rotated.iter().any(|(_, rotated)| !rotated) {
            push(Pass::Unpack, *slab, items);
        }
        for (tensor, _) in rotated.into_iter().filter(|(_, rotated)| *rotated) {
            push(Pass::UnpackRotated(tensor), *slab, items);
        }
    }
    passes
}
