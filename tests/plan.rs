//! The plan alone, against the naive model: random programs of operations on sequences whose tokens are only names.

mod reference;

use kivi_wgpu::plan::{
    AttendItem, FoldSplit, PlannedStep, Planner, Round, SequenceId, SequenceStep, Slot, StepPlan,
};
use kivi_wgpu::{CacheConfig, Error, Geometry, LayerAttention, Operation};
use proptest::prelude::*;
use reference::{NaiveSequence, Rules};
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
        let lists = plan.slots.len() + 2 * plan.writes.len() + 2 * plan.packs.len() + 6 * plan.tiles.len();
        let attention = 5 * plan.items.len() + 3 * plan.splits.len() + 5 * plan.runs.len();
        let passes_of = |round: &Round| 2 + round.history.len() + round.fold.len();
        let passes = 1 + plan.rounds.iter().map(passes_of).sum::<usize>() + 2 * plan.pack_slabs.len();
        let bytes = 4 * (lists + attention) + 256 * passes;
        assert!(bytes as u64 <= self.g.plan_bytes(), "{bytes} bytes of plan, {}", self.g.plan_bytes());

        let seen = self.attend(plan);
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
                    for (i, partial) in parts.keys().enumerate() {
                        assert_eq!(*partial, tile.first_partial + i as u32 * round.row_tile);
                    }
                    parts.into_values().collect()
                } else {
                    assert_eq!(tile.splits, 1);
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
                let block = split.source * self.g.layout.blocks_per_page() + i / group;
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

    /// The parts of a tile with one partial, in the order in which they extend it, which is that of positions.
    fn fold_parts(&self, plan: &StepPlan, round: &Round, tile: u32) -> Vec<Vec<(u32, u64)>> {
        assert!(round.history.is_empty() && round.window.is_empty());
        let mut parts: Vec<Vec<(u32, u64)>> = Vec::new();
        for pass in &round.fold {
            let runs = &plan.runs[pass.runs.start as usize..pass.runs.end as usize];
            for run in runs.iter().filter(|run| run.tile == tile) {
                assert_eq!(run.partial, plan.tiles[tile as usize].first_partial);
                assert_eq!(run.fresh, parts.is_empty());
                for split in &plan.splits[run.splits.start as usize..run.splits.end as usize] {
                    assert!(parts.last().is_none_or(|last| last[last.len() - 1].0 < split.first_position));
                    parts.push(self.split_tokens(plan, pass.slab, split));
                }
            }
        }
        parts
    }

    /// Forgets every cell that holds nothing of any sequence, as a GPU may after the next step.
    fn forget_stale(&mut self, planner: &Planner) {
        let mut live = HashSet::new();
        for id in planner.sequences() {
            let view = planner.view(id).unwrap();
            live.extend(view.sinks.into_iter().chain(view.window));
        }
        self.cells.retain(|slot, _| live.contains(slot));
    }
}

#[derive(Debug, Clone)]
enum Op {
    Create,
    /// A removal; some are taken back, after a step of another sequence was begun and dropped.
    Remove(usize, u32),
    /// (sequence, tokens, queries)
    Step(Vec<(usize, u32, u32)>),
    /// A step that is recorded and submitted, and never finished.
    Dropped(usize, u32),
    /// Finished steps whose encoders are thrown away, then discarded newest first.
    Discarded(Vec<(usize, u32)>),
}

fn op() -> impl Strategy<Value = Op> {
    let tokens =
        || prop_oneof![3 => Just(1u32), 2 => 0u32..40, 2 => 0u32..200, 1 => Just(128u32), 1 => Just(160u32)];
    prop_oneof![
        1 => Just(Op::Create),
        1 => (any::<usize>(), 0u32..400).prop_map(|(s, n)| Op::Remove(s, n)),
        10 => prop::collection::vec((any::<usize>(), tokens(), prop_oneof![0u32..9, 0u32..60]), 1..4).prop_map(Op::Step),
        2 => (any::<usize>(), tokens()).prop_map(|(s, n)| Op::Dropped(s, n)),
        2 => prop::collection::vec((any::<usize>(), tokens()), 1..4).prop_map(Op::Discarded),
    ]
}

fn config() -> impl Strategy<Value = CacheConfig> {
    let window = prop_oneof![Just(0u32), Just(1), Just(32), Just(128), 0u32..140];
    let group = prop_oneof![Just(16u32), Just(32), Just(64), Just(128)];
    let sinks = prop_oneof![Just(0u32), Just(4), 0u32..300];
    let scratch = prop_oneof![Just(1u64), 1u64..100_000, Just(16 << 20)];
    let heads = (1u32..4, 1u32..17);
    (window, group, sinks, 1u32..4, prop_oneof![Just(200u32), 1u32..300], 1u32..3, heads, scratch).prop_map(
        |(window, group, sinks, sequences, max_step, pages, (kv_heads, ratio), scratch)| {
            let sliding = LayerAttention {
                sliding_window: Some(1 + window * 3 / 2),
                soft_cap: None,
                ..Default::default()
            };
            let base = CacheConfig::new(2, kv_heads * ratio, kv_heads, 16)
                .with_layer_attention(vec![LayerAttention::default(), sliding])
                .with_max_scratch_bytes(scratch)
                .with_residual_window(window)
                .with_group_size(group)
                .with_sink_tokens(sinks)
                .with_max_sequences(sequences)
                .with_max_step(max_step)
                .with_max_batch_tokens(3 * max_step)
                .with_capacity(2000);
            let page = Geometry::new(&base, 128 << 20).unwrap().layout.page_words() * 4;
            base.with_max_slab_bytes(page * u64::from(pages))
        },
    )
}

