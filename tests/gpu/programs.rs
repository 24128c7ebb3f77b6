//! Random programs of every operation on the GPU, against the naive model that keeps every token: words, and
//! attention.

use crate::reference::NaiveSequence;
use crate::reference::contents::Contents;
use crate::reference::program::{Executor, Machine, Op, Work, program};
use crate::support::{POISON, decode, device, kernels, poison, poisoned_buffer, read_buffer, storage_buffer};
use kivi_wgpu::{
    Bits, CacheConfig, Dtype, Error, KvCache, KvCacheOptions, LayerIo, Operation, SequenceId, SequenceStep,
    Shape, Snapshot, Step, TensorFormat, TensorView, wgpu,
};
use proptest::test_runner::{Config, TestRunner};
use std::cell::RefCell;

/// A cache on the GPU, and what it should hold.
struct Gpu<'a> {
    cache: &'a mut KvCache,
    contents: Contents,
    operations: u32,
}

impl Gpu<'_> {
    fn encoder() -> wgpu::CommandEncoder {
        device().0.create_command_encoder(&Default::default())
    }

    fn submit(encoder: wgpu::CommandEncoder, work: Work) {
        if work == Work::Submitted {
            device().1.submit([encoder.finish()]);
        }
    }

    /// Records every layer of a step; `end` finishes it or does not. Returns the output buffers.
    fn record<T>(
        &mut self,
        encoder: &mut wgpu::CommandEncoder,
        steps: &[SequenceStep],
        [k, v, q]: &[Vec<f32>; 3],
        end: impl FnOnce(Step<'_>) -> T,
    ) -> Result<(T, Vec<wgpu::Buffer>), Error> {
        let buffers = [k, v, q].map(|x| storage_buffer(bytemuck::cast_slice(x)));
        let view = |b| TensorView::new(b, Dtype::F32);
        let outputs: Vec<_> =
            (0..self.contents.config.layers).map(|_| poisoned_buffer(q.len() * 4)).collect();
        let mut bindings = Vec::new();
        for out in &outputs {
            let io = {
                let mut io = LayerIo::default();
                io.k = (!k.is_empty()).then(|| view(&buffers[0]));
                io.v = (!v.is_empty()).then(|| view(&buffers[1]));
                io.q = (!q.is_empty()).then(|| view(&buffers[2]));
                io.out = (!q.is_empty()).then(|| view(out));
                io
            };
            bindings.push(self.cache.bind(&io)?);
        }
        let mut step = self.cache.begin_step(encoder, steps)?;
        for (layer, binding) in (0..).zip(&bindings) {
            step.layer(&mut *encoder, layer, binding)?;
        }
        Ok((end(step), outputs))
    }
}

