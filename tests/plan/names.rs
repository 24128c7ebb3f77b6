//! An executor of plans on names: memory in which every cell holds a token's name, or nothing that may be read.

use crate::reference::program::{Executor, Machine, Work};
use crate::reference::{NaiveSequence, Rules, returned};
use kivi_wgpu::plan::{
    Applied, AttendItem, FoldSplit, Planner, Round, SequenceId, SequenceLengths, SequenceStep, Slot, StepPlan,
};
use kivi_wgpu::{CacheConfig, Error, Geometry, Operation};
use std::collections::{BTreeMap, HashMap, HashSet};

/// A third executor: memory in which every cell holds a token's name, or nothing that may be read.
struct Names {
    g: Geometry,
    cells: HashMap<Slot, u64>,
    blocks: HashMap<(u32, u32), Vec<u64>>,
}

impl Names {
    fn read(&self, slot: Slot) -> u64 {
        *self.cells.get(&slot).unwrap_or_else(|| panic!("{slot:?} is read and holds no token"))
    }

    /// Does what the plan says; returns for each (attention class, query, query head) the tokens seen, in order, with their positions.
    fn run(&mut self, plan: &StepPlan, input: &[u64]) -> BTreeMap<(u32, u32, u32), Vec<(u32, u64)>> {
        for write in &plan.writes {
            assert!(write.slot.is_staging() == (write.slot.word() & Slot::STAGING_BIT != 0));
            let limit = if write.slot.is_staging() { self.g.staging_tokens } else { self.g.unpacked_slots() };
            assert!(write.slot.index() < limit);
            self.cells.insert(write.slot, input[write.row as usize]);
        }
        // What an executor uploads: the work lists, and 256 bytes of parameters per pass.
        let lists = plan.slots.len() + 2 * plan.writes.len() + 2 * plan.packs.len() + 8 * plan.tiles.len();
        let attention = 5 * plan.items.len() + 3 * plan.splits.len() + 5 * plan.runs.len();
        let passes_of = |round: &Round| 2 + round.history.len() + round.fold.len();
        let copies = 2 * plan.token_copies.len() + 2 * plan.block_copies.len() + 3 * plan.unpacks.len();
        let unpacks = if self.g.layout.values.rotated { 2 } else { 1 } * plan.unpack_slabs.len();
        let slabs = 4 * plan.pack_slabs.len() + plan.copy_slabs.len() + unpacks;
        let passes = 3 + plan.rounds.iter().map(passes_of).sum::<usize>() + slabs;
        let bytes = 4 * (lists + attention + copies) + 256 * passes;
        assert!(bytes as u64 <= self.g.plan_bytes(), "{bytes} bytes of plan, {}", self.g.plan_bytes());

        let seen = self.attend(plan);
        self.copy(plan);
        let mut covered = 0;
        for range in &plan.pack_slabs {
            for pack in &plan.packs[range.items.start as usize..range.items.end as usize] {
                covered += 1;
                let slots = &plan.slots[pack.first_slot as usize..][..self.g.layout.group as usize];
                let tokens = slots.iter().map(|&s| self.read(s)).collect();
                let pages = self.g.slab_pages(range.slab);
                assert!(pack.block < pages * self.g.layout.blocks_per_page());
                self.blocks.insert((range.slab, pack.block), tokens);
            }
        }
        assert_eq!(covered, plan.packs.len());
        for range in &plan.unpack_slabs {
            for item in &plan.unpacks[range.items.start as usize..range.items.end as usize] {
                let block = &self.blocks[&(range.slab, item.block)];
                self.cells.insert(item.slot, returned(block, item.token as usize));
            }
        }
        // The staging buffer is another layer's, then another step's.
        self.cells.retain(|slot, _| !slot.is_staging());
        seen
    }