struct Run {
    rules: Rules,
    planner: Planner,
    names: Names,
    /// The naive model of each sequence.
    model: Vec<(SequenceId, NaiveSequence)>,
    next_name: u64,
}

impl Run {
    fn new(config: &CacheConfig) -> Run {
        let g = Geometry::new(config, 128 << 20).unwrap();
        Run {
            rules: Rules::of(config),
            planner: Planner::new(g.clone()),
            names: Names { g, cells: HashMap::new(), blocks: HashMap::new() },
            model: Vec::new(),
            next_name: 0,
        }
    }

    fn fresh(&mut self, n: u32) -> Vec<u64> {
        let first = self.next_name;
        self.next_name += u64::from(n);
        (first..self.next_name).collect()
    }

    /// The step that the planner takes, within its limits; `None` if there is nothing to do or no room.
    fn plan(&self, wanted: &[(usize, u32, u32)]) -> Option<(Vec<SequenceStep>, PlannedStep)> {
        let mut steps: Vec<SequenceStep> = Vec::new();
        for &(which, tokens, queries) in wanted {
            let Some((id, naive)) = self.model.get(which % self.model.len().max(1)) else { continue };
            let append = tokens.min(self.names.g.max_step);
            let attend = queries.min(naive.tokens.len() as u32 + append).min(self.names.g.max_step);
            if steps.iter().all(|s| s.sequence != *id) {
                steps.push(SequenceStep { sequence: *id, append, attend });
            }
        }
        match self.planner.plan_step(&steps) {
            Ok(planned) => Some((steps, planned)),
            Err(Error::EmptyStep | Error::CapacityExceeded { .. }) => None,
            Err(error) => panic!("{error}"),
        }
    }

    fn execute(&mut self, steps: &[SequenceStep], plan: &StepPlan, input: &[u64]) {
        let seen = self.names.run(plan, input);
        let mut expected = BTreeMap::new();
        let (mut row, mut query) = (0, 0);
        for step in steps {
            let (_, naive) = self.model.iter().find(|(id, _)| *id == step.sequence).unwrap();
            let mut during = naive.clone();
            during.enter(input[row..row + step.append as usize].iter().copied());
            row += step.append as usize;
            for i in 0..step.attend {
                let visible = during.tokens.len() - (step.attend - 1 - i) as usize;
                for (class, attention) in (0..).zip(&self.names.g.attention_classes) {
                    let oldest = attention.sliding_window.map_or(0, |n| visible.saturating_sub(n as usize));
                    let tokens = (oldest as u32..).zip(during.tokens[oldest..visible].iter().copied());
                    let tokens: Vec<(u32, u64)> = tokens.collect();
                    for head in 0..self.names.g.query_heads {
                        expected.insert((class, query, head), tokens.clone());
                    }
                }
                query += 1;
            }
        }
        assert_eq!(seen, expected);
    }

    /// Sinks, blocks and window of a sequence, as read through the planner's view.
    fn content(&self, which: usize) -> (Vec<u64>, Vec<Vec<u64>>, Vec<u64>) {
        let view = self.planner.view(self.model[which].0).unwrap();
        let read = |slots: &[Slot]| slots.iter().map(|&s| self.names.read(s)).collect::<Vec<_>>();
        let blocks = view.blocks.iter().map(|b| self.names.blocks[b].clone()).collect();
        (read(&view.sinks), blocks, read(&view.window))
    }

    fn check(&self) {
        for (which, (id, naive)) in self.model.iter().enumerate() {
            let view = self.planner.view(*id).unwrap();
            assert_eq!(view.tokens as usize, naive.tokens.len());
            let (sinks, blocks, tokens) = self.content(which);
            assert_eq!(sinks, naive.sinks(&self.rules));
            assert_eq!(blocks, naive.blocks(&self.rules));
            assert_eq!(tokens, naive.window(&self.rules));
            // The window's bounds.
            let window = view.window.len() as u32;
            assert!(window <= self.names.g.held_tokens());
            assert!(view.blocks.is_empty() || window >= self.names.g.window);
        }
    }

