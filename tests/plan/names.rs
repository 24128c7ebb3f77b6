//! An executor of plans on names: memory in which every slot holds a token's name, or nothing that may be
//! read.

use crate::reference::program::{Executor, Machine, Work};
use crate::reference::{NaiveSequence, Rules, returned};
use kivi_wgpu::internals::lifecycle::{self, Lifecycle};
use kivi_wgpu::internals::plan::{
    NewSlab, Plan, Planner, PoolLimits, PoolSize, Request, SequenceLengths, SequenceView, Slot,
};
use kivi_wgpu::internals::schedule::{Bounds, Budget, Round, Schedule, Split, TileLimits, Tiles};
use kivi_wgpu::{
    CacheConfig, CacheShape, Error, LayerState, Operation, SequenceId, SequenceStep, Shape, UnpackedTokens,
};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

/// Bytes of a binding.
const MAX_BINDING: u64 = 128 << 20;

/// Of one class of layers, all of which hold the same.
#[derive(Debug)]
pub struct Names {
    s: Shape,
    tiles: Tiles,
    budget: Budget,
    slab_pages: Vec<u32>,
    slots: HashMap<Slot, u64>,
    blocks: HashMap<(u32, u32), Vec<u64>>,
    /// Calls of `grow`. The second of three is refused: then less may still fit, and the next is for that.
    grown: u32,
}

impl Names {
    fn token_in(&self, slot: Slot) -> u64 {
        *self.slots.get(&slot).unwrap_or_else(|| panic!("{slot:?} is read and holds no token"))
    }

    /// Does what the plan says; returns for each (kind of attention, query, query head) the tokens seen, in
    /// order, with their positions.
    fn run(&mut self, plan: &Plan, input: &[u64]) -> BTreeMap<(u32, u32, u32), Vec<(u32, u64)>> {
        for write in &plan.writes {
            assert!(write.slot.is_staging() == (write.slot.word() & Slot::STAGING_BIT != 0));
            let limit = if write.slot.is_staging() { self.s.staging_tokens } else { self.s.unpacked_slots() };
            assert!(write.slot.index() < limit);
            self.slots.insert(write.slot, input[write.row as usize]);
        }
        // What an executor uploads: the work lists, and 256 bytes of parameters per pass.
        let schedule = Schedule::new(&self.s, &self.tiles, self.budget.scratch_partials, plan);
        let lists =
            plan.slots.len() + 2 * plan.writes.len() + 2 * plan.packs.len() + 8 * schedule.tiles.len();
        let attention = 3 * schedule.splits.len() + 6 * schedule.runs.len();
        let passes_of = |round: &Round| 1 + round.passes.len();
        let copies = 2 * plan.token_copies.len() + 2 * plan.block_copies.len() + 3 * plan.unpacks.len();
        let unpacks = if self.s.layout.values.rotated { 2 } else { 1 } * plan.unpack_slabs.len();
        let slabs = 4 * plan.pack_slabs.len() + plan.copy_slabs.len() + unpacks;
        let passes = 3 + schedule.rounds.iter().map(passes_of).sum::<usize>() + slabs;
        let bytes = 4 * (lists + attention + copies) + 256 * passes;
        let most = self.budget.plan_bytes;
        assert!(bytes as u64 <= most, "{bytes} bytes of plan, {most}");

        let seen = self.attend(plan, &schedule);
        self.copy(plan);
        let mut covered = 0;
        for range in &plan.pack_slabs {
            for pack in &plan.packs[range.items.start as usize..range.items.end as usize] {
                covered += 1;
                let slots = &plan.slots[pack.first_slot as usize..][..self.s.layout.group as usize];
                let tokens = slots.iter().map(|&s| self.token_in(s)).collect();
                let pages = self.slab_pages[range.slab as usize];
                assert!(pack.block < pages * self.s.layout.blocks_per_page());
                self.blocks.insert((range.slab, pack.block), tokens);
            }
        }
        assert_eq!(covered, plan.packs.len());
        for range in &plan.unpack_slabs {
            for item in &plan.unpacks[range.items.start as usize..range.items.end as usize] {
                let block = &self.blocks[&(range.slab, item.block)];
                self.slots.insert(item.slot, returned(block, item.token as usize));
            }
        }
        // The staging buffer is another layer's, then another step's.
        self.slots.retain(|slot, _| !slot.is_staging());
        seen
    }