impl Executor for Gpu<'_> {
    fn create(&mut self) -> Result<SequenceId, Error> {
        self.cache.create_sequence()
    }

    fn remove(&mut self, id: SequenceId, _: Work) -> Operation {
        self.cache.remove_sequence(id).unwrap()
    }

    fn step(
        &mut self,
        steps: &[SequenceStep],
        tokens: &[u64],
        during: &[NaiveSequence],
        work: Work,
    ) -> Result<Operation, Error> {
        let tensors = self.contents.tensors(steps, tokens);
        let mut encoder = Self::encoder();
        let (operation, outputs) =
            self.record(&mut encoder, steps, &tensors, |step| step.finish().unwrap())?;
        Self::submit(encoder, work);
        if work == Work::Submitted && !tensors[2].is_empty() {
            for out in &outputs {
                let out: Vec<f64> =
                    decode(&read_buffer(out), Dtype::F32).into_iter().map(f64::from).collect();
                self.contents.check_attention(steps, during, &tensors[2], &out, 4e-5);
            }
        }
        Ok(operation)
    }

    fn dropped_step(&mut self, steps: &[SequenceStep], tokens: &[u64]) {
        let tensors = self.contents.tensors(steps, tokens);
        let mut encoder = Self::encoder();
        if self.record(&mut encoder, steps, &tensors, |step| drop(step)).is_ok() {
            Self::submit(encoder, Work::Submitted);
        }
    }

    fn truncate(&mut self, id: SequenceId, tokens: u32, before: &NaiveSequence, work: Work) -> Operation {
        self.contents.truncate(before, tokens);
        let mut encoder = Self::encoder();
        let operation = self.cache.truncate(&mut encoder, id, tokens).unwrap();
        Self::submit(encoder, work);
        operation
    }

    fn fork(&mut self, id: SequenceId, work: Work) -> Result<(SequenceId, Operation), Error> {
        let mut encoder = Self::encoder();
        let done = self.cache.fork(&mut encoder, id)?;
        Self::submit(encoder, work);
        Ok(done)
    }

    fn reorder(&mut self, ids: &[SequenceId], parents: &[usize], work: Work) -> Result<Operation, Error> {
        let mut encoder = Self::encoder();
        let operation = self.cache.reorder(&mut encoder, ids, parents)?;
        Self::submit(encoder, work);
        Ok(operation)
    }

    fn save_and_load(&mut self, id: SequenceId) -> Result<SequenceId, Error> {
        let file = self.cache.submit_and_save_blocking(id)?.to_bytes()?;
        let mut encoder = Self::encoder();
        let (loaded, _) = self.cache.load(&mut encoder, &Snapshot::from_bytes(&file)?)?;
        Self::submit(encoder, Work::Submitted);
        Ok(loaded)
    }

    fn shrink(&mut self) {
        self.cache.shrink_to_fit();
        let memory = self.cache.memory();
        let [.., plan, _, _] = self.cache.buffers()[..] else {
            panic!("plan, staging and scratch come last")
        };
        let uploads = memory.plan - plan.size();
        let buffers: u64 = self.cache.buffers().iter().map(|b| b.size()).sum();
        assert_eq!(memory.total(), buffers + uploads, "{memory:?}");
    }

    fn free_pages(&self) -> u32 {
        self.cache.planner().free_pages(0)
    }

    fn discard(&mut self, operation: Operation) -> Result<(), Error> {
        self.cache.discard(operation)
    }

    fn check(&mut self, model: &[(SequenceId, NaiveSequence)]) {
        for (id, naive) in model {
            let expected = self.contents.state(naive);
            for layer in 0..self.contents.config.layers {
                let held = self.cache.submit_and_read_state_blocking(layer, *id).unwrap();
                assert!(held == expected, "layer {layer} of {id} differs");
            }
        }
    }

    /// Fills what no sequence holds with NaN, after every third operation.
    fn poison(&mut self) {
        self.operations += 1;
        if !self.operations.is_multiple_of(3) {
            return;
        }
        let g = self.cache.shape().first().clone();
        let mut slots = vec![false; g.unpacked_slots() as usize];
        let per_page = g.layout.blocks_per_page();
        let mut blocks: Vec<Vec<bool>> = self
            .cache
            .planner()
            .slab_pages(0)
            .iter()
            .map(|pages| vec![false; (pages * per_page) as usize])
            .collect();
        for id in self.cache.planner().sequences() {
            let view = self.cache.planner().view(0, id).unwrap();
            view.sinks.iter().chain(&view.window).for_each(|slot| slots[slot.index() as usize] = true);
            view.blocks.iter().for_each(|(slab, block)| blocks[*slab as usize][*block as usize] = true);
        }
        let fill = |buffer: &wgpu::Buffer, used: &[bool], bytes: u64, first: u64| {
            for run in used.chunk_by(|a, b| a == b) {
                let start = (run.as_ptr() as usize - used.as_ptr() as usize) as u64;
                if !run[0] {
                    let poison = POISON.to_le_bytes().repeat(run.len() * bytes as usize / 4);
                    device().1.write_buffer(buffer, (first + start) * bytes, &poison);
                }
            }
        };
        // In the order of `KvCache::buffers`: slabs by layer, rings by layer.
        let buffers = self.cache.buffers();
        let mut buffers = buffers.into_iter();
        for _ in &g.layers {
            for used in blocks.iter().filter(|used| !used.is_empty()) {
                fill(buffers.next().unwrap(), used, u64::from(g.layout.block_words()) * 4, 0);
            }
        }
        for ring in buffers.take(g.layers.len()) {
            let (token, all) = (u64::from(g.token_words()) * 4, u64::from(g.unpacked_slots()));
            fill(ring, &slots, token, 0);
            fill(ring, &slots, token, all);
        }
    }
}