    fn attend(&self, plan: &StepPlan) -> BTreeMap<(u32, u32, u32), Vec<(u32, u64)>> {
        let mut seen = BTreeMap::new();
        let mut tiles = 0;
        for round in &plan.rounds {
            // In order; rounds for other heads of the same tiles share them.
            assert!(round.tiles.start == tiles || (round.tiles.end == tiles && round.heads.start > 0));
            tiles = round.tiles.end;
            let mut used = HashSet::new();
            for t in round.tiles.clone() {
                let tile = &plan.tiles[t as usize];
                assert!((1..=round.row_tile).contains(&tile.rows));
                let parts = if round.fold.is_empty() {
                    let parts = self.split_parts(plan, round, t);
                    assert_eq!(parts.len() as u32, tile.splits);
                    let history = tile.first_history..tile.first_history + tile.history_splits;
                    for item in plan.items.iter().enumerate().filter(|(_, item)| item.tile == t) {
                        let (at, item) = item;
                        let is_history = round.history.iter().any(|range| range.items.contains(&(at as u32)));
                        let split = (item.partial - tile.first_partial) / round.row_tile;
                        assert_eq!(is_history, history.contains(&split), "a merge must know rotated sums");
                    }
                    for (i, partial) in parts.keys().enumerate() {
                        assert_eq!(*partial, tile.first_partial + i as u32 * round.row_tile);
                    }
                    parts.into_values().collect()
                } else {
                    self.fold_parts(plan, round, t)
                };
                let rows = tile.first_partial..tile.first_partial + tile.splits * round.row_tile;
                for row in rows {
                    let cells = (row + 1) * round.heads.len() as u32;
                    assert!(cells <= self.g.scratch_cells && used.insert(row), "partial rows collide");
                }
                assert!(parts.iter().all(|tokens| (1..=256).contains(&tokens.len())));
                for row in tile.first_row..tile.first_row + tile.rows {
                    let query = row / self.g.heads_per_group;
                    let position = tile.position + query;
                    let class = &self.g.attention_classes[round.class as usize];
                    let oldest = class.sliding_window.map_or(0, |n| (position + 1).saturating_sub(n));
                    let visible: Vec<_> = parts
                        .iter()
                        .flatten()
                        .copied()
                        .filter(|(p, _)| (oldest..=position).contains(p))
                        .collect();
                    for head in round.heads.clone() {
                        let query_head = head * self.g.heads_per_group + row % self.g.heads_per_group;
                        let key = (round.class, tile.first_query + query, query_head);
                        assert!(seen.insert(key, visible.clone()).is_none(), "a row is attended twice");
                    }
                }
            }
        }
        assert_eq!(tiles as usize, plan.tiles.len());
        seen
    }

    /// (position, token) of each token of a page or of a list of slots.
    fn split_tokens(&self, plan: &StepPlan, slab: Option<u32>, split: &FoldSplit) -> Vec<(u32, u64)> {
        let group = self.g.layout.group;
        let token = |i| match slab {
            Some(slab) => {
                let block = split.source + i / group;
                self.blocks[&(slab, block)][(i % group) as usize]
            }
            None => self.read(plan.slots[(split.source + i) as usize]),
        };
        (0..split.tokens).map(|i| (split.first_position + i, token(i))).collect()
    }

    /// The parts of a tile with a partial per split, by partial.
    fn split_parts(&self, plan: &StepPlan, round: &Round, tile: u32) -> BTreeMap<u32, Vec<(u32, u64)>> {
        let history = round.history.iter().map(|range| (Some(range.slab), range.items.clone()));
        let mut parts = BTreeMap::new();
        for (slab, items) in history.chain([(None, round.window.clone())]) {
            for item in plan.items[items.start as usize..items.end as usize].iter().filter(|i| i.tile == tile)
            {
                let AttendItem { source, tokens, first_position, .. } = *item;
                let split = FoldSplit { source, tokens, first_position };
                let taken = parts.insert(item.partial, self.split_tokens(plan, slab, &split));
                assert!(taken.is_none());
            }
        }
        parts
    }