    fn attend(&self, plan: &Plan, schedule: &Schedule) -> BTreeMap<(u32, u32, u32), Vec<(u32, u64)>> {
        let mut seen = BTreeMap::new();
        let mut tiles = 0;
        for round in &schedule.rounds {
            // In order; rounds for other heads of the same tiles share them.
            assert!(round.tiles.start == tiles || (round.tiles.end == tiles && round.heads.start > 0));
            tiles = round.tiles.end;
            let mut used = HashSet::new();
            for t in round.tiles.clone() {
                let tile = &schedule.tiles[t as usize];
                assert!((1..=round.row_tile).contains(&tile.rows));
                let parts = match round.prefill {
                    false => self.spans(plan, schedule, round, t),
                    true => self.prefill_parts(plan, schedule, round, t),
                };
                let rows = tile.first_partial..tile.first_partial + tile.partials * round.row_tile;
                for row in rows {
                    let partials = (row + 1) * round.heads.len() as u32;
                    assert!(
                        partials <= self.budget.scratch_partials && used.insert(row),
                        "partial rows collide"
                    );
                }
                for row in tile.first_row..tile.first_row + tile.rows {
                    let query = row / self.s.heads_per_kv;
                    let position = tile.position + query;
                    let kind = &self.s.attention[round.attention as usize];
                    let oldest = kind.sliding_window.map_or(0, |n| (position + 1).saturating_sub(n));
                    let visible: Vec<_> = parts
                        .iter()
                        .flatten()
                        .copied()
                        .filter(|(p, _)| (oldest..=position).contains(p))
                        .collect();
                    for head in round.heads.clone() {
                        let query_head = head * self.s.heads_per_kv + row % self.s.heads_per_kv;
                        let key = (round.attention, tile.first_query + query, query_head);
                        assert!(seen.insert(key, visible.clone()).is_none(), "a row is attended twice");
                    }
                }
            }
        }
        assert_eq!(tiles as usize, schedule.tiles.len());
        seen
    }

    /// (position, token) of each token of a page or of a list of slots.
    fn split_tokens(&self, plan: &Plan, slab: Option<u32>, split: &Split) -> Vec<(u32, u64)> {
        let group = self.s.layout.group;
        let token = |i| match slab {
            Some(slab) => {
                let block = split.source + i / group;
                self.blocks[&(slab, block)][(i % group) as usize]
            }
            None => self.token_in(plan.slots[(split.source + i) as usize]),
        };
        (0..split.tokens).map(|i| (split.first_position + i, token(i))).collect()
    }

    /// The spans of a tile, in order of position: one for each of its partial results.
    fn spans(&self, plan: &Plan, schedule: &Schedule, round: &Round, tile: u32) -> Vec<Vec<(u32, u64)>> {
        let about = &schedule.tiles[tile as usize];
        let mut spans: BTreeMap<u32, Vec<(u32, u64)>> = BTreeMap::new();
        for pass in &round.passes {
            let runs = &schedule.runs[pass.runs.start as usize..pass.runs.end as usize];
            for run in runs.iter().filter(|run| run.tile == tile) {
                let packed = run.unpacked == 0;
                let number = (run.partial - about.first_partial) / round.row_tile;
                let history = about.first_packed..about.first_packed + about.packed;
                assert_eq!(packed, history.contains(&number), "a merge must know rotated sums");
                let span = spans.entry(number).or_default();
                assert_eq!(run.fresh == 1, span.is_empty());
                for split in &schedule.splits[run.first_split as usize..][..run.splits as usize] {
                    let slab = packed.then(|| pass.slab.expect("packed tokens are in a slab"));
                    let tokens = self.split_tokens(plan, slab, split);
                    assert!((1..=256).contains(&tokens.len()));
                    assert!(span.last().is_none_or(|(position, _)| *position < split.first_position));
                    span.extend(tokens);
                }
            }
        }
        assert!(spans.keys().copied().eq(0..about.partials));
        spans.into_values().collect()
    }