/// Runs random programs on one cache: pipelines are built once. A program that fails is shrunk and printed;
/// put it into [`regressions`].
fn run_programs(config: CacheConfig, pages_per_slab: u64, cases: u32) {
    let page = Shape::new(&config).unwrap().layout.page_words() * 4;
    let config = config.with_max_slab_bytes(page * pages_per_slab);
    let (device, queue) = device();
    let options = KvCacheOptions::default().with_kernels(kernels());
    let cache = RefCell::new(KvCache::with_options_blocking(device, queue, &config, &options).unwrap());
    let run = |program: Vec<Op>| {
        let cache = &mut *cache.borrow_mut();
        for id in cache.planner().sequences().collect::<Vec<_>>() {
            cache.remove_sequence(id).unwrap();
        }
        poison(cache);
        Machine::new(&config, Gpu { cache, contents: Contents::new(&config), operations: 0 }).run(&program);
        Ok(())
    };
    for program in regressions() {
        run(program).unwrap();
    }
    let settings = Config { cases, failure_persistence: None, max_shrink_iters: 200, ..Config::default() };
    if let Err(error) = TestRunner::new(settings).run(&program(16), run) {
        panic!("{error}");
    }
}

/// Programs that once failed, or that walk along an edge.
fn regressions() -> Vec<Vec<Op>> {
    use Op::*;
    vec![
        // A sequence whose last page is shared with a fork is cut within that page; both go on.
        vec![Step(vec![(0, 100, 1)]); 5]
            .into_iter()
            .chain([
                Fork(0),
                Truncate(0, 500, 3),
                Step(vec![(0, 100, 2), (1, 60, 1)]),
                Step(vec![(0, 90, 2), (1, 60, 1)]),
            ])
            .collect(),
        // Beams right after a pack, with repeats.
        vec![
            Step(vec![(0, 100, 1)]),
            Step(vec![(0, 92, 1)]),
            Fork(0),
            Fork(0),
            Reorder(vec![0, 0, 0]),
            Step(vec![(0, 1, 1), (1, 2, 1), (2, 3, 1)]),
            Reorder(vec![2, 2, 1]),
            Step(vec![(0, 70, 1), (1, 2, 1), (2, 3, 1)]),
        ],
        // Cut to two sinks, to nothing, at a block's edge, and on.
        vec![
            Step(vec![(0, 100, 1)]),
            Step(vec![(0, 100, 1)]),
            Truncate(0, 10, 0),
            Step(vec![(0, 3, 1)]),
            Truncate(0, 0, 0),
            SaveAndLoad(0),
            Step(vec![(0, 90, 1)]),
            Step(vec![(0, 74, 1)]),
            Truncate(0, 700, 14),
            Step(vec![(0, 1, 1)]),
        ],
    ]
}

/// Slabs of two pages, so that copies go across slabs, and a pool that grows.
#[test]
fn programs_on_two_layers_with_sinks() {
    let config =
        CacheConfig::new(2, 4, 2, 64).with_residual_window(32).with_sink_tokens(4).with_max_step(100);
    run_programs(config.with_max_batch_tokens(300).with_max_sequences(4).with_capacity(300), 2, 120);
}

#[test]
fn programs_without_a_window() {
    let config = CacheConfig::new(1, 2, 1, 16).with_residual_window(0).with_group_size(16).with_max_step(60);
    let config =
        config.with_bits(Bits::Four, Bits::Eight).with_window_format(Dtype::F32).with_history_limit(150);
    let config = config.clone().with_formats(config.format.keys.with_rotation(), config.format.values);
    run_programs(config.with_max_batch_tokens(180).with_max_sequences(4).with_capacity(100), 1, 90);
}

#[test]
fn programs_of_long_steps() {
    let config =
        CacheConfig::new(1, 2, 2, 16).with_residual_window(20).with_group_size(128).with_max_step(300);
    let values = TensorFormat::new(Bits::Two).with_rotation().with_clipping().with_compact_parameters();
    let config =
        config.with_formats(TensorFormat::new(Bits::Sixteen), values).with_window_format(Dtype::Bf16);
    run_programs(config.with_max_batch_tokens(900).with_max_sequences(4).with_capacity(500), 3, 90);
}