    fn apply(&mut self, op: &Op) {
        match op {
            Op::Create => match self.planner.create_sequence() {
                Ok(id) => self.model.push((id, NaiveSequence::default())),
                Err(Error::TooManySequences { max }) => assert_eq!(self.model.len(), max as usize),
                Err(error) => panic!("{error}"),
            },
            Op::Remove(which, tokens) => {
                if !self.model.is_empty() {
                    let (id, naive) = self.model.remove(which % self.model.len());
                    let operation = self.planner.remove_sequence(id).unwrap();
                    assert_eq!(self.planner.tokens(id), Err(Error::UnknownSequence(id)));
                    // Every other removal is taken back, and what another sequence's dropped step wrote in between did no harm: the removed
                    // sequence's pages are handed out last.
                    if which % 2 == 0 {
                        let room = self.planner.free_pages() > 8;
                        if room {
                            self.apply(&Op::Dropped(*which, *tokens));
                        }
                        self.planner.discard(operation).unwrap();
                        self.model.push((id, naive));
                    }
                }
            }
            Op::Step(wanted) => {
                if let Some((steps, planned)) = self.plan(wanted) {
                    let input = self.fresh(planned.plan.tokens);
                    self.execute(&steps, &planned.plan.clone(), &input);
                    self.planner.commit(planned);
                    let mut rest = &input[..];
                    for step in &steps {
                        let (tokens, tail) = rest.split_at(step.append as usize);
                        rest = tail;
                        let (_, naive) = self.model.iter_mut().find(|(id, _)| *id == step.sequence).unwrap();
                        naive.enter(tokens.iter().copied());
                        naive.pack(&self.rules);
                    }
                    self.check();
                    self.names.forget_stale(&self.planner);
                }
            }
            Op::Dropped(which, tokens) => {
                if let Some((_, planned)) = self.plan(&[(*which, *tokens, 1)]) {
                    let input = self.fresh(planned.plan.tokens);
                    self.names.run(&planned.plan, &input);
                }
            }
            Op::Discarded(wanted) => {
                let mut operations: Vec<Operation> = Vec::new();
                for &(which, tokens) in wanted {
                    if let Some((_, planned)) = self.plan(&[(which, tokens, 0)]) {
                        operations.push(self.planner.commit(planned));
                    }
                }
                if let [first, .., _] = operations[..] {
                    assert!(matches!(self.planner.discard(first), Err(Error::NotLatest { .. })));
                }
                for operation in operations.into_iter().rev() {
                    self.planner.discard(operation).unwrap();
                }
            }
        }
        self.check();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn programs_agree_with_the_naive_model(config in config(), program in prop::collection::vec(op(), 1..40)) {
        let mut run = Run::new(&config);
        run.apply(&Op::Create);
        for op in &program {
            run.apply(op);
        }
    }

    /// `capacity` tokens fit however they are spread over the sequences.
    #[test]
    fn the_capacity_holds_for_any_spread(config in config(), parts in prop::collection::vec(0u32..2000, 3)) {
        let sequences = config.max_sequences as usize;
        let mut run = Run::new(&config);
        let mut left = config.capacity;
        for (i, part) in parts.into_iter().take(sequences).enumerate() {
            let sequence = run.planner.create_sequence().unwrap();
            let mut tokens = if i + 1 == sequences { left } else { part.min(left) };
            left -= tokens;
            while tokens > 0 {
                let n = tokens.min(config.max_step);
                let step = SequenceStep::append(sequence, n);
                let planned = run.planner.plan_step(&[step]).unwrap();
                run.planner.commit(planned);
                tokens -= n;
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    /// Any split of N tokens into steps leaves the same tokens in the same blocks.
    #[test]
    fn steps_of_any_length_leave_the_same_state(config in config(), chunks in prop::collection::vec(1u32..200, 1..12)) {
        let config = config.with_capacity(4000);
        let mut chunked = Run::new(&config);
        chunked.apply(&Op::Create);
        let max_step = chunked.names.g.max_step;
        let mut tokens = 0;
        for n in chunks {
            let n = n.min(max_step);
            chunked.apply(&Op::Step(vec![(0, n, n.min(20))]));
            tokens += n;
        }
        let mut single = Run::new(&config);
        single.apply(&Op::Create);
        for _ in 0..tokens {
            single.apply(&Op::Step(vec![(0, 1, 1)]));
        }
        prop_assert_eq!(&chunked.model, &single.model);
        prop_assert_eq!(chunked.content(0), single.content(0));
    }
}

/// Lengths at which something happens for the first time, with exact counts of unpacked tokens.
#[test]
fn the_window_at_every_length() {
    let config = CacheConfig::new(1, 1, 1, 64).with_sink_tokens(4);
    let mut run = Run::new(&config.with_capacity(1000));
    run.apply(&Op::Create);
    for length in 1..=700usize {
        run.apply(&Op::Step(vec![(0, 1, 1)]));
        let view = run.planner.view(run.model[0].0).unwrap();
        let after_sinks = length.saturating_sub(4);
        let blocks = if after_sinks >= 160 { (after_sinks - 128) / 32 } else { 0 };
        assert_eq!((view.sinks.len(), view.blocks.len()), (length.min(4), blocks));
        assert_eq!(view.window.len(), after_sinks - 32 * blocks);
    }
}