    /// The parts of a long chunk's tile, in order of position. Where values are rotated, packed and unpacked
    /// tokens extend partial results of their own.
    fn prefill_parts(
        &self,
        plan: &Plan,
        schedule: &Schedule,
        round: &Round,
        tile: u32,
    ) -> Vec<Vec<(u32, u64)>> {
        let about = &schedule.tiles[tile as usize];
        let rows = round.row_tile * if self.s.layout.values.rotated { 2 } else { 1 };
        let base = about.first_partial / rows * rows;
        let mut by_partial: [Vec<Vec<(u32, u64)>>; 2] = Default::default();
        for pass in &round.passes {
            let runs = &schedule.runs[pass.runs.start as usize..pass.runs.end as usize];
            for run in runs.iter().filter(|run| run.tile == tile) {
                let own = usize::from(self.s.layout.values.rotated && pass.slab.is_some());
                assert_eq!(run.partial, base + own as u32 * round.row_tile);
                let parts = &mut by_partial[own];
                assert_eq!(run.fresh == 1, parts.is_empty());
                for split in &schedule.splits[run.first_split as usize..][..run.splits as usize] {
                    assert!(parts.last().is_none_or(|last| last[last.len() - 1].0 < split.first_position));
                    assert_eq!(run.unpacked == 1, pass.slab.is_none());
                    let tokens = self.split_tokens(plan, pass.slab, split);
                    assert!((1..=256).contains(&tokens.len()));
                    parts.push(tokens);
                }
            }
        }
        let present = by_partial.iter().filter(|parts| !parts.is_empty()).count() as u32;
        assert_eq!(about.partials, present);
        let history = u32::from(!by_partial[1].is_empty());
        assert_eq!((about.first_packed, about.packed), (history * (present - 1), history));
        assert_eq!(about.first_partial, base + if by_partial[0].is_empty() { round.row_tile } else { 0 });
        let mut parts = by_partial.concat();
        parts.sort_by_key(|part| part[0].0);
        parts
    }

    /// Copies in any order: none reads what another writes.
    fn copy(&mut self, plan: &Plan) {
        let cells: Vec<_> =
            plan.token_copies.iter().map(|c| (c.destination, self.token_in(c.source))).collect();
        self.slots.extend(cells);
        let mut blocks = Vec::new();
        for range in &plan.copy_slabs {
            for copy in &plan.block_copies[range.items.start as usize..range.items.end as usize] {
                assert!(
                    copy.destination < self.slab_pages[range.to as usize] * self.s.layout.blocks_per_page()
                );
                blocks.push(((range.to, copy.destination), self.blocks[&(range.from, copy.source)].clone()));
            }
        }
        assert_eq!(blocks.len(), plan.block_copies.len());
        self.blocks.extend(blocks);
    }
}

impl lifecycle::Executor for Names {
    /// Whether the work is submitted.
    type Recorder = bool;
    type Work = ();

    fn grow(&mut self, _: usize, slabs: &[NewSlab], size: PoolSize) -> Result<(), Error> {
        self.grown += 1;
        if self.grown % 3 == 2 {
            return Err(Error::OutOfMemory { what: "a slab", bytes: 1 });
        }
        self.slab_pages.resize(size.slabs as usize, 0);
        for new in slabs {
            assert_eq!(std::mem::replace(&mut self.slab_pages[new.slab as usize], new.pages), 0);
        }
        assert_eq!(self.slab_pages.iter().sum::<u32>(), size.pages);
        self.fit(0, size)
    }

    fn shrink(&mut self, _: usize, slabs: &[u32]) {
        for slab in slabs {
            self.slab_pages[*slab as usize] = 0;
        }
    }

    fn fit(&mut self, _: usize, size: PoolSize) -> Result<(), Error> {
        // Sequences that share pages once may do so again.
        let pool = PoolSize { shared: size.shared.max(self.budget.pool.shared), ..size };
        self.budget = Bounds { shape: &self.s, tiles: &self.tiles, pool }.budget(MAX_BINDING, 256)?;
        Ok(())
    }