    /// The parts of a long chunk's tile, in order of position. Where values are rotated, packed and unpacked tokens extend partial results of their own.
    fn fold_parts(&self, plan: &StepPlan, round: &Round, tile: u32) -> Vec<Vec<(u32, u64)>> {
        assert!(round.history.is_empty() && round.window.is_empty());
        let about = &plan.tiles[tile as usize];
        let rows = round.row_tile * if self.g.layout.values.rotated { 2 } else { 1 };
        let base = about.first_partial / rows * rows;
        let mut by_partial: [Vec<Vec<(u32, u64)>>; 2] = Default::default();
        for pass in &round.fold {
            let runs = &plan.runs[pass.runs.start as usize..pass.runs.end as usize];
            for run in runs.iter().filter(|run| run.tile == tile) {
                let own = usize::from(self.g.layout.values.rotated && pass.slab.is_some());
                assert_eq!(run.partial, base + own as u32 * round.row_tile);
                let parts = &mut by_partial[own];
                assert_eq!(run.fresh, parts.is_empty());
                for split in &plan.splits[run.splits.start as usize..run.splits.end as usize] {
                    assert!(parts.last().is_none_or(|last| last[last.len() - 1].0 < split.first_position));
                    parts.push(self.split_tokens(plan, pass.slab, split));
                }
            }
        }
        let present = by_partial.iter().filter(|parts| !parts.is_empty()).count() as u32;
        assert_eq!(about.splits, present);
        let history = u32::from(!by_partial[1].is_empty());
        assert_eq!((about.first_history, about.history_splits), (history * (present - 1), history));
        assert_eq!(about.first_partial, base + if by_partial[0].is_empty() { round.row_tile } else { 0 });
        let mut parts = by_partial.concat();
        parts.sort_by_key(|part| part[0].0);
        parts
    }

    /// Copies in any order: none reads what another writes.
    fn copy(&mut self, plan: &StepPlan) {
        let cells: Vec<_> = plan.token_copies.iter().map(|c| (c.to, self.read(c.from))).collect();
        self.cells.extend(cells);
        let mut blocks = Vec::new();
        for range in &plan.copy_slabs {
            for copy in &plan.block_copies[range.items.start as usize..range.items.end as usize] {
                assert!(copy.to < self.g.slab_pages(range.to) * self.g.layout.blocks_per_page());
                blocks.push(((range.to, copy.to), self.blocks[&(range.from, copy.from)].clone()));
            }
        }
        assert_eq!(blocks.len(), plan.block_copies.len());
        self.blocks.extend(blocks);
    }
}

/// The plan, carried out on names.
pub struct Run {
    pub planner: Planner,
    names: Names,
}

impl Run {
    pub fn new(config: &CacheConfig) -> Run {
        let g = Geometry::new(config, 128 << 20).unwrap();
        let names = Names { g: g.clone(), cells: HashMap::new(), blocks: HashMap::new() };
        Run { planner: Planner::new(g), names }
    }

    pub fn machine(config: &CacheConfig) -> Machine<Run> {
        Machine::new(config, Run::new(config))
    }

    fn rules(&self) -> Rules {
        let g = &self.names.g;
        Rules {
            sinks: g.sinks as usize,
            window: g.window as usize,
            group: g.layout.group as usize,
            limit: g.history_limit.map(|limit| limit as usize),
        }
    }

    /// Lets the pool grow if it must.
    fn with_room<T>(&mut self, mut plan: impl FnMut(&mut Planner) -> Result<T, Error>) -> Result<T, Error> {
        match plan(&mut self.planner) {
            Err(Error::CapacityExceeded { needed, available, .. }) if needed <= available => {
                let growth =
                    self.planner.growth(needed, needed % 2 == 0).unwrap().expect("pages are missing");
                self.planner.grow(growth);
                self.names.g = self.planner.geometry().clone();
                assert!(self.planner.free_pages() >= needed);
                plan(&mut self.planner)
            }
            other => other,
        }
    }