    fn prepare(&mut self, _: &mut bool, plans: &[Plan]) -> Result<(), Error> {
        assert_eq!(plans.len(), 1);
        Ok(())
    }

    fn carry_out(&mut self, submitted: &mut bool, plans: &[Plan], (): &()) {
        if *submitted {
            self.run(&plans[0], &[]);
        }
    }

    fn write(&mut self, _: &mut bool, views: &[SequenceView], layers: &[LayerState]) -> Result<(), Error> {
        let (view, state) = (&views[0], &layers[0]);
        let names = |words: &[u32]| -> Vec<u64> {
            words.chunks(2).map(|pair| u64::from(pair[0]) << 32 | u64::from(pair[1])).collect()
        };
        self.slots.extend(view.sinks.iter().copied().zip(names(&state.sinks.keys)));
        self.slots.extend(view.window.iter().copied().zip(names(&state.window.keys)));
        let blocks = names(&state.blocks);
        let blocks = blocks.chunks(self.s.layout.group as usize).map(<[u64]>::to_vec);
        self.blocks.extend(view.blocks.iter().copied().zip(blocks));
        Ok(())
    }

    async fn read(&self, _: usize, _: usize, view: &SequenceView) -> Result<LayerState, Error> {
        let (sinks, blocks, window) = self.content(view);
        let words = |names: Vec<u64>| {
            names.into_iter().flat_map(|name| [(name >> 32) as u32, name as u32]).collect::<Vec<u32>>()
        };
        let unpacked = |names| UnpackedTokens { keys: words(names), values: Vec::new() };
        let (sinks, window) = (unpacked(sinks), unpacked(window));
        Ok(LayerState { lengths: view.lengths, sinks, blocks: words(blocks.concat()), window })
    }
}

impl Names {
    /// Sinks, blocks and window of a sequence, as read through the planner's view.
    fn content(&self, view: &SequenceView) -> (Vec<u64>, Vec<Vec<u64>>, Vec<u64>) {
        let read = |slots: &[Slot]| slots.iter().map(|&s| self.token_in(s)).collect::<Vec<_>>();
        let blocks = view.blocks.iter().map(|b| self.blocks[b].clone()).collect();
        (read(&view.sinks), blocks, read(&view.window))
    }
}

/// A cache of names.
pub struct Run {
    pub lifecycle: Lifecycle<Names>,
}

impl Run {
    pub fn new(config: &CacheConfig) -> Run {
        let shape = CacheShape::new(config).unwrap();
        let s = shape.classes[0].clone();
        let pool = PoolLimits::new(&s, config, MAX_BINDING).unwrap();
        let tiles = Tiles::new(&s, &TileLimits::WGSL);
        let budget = Bounds { shape: &s, tiles: &tiles, pool: pool.size() }.budget(MAX_BINDING, 256).unwrap();
        let (slots, blocks) = Default::default();
        let names = Names { s, tiles, budget, slab_pages: pool.slabs(), slots, blocks, grown: 0 };
        Run { lifecycle: Lifecycle::new(Planner::new(Arc::new(shape), vec![pool]), names) }
    }

    pub fn machine(config: &CacheConfig) -> Machine<Run> {
        Machine::new(config, Run::new(config))
    }

    pub fn planner(&self) -> &Planner {
        self.lifecycle.planner()
    }

    pub fn pages(&self) -> u32 {
        self.planner().pool_size(0).pages
    }

    fn names(&self) -> &Names {
        self.lifecycle.executor()
    }

    fn rules(&self) -> Rules {
        let s = &self.names().s;
        Rules {
            sinks: s.sinks as usize,
            window: s.window as usize,
            group: s.layout.group as usize,
            limit: s.history_limit.map(|limit| limit as usize),
        }
    }

    /// Sinks, blocks and window of a sequence.
    pub fn content(&self, id: SequenceId) -> (Vec<u64>, Vec<Vec<u64>>, Vec<u64>) {
        self.names().content(&self.planner().view(0, id).unwrap())
    }

    /// What each query of a step should see: (kind of attention, query, query head) to (position, token).
    fn expected(
        &self,
        steps: &[SequenceStep],
        during: &[NaiveSequence],
    ) -> BTreeMap<(u32, u32, u32), Vec<(u32, u64)>> {
        let s = &self.names().s;
        let mut expected = BTreeMap::new();
        let mut query = 0;
        for (step, during) in steps.iter().zip(during) {
            for i in 0..step.attend {
                let visible = during.tokens.len() - (step.attend - 1 - i) as usize;
                for (kind, attention) in (0..).zip(&s.attention) {
                    let oldest = attention.sliding_window.map_or(0, |n| visible.saturating_sub(n as usize));
                    let tokens = (oldest as u32..).zip(during.tokens[oldest..visible].iter().copied());
                    let gone = s.sinks..s.sinks + during.evicted as u32;
                    let tokens: Vec<(u32, u64)> = tokens.filter(|(p, _)| !gone.contains(p)).collect();
                    for head in 0..s.query_heads {
                        expected.insert((kind, query, head), tokens.clone());
                    }
                }
                query += 1;
            }
        }
        expected
    }
}

impl Executor for Run {
    fn create(&mut self) -> Result<SequenceId, Error> {
        self.lifecycle.create_sequence()
    }

    fn remove(&mut self, id: SequenceId, _: Work) -> Operation {
        let operation = self.lifecycle.remove_sequence(id).unwrap();
        assert_eq!(self.planner().tokens(id), Err(Error::UnknownSequence(id)));
        operation
    }

    fn step(
        &mut self,
        steps: &[SequenceStep],
        tokens: &[u64],
        during: &[NaiveSequence],
        work: Work,
    ) -> Result<Operation, Error> {
        let mut begun = self.lifecycle.begin_step(&mut true, steps)?;
        if work == Work::Submitted {
            let seen = self.lifecycle.executor_mut().run(&begun.plans()[0], tokens);
            assert_eq!(seen, self.expected(steps, during));
        }
        for layer in 0..self.planner().shape().layers() {
            begun.check_record(layer)?;
            begun.recorded(layer);
            assert_eq!(begun.check_record(layer), Err(Error::LayerRepeated(layer)));
        }
        self.lifecycle.finish_step(begun)
    }

    fn dropped_step(&mut self, steps: &[SequenceStep], tokens: &[u64]) {
        if let Ok(begun) = self.lifecycle.begin_step(&mut true, steps) {
            self.lifecycle.executor_mut().run(&begun.plans()[0], tokens);
            if begun.tokens() > 0 {
                assert_eq!(self.lifecycle.finish_step(begun), Err(Error::LayerMissing(0)));
            }
        }
    }

    fn truncate(&mut self, id: SequenceId, tokens: u32, before: &NaiveSequence, work: Work) -> Operation {
        let length = before.tokens.len() as u32;
        let rules = self.rules();
        let mut truncate = |tokens, submitted: bool| {
            self.lifecycle.operate(&mut { submitted }, Request::Truncate(id, tokens)).map(|(_, done)| done)
        };
        if let Some(gone) = before.first_gone(&rules) {
            let error = truncate(gone, true).unwrap_err();
            assert!(matches!(error, Error::TruncateIntoEvicted { got, .. } if got == gone), "{error}");
        }
        let beyond = truncate(length + 1, true).unwrap_err();
        assert_eq!(beyond, Error::TruncateBeyondEnd { sequence: id, got: length + 1, tokens: length });
        let taken_back = truncate(tokens, false).unwrap();
        self.lifecycle.discard(taken_back).unwrap();
        assert_eq!(self.planner().tokens(id), Ok(length));
        let submitted = work == Work::Submitted;
        self.lifecycle.operate(&mut { submitted }, Request::Truncate(id, tokens)).unwrap().1
    }