    /// Sinks, blocks and window of a sequence, as read through the planner's view.
    pub fn content(&self, id: SequenceId) -> (Vec<u64>, Vec<Vec<u64>>, Vec<u64>) {
        let view = self.planner.view(id).unwrap();
        let read = |slots: &[Slot]| slots.iter().map(|&s| self.names.read(s)).collect::<Vec<_>>();
        let blocks = view.blocks.iter().map(|b| self.names.blocks[b].clone()).collect();
        (read(&view.sinks), blocks, read(&view.window))
    }

    fn carry_out(&mut self, applied: Applied, work: Work) -> Operation {
        if let Some(growth) = self.planner.sharing().unwrap() {
            self.planner.grow(growth);
            self.names.g = self.planner.geometry().clone();
        }
        if work == Work::Submitted {
            self.names.run(&applied.plan, &[]);
        }
        self.planner.commit_applied(applied)
    }
}

impl Executor for Run {
    fn create(&mut self) -> Result<SequenceId, Error> {
        self.planner.create_sequence()
    }

    fn remove(&mut self, id: SequenceId, _: Work) -> Operation {
        let operation = self.planner.remove_sequence(id).unwrap();
        assert_eq!(self.planner.tokens(id), Err(Error::UnknownSequence(id)));
        operation
    }

    fn step(
        &mut self,
        steps: &[SequenceStep],
        tokens: &[u64],
        during: &[NaiveSequence],
        work: Work,
    ) -> Result<Operation, Error> {
        let planned = self.with_room(|planner| planner.plan_step(steps))?;
        if work == Work::Submitted {
            let seen = self.names.run(&planned.plan, tokens);
            let mut expected = BTreeMap::new();
            let mut query = 0;
            for (step, during) in steps.iter().zip(during) {
                for i in 0..step.attend {
                    let visible = during.tokens.len() - (step.attend - 1 - i) as usize;
                    for (class, attention) in (0..).zip(&self.names.g.attention_classes) {
                        let oldest =
                            attention.sliding_window.map_or(0, |n| visible.saturating_sub(n as usize));
                        let tokens = (oldest as u32..).zip(during.tokens[oldest..visible].iter().copied());
                        let sinks = self.names.g.sinks;
                        let gone = sinks..sinks + during.evicted as u32;
                        let tokens: Vec<(u32, u64)> = tokens.filter(|(p, _)| !gone.contains(p)).collect();
                        for head in 0..self.names.g.query_heads {
                            expected.insert((class, query, head), tokens.clone());
                        }
                    }
                    query += 1;
                }
            }
            assert_eq!(seen, expected);
        }
        Ok(self.planner.commit(planned))
    }

    fn dropped_step(&mut self, steps: &[SequenceStep], tokens: &[u64]) {
        if let Ok(planned) = self.planner.plan_step(steps) {
            self.names.run(&planned.plan, tokens);
        }
    }

    fn truncate(&mut self, id: SequenceId, tokens: u32, before: &NaiveSequence, work: Work) -> Operation {
        let length = before.tokens.len() as u32;
        if let Some(gone) = before.first_gone(&self.rules()) {
            let error = self.planner.truncate(id, gone).map(|_| ()).unwrap_err();
            assert!(matches!(error, Error::TruncateIntoEvicted { got, .. } if got == gone), "{error}");
        }
        let beyond = self.planner.truncate(id, length + 1).map(|_| ()).unwrap_err();
        assert_eq!(beyond, Error::TruncateBeyondEnd { sequence: id, got: length + 1, tokens: length });
        let taken_back = self.planner.truncate(id, tokens).unwrap();
        self.planner.abandon(taken_back);
        assert_eq!(self.planner.tokens(id), Ok(length));
        let applied = self.planner.truncate(id, tokens).unwrap();
        self.carry_out(applied, work)
    }