    fn fork(&mut self, id: SequenceId, work: Work) -> Result<(SequenceId, Operation), Error> {
        let (free, pages) = (self.free_pages(), self.pages());
        let lengths = self.planner().view(0, id)?.lengths;
        let done = self.lifecycle.fork(&mut { work == Work::Submitted }, id)?;
        // No page is taken but one for blocks of a page that is not full: no page that either may extend is
        // shared.
        let open = lengths.blocks % self.names().s.layout.blocks_per_page();
        assert_eq!(self.free_pages() + u32::from(open > 0), free + self.pages() - pages);
        Ok(done)
    }

    fn reorder(&mut self, ids: &[SequenceId], parents: &[usize], work: Work) -> Result<Operation, Error> {
        let mut used: Vec<usize> = parents.to_vec();
        used.sort_unstable();
        used.dedup();
        let request = Request::Reorder(ids, parents);
        // Only repeats are copied.
        if used.len() == parents.len() {
            assert_eq!(self.planner().pages_for(request)?, [0]);
        }
        Ok(self.lifecycle.operate(&mut { work == Work::Submitted }, request)?.1)
    }

    fn save_and_load(&mut self, id: SequenceId) -> Result<SequenceId, Error> {
        let snapshot = pollster::block_on(self.lifecycle.save(id))?;
        Ok(self.lifecycle.load(&mut true, &snapshot)?.0)
    }

    fn shrink(&mut self) {
        self.lifecycle.shrink_to_fit();
        assert_eq!(self.planner().slab_pages(0), self.names().slab_pages);
    }

    fn free_pages(&self) -> u32 {
        self.planner().free_pages(0)
    }

    fn discard(&mut self, operation: Operation) -> Result<(), Error> {
        self.lifecycle.discard(operation)
    }

    fn check(&mut self, model: &[(SequenceId, NaiveSequence)]) {
        let per_page = self.names().s.layout.blocks_per_page();
        let rules = self.rules();
        let mut ids: Vec<SequenceId> = model.iter().map(|(id, _)| *id).collect();
        ids.sort_unstable();
        assert_eq!(self.planner().sequences().collect::<Vec<_>>(), ids);
        let mut held = HashSet::new();
        let mut empty = 0;
        for (id, naive) in model {
            let view = self.planner().view(0, *id).unwrap();
            let lengths = [view.lengths.tokens, view.lengths.blocks, view.lengths.evicted];
            let blocks = |tokens: usize| tokens / rules.group;
            let expected = [naive.tokens.len(), blocks(naive.packed), blocks(naive.evicted)];
            assert_eq!(lengths.map(|n| n as usize), expected);
            let (sinks, blocks, tokens) = self.content(*id);
            assert_eq!(sinks, naive.sinks(&rules));
            assert_eq!(blocks, naive.blocks(&rules));
            assert_eq!(tokens, naive.window(&rules));
            assert!(tokens.len() < rules.window + rules.group);
            // A page may be open for the next block when the others on it are gone.
            let SequenceLengths { blocks, evicted, .. } = view.lengths;
            empty += usize::from(blocks == evicted && !blocks.is_multiple_of(per_page));
            held.extend(view.blocks.iter().map(|(slab, block)| (*slab, block / per_page)));
        }
        // Every page is free or some sequence's, never both.
        let accounted = self.free_pages() as usize + held.len();
        assert!((accounted..=accounted + empty).contains(&(self.pages() as usize)));
        let usage = self.planner().usage(0);
        let unpacked: usize = model.iter().map(|(_, naive)| naive.tokens.len() - naive.packed).sum();
        assert_eq!((usage.window_tokens + usage.sink_tokens) as usize, unpacked);
    }

    /// Forgets every cell and block that holds nothing of any sequence, as a GPU may after the next
    /// operation.
    fn poison(&mut self) {
        let mut slots = HashSet::new();
        let mut blocks = HashSet::new();
        for id in self.planner().sequences() {
            let view = self.planner().view(0, id).unwrap();
            slots.extend(view.sinks.into_iter().chain(view.window));
            blocks.extend(view.blocks);
        }
        assert_eq!(self.planner().usage(0).blocks as usize, blocks.len());
        let names = self.lifecycle.executor_mut();
        names.slots.retain(|slot, _| slots.contains(slot));
        names.blocks.retain(|block, _| blocks.contains(block));
    }
}