    fn fork(&mut self, id: SequenceId, work: Work) -> Result<(SequenceId, Operation), Error> {
        let free = self.planner.free_pages();
        let (child, applied) = self.with_room(|planner| planner.fork(id))?;
        let plan = &applied.plan;
        // No page is taken but one for blocks of a page that is not full, which are copied: no page that either may extend is shared.
        let lengths = self.planner.view(id)?.lengths;
        let open = lengths.blocks % self.names.g.layout.blocks_per_page();
        assert_eq!(plan.block_copies.len() as u32, open.min(lengths.blocks - lengths.evicted));
        assert!(self.planner.free_pages() + u32::from(open > 0) >= free);
        Ok((child, self.carry_out(applied, work)))
    }

    fn reorder(&mut self, ids: &[SequenceId], parents: &[usize], work: Work) -> Result<Operation, Error> {
        let applied = self.with_room(|planner| planner.reorder(ids, parents))?;
        let mut used: Vec<usize> = parents.to_vec();
        used.sort_unstable();
        used.dedup();
        // Only repeats are copied.
        assert!(used.len() < parents.len() || applied.plan.is_empty());
        Ok(self.carry_out(applied, work))
    }

    fn save_and_load(&mut self, id: SequenceId) -> Result<SequenceId, Error> {
        let (sinks, blocks, window) = self.content(id);
        let lengths = self.planner.view(id)?.lengths;
        assert_eq!((lengths.blocks - lengths.evicted) as usize, blocks.len());
        let (loaded, applied) = self.with_room(|planner| planner.insert(lengths))?;
        let view = self.planner.view(loaded).unwrap();
        self.names.cells.extend(view.sinks.into_iter().zip(sinks));
        self.names.cells.extend(view.window.into_iter().zip(window));
        self.names.blocks.extend(view.blocks.into_iter().zip(blocks));
        self.planner.commit_applied(applied);
        Ok(loaded)
    }

    fn shrink(&mut self) {
        let (_, slabs) = self.planner.shrink_to_fit();
        for slab in slabs {
            assert_eq!(self.planner.geometry().slab_pages(slab), 0);
        }
        self.names.g = self.planner.geometry().clone();
    }

    fn free_pages(&self) -> u32 {
        self.planner.free_pages()
    }

    fn discard(&mut self, operation: Operation) -> Result<(), Error> {
        self.planner.discard(operation)
    }

    fn check(&mut self, model: &[(SequenceId, NaiveSequence)]) {
        let g = &self.names.g;
        let rules = self.rules();
        let mut ids: Vec<SequenceId> = model.iter().map(|(id, _)| *id).collect();
        ids.sort_unstable();
        assert_eq!(self.planner.sequences().collect::<Vec<_>>(), ids);
        let mut held = HashSet::new();
        let mut empty = 0;
        for (id, naive) in model {
            let view = self.planner.view(*id).unwrap();
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
            empty += usize::from(blocks == evicted && !blocks.is_multiple_of(g.layout.blocks_per_page()));
            held.extend(view.blocks.iter().map(|(slab, block)| (*slab, block / g.layout.blocks_per_page())));
        }
        // Every page is free or some sequence's, never both.
        let accounted = self.planner.free_pages() as usize + held.len();
        assert!((accounted..=accounted + empty).contains(&(g.pages() as usize)));
        let usage = self.planner.usage();
        let unpacked: usize = model.iter().map(|(_, naive)| naive.tokens.len() - naive.packed).sum();
        assert_eq!((usage.window_tokens + usage.sink_tokens) as usize, unpacked);
    }

    /// Forgets every cell and block that holds nothing of any sequence, as a GPU may after the next operation.
    fn poison(&mut self) {
        let mut slots = HashSet::new();
        let mut blocks = HashSet::new();
        for id in self.planner.sequences() {
            let view = self.planner.view(id).unwrap();
            slots.extend(view.sinks.into_iter().chain(view.window));
            blocks.extend(view.blocks);
        }
        self.names.cells.retain(|slot, _| slots.contains(slot));
        self.names.blocks.retain(|block, _| blocks.contains(block));
        assert_eq!(self.planner.usage().blocks as usize, blocks.len());
    }
}
