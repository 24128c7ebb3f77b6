//! What can go wrong around a cache: encoders that are thrown away, devices that are lost, memory that runs
//! out.

use crate::support::{Pair, Tensors, device, new_device};
use kivi_wgpu::oracle::{CpuCache, LayerInput};
use kivi_wgpu::{
    CacheConfig, Dtype, Error, KvCache, LayerBinding, LayerIo, SequenceStep, Snapshot, TensorView, wgpu,
};
use std::sync::Mutex;

fn config() -> CacheConfig {
    CacheConfig::new(2, 4, 2, 64)
        .with_residual_window(32)
        .with_max_step(100)
        .with_max_sequences(3)
        .with_capacity(600)
}

/// A device that a test may lose, and a binding of fixed tensors.
struct Doomed {
    device: wgpu::Device,
    queue: wgpu::Queue,
    cache: KvCache,
    binding: LayerBinding,
    data: Vec<f32>,
}

impl Doomed {
    fn new() -> Doomed {
        use wgpu::util::DeviceExt;
        let (device, queue) = new_device(wgpu::Limits::default());
        let cache = crate::support::new_cache(&device, &queue, &config()).unwrap();
        let data: Vec<f32> = (0..100 * 4 * 64).map(|i| ((i * 37) % 101) as f32 / 25.0 - 2.0).collect();
        let [k, v, q, out] = [0; 4].map(|_| {
            device.create_buffer_init(&wgpu::util::BufferInitDescriptor {
                label: None,
                contents: bytemuck::cast_slice(&data),
                usage: wgpu::BufferUsages::STORAGE,
            })
        });
        let view = |b| TensorView::new(b, Dtype::F32);
        let binding = cache.bind(&LayerIo::new(view(&k), view(&v), view(&q), view(&out))).unwrap();
        Doomed { device, queue, cache, binding, data }
    }

    fn encoder(&self) -> wgpu::CommandEncoder {
        self.device.create_command_encoder(&Default::default())
    }

    fn step(&mut self, steps: &[SequenceStep]) -> Result<(), Error> {
        let mut encoder = self.encoder();
        let mut step = self.cache.begin_step(&mut encoder, steps)?;
        for layer in 0..2 {
            step.layer(&mut encoder, layer, &self.binding)?;
        }
        step.finish()?;
        self.queue.submit([encoder.finish()]);
        Ok(())
    }
}

/// A step that was finished, and whose encoder was neither submitted nor discarded, leaves words in its own
/// sequence that were never written. Nothing else is touched: the others go on, and the sequence can be
/// dropped and begun anew.
#[test]
fn an_encoder_that_is_forgotten_harms_its_own_sequence_only() {
    let mut pair = Pair::new(&config());
    let (a, b) = (pair.create_sequence(), pair.create_sequence());
    pair.fill(a, 150);
    pair.fill(b, 230);
    {
        let steps = [SequenceStep::append(b, 100)];
        let tensors = pair.tensors(&steps);
        let mut encoder = device().0.create_command_encoder(&Default::default());
        pair.record(&mut encoder, &steps, &tensors);
    }
    pair.step(&[SequenceStep::extend(a, 40)]);
    pair.check_state(a);
    pair.remove(b);
    let b = pair.create_sequence();
    pair.fill(b, 300);
    pair.step(&[SequenceStep::extend(a, 10), SequenceStep::extend(b, 10)]);
    pair.check_state(a);
    pair.check_state(b);
}

/// What was recorded before an operation that is discarded stays.
#[test]
fn forks_and_truncations_that_are_discarded_leave_no_trace() {
    let mut pair = Pair::new(&config());
    let s = pair.create_sequence();
    pair.fill(s, 300);
    let before = pair.gpu.memory();
    let mut encoder = device().0.create_command_encoder(&Default::default());
    let (fork, forked) = pair.gpu.fork(&mut encoder, s).unwrap();
    let cut = pair.gpu.truncate(&mut encoder, s, 77).unwrap();
    let swapped = pair.gpu.reorder(&mut encoder, &[s, fork], &[1, 1]).unwrap();
    drop(encoder);
    for operation in [swapped, cut, forked] {
        pair.gpu.discard(operation).unwrap();
    }
    assert_eq!(pair.gpu.tokens(fork), Err(Error::UnknownSequence(fork)));
    assert_eq!(pair.gpu.memory().all_layers(), before.all_layers());
    pair.check_state(s);
    pair.step(&[SequenceStep::extend(s, 60)]);
    pair.check_state(s);
}

/// When memory runs out while the pool grows, at whichever buffer, the step is refused and everything is as
/// before; later it succeeds.
#[test]
fn growth_that_fails_changes_nothing() {
    let mut pair = Pair::new(&config());
    let s = pair.create_sequence();
    let steps = [SequenceStep::append(s, 100)];
    while pair.gpu.planner().plan_step(&steps).is_ok() {
        pair.fill(s, 100);
    }
    let before = pair.gpu.memory();
    let mut refused = 0;
    for extra in (0..).step_by(1_000) {
        pair.gpu.set_memory_limit(Some(pair.gpu.memory().total() + extra));
        let mut encoder = device().0.create_command_encoder(&Default::default());
        let refusal = pair.gpu.begin_step(&mut encoder, &steps).map(drop);
        pair.gpu.set_memory_limit(None);
        let Err(error) = refusal else { break };
        assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
        refused += 1;
        assert_eq!(pair.gpu.memory().all_layers(), before.all_layers());
        pair.check_state(s);
        pair.step(&[SequenceStep::attend(s, 3)]);
    }
    assert!(refused >= 2, "{refused}: every layer's slab can fail");
    // The usual growth is more than the step needs; where only that fails, the step goes on with less.
    pair.fill(s, 1500);
    while pair.gpu.planner().plan_step(&steps).is_ok() {
        pair.fill(s, 100);
    }
    let pages = pair.gpu.planner().pool_size(0).pages;
    // As little memory as the step can do with.
    let total = pair.gpu.memory().total();
    let enough = (total..).step_by(1_000).find(|limit| {
        pair.gpu.set_memory_limit(Some(*limit));
        let mut encoder = device().0.create_command_encoder(&Default::default());
        pair.gpu.begin_step(&mut encoder, &steps).is_ok()
    });
    assert!(enough > Some(total));
    assert_eq!(pair.gpu.planner().pool_size(0).pages, pages + 1);
    pair.gpu.set_memory_limit(None);
    pair.fill(s, 300);
    pair.step(&[SequenceStep::decode(s)]);
    pair.check_state(s);
}

/// A device that is lost at any point: typed errors or silence, never a panic; what was saved continues on
/// another device, bit for bit.
#[test]
fn a_lost_device_is_an_error_and_a_snapshot_survives_it() {
    let mut doomed = Doomed::new();
    let mut oracle = CpuCache::with_id(&config(), doomed.cache.id()).unwrap();
    let s = doomed.cache.create_sequence().unwrap();
    oracle.create_sequence().unwrap();
    let both = |doomed: &mut Doomed, oracle: &mut CpuCache, s, n: u32| {
        let steps = [SequenceStep::append(s, n)];
        doomed.step(&steps).unwrap();
        let input = LayerInput { k: &doomed.data, v: &doomed.data, ..Default::default() };
        oracle.step(&steps, &[input, input]).unwrap();
    };
    for n in [100, 100, 57] {
        both(&mut doomed, &mut oracle, s, n);
    }
    let file = doomed.cache.submit_and_save_blocking(s).unwrap().to_bytes().unwrap();
    assert!(file == oracle.save(s).unwrap().to_bytes().unwrap(), "the oracle's file");

    // In the middle of a step.
    let mut encoder = doomed.encoder();
    let mut step = doomed.cache.begin_step(&mut encoder, &[SequenceStep::extend(s, 100)]).unwrap();
    step.layer(&mut encoder, 0, &doomed.binding).unwrap();
    doomed.device.destroy();
    step.layer(&mut encoder, 1, &doomed.binding).unwrap();
    let operation = step.finish().unwrap();
    doomed.queue.submit([encoder.finish()]);
    doomed.cache.discard(operation).unwrap();
    assert_eq!(doomed.cache.tokens(s), Ok(257));

    let device_error = |error: Error| match error {
        Error::Device(_) | Error::OutOfMemory { .. } => {}
        other => panic!("{other}"),
    };
    // Every operation fails with a type or does only what the host's side of it is.
    for _ in 0..4 {
        if let Err(error) = doomed.step(&[SequenceStep::extend(s, 100)]) {
            device_error(error);
        }
        let mut encoder = doomed.encoder();
        if let Err(error) = doomed.cache.fork(&mut encoder, s) {
            device_error(error);
        }
        let tokens = doomed.cache.tokens(s).unwrap();
        if let Err(error) = doomed.cache.truncate(&mut encoder, s, tokens / 2) {
            device_error(error);
        }
    }
    device_error(doomed.cache.submit_and_save_blocking(s).unwrap_err());
    device_error(doomed.cache.submit_and_read_state_blocking(0, s).unwrap_err());
    let snapshot = Snapshot::from_bytes(&file).unwrap();
    let mut encoder = doomed.encoder();
    if let Err(error) = doomed.cache.load(&mut encoder, &snapshot) {
        device_error(error);
    }
    doomed.cache.remove_sequence(s).unwrap();
    doomed.cache.shrink_to_fit();
    let Doomed { device, queue, .. } = &doomed;
    if let Err(error) = crate::support::new_cache(device, queue, &config()) {
        device_error(error);
    }

    // Rebuilt on another device.
    let mut rebuilt = Doomed::new();
    let mut encoder = rebuilt.encoder();
    let (loaded, _) = rebuilt.cache.load(&mut encoder, &snapshot).unwrap();
    rebuilt.queue.submit([encoder.finish()]);
    let (own, _) = oracle.load(&snapshot).unwrap();
    let steps = |s| [SequenceStep::append(s, 100)];
    rebuilt.step(&steps(loaded)).unwrap();
    let input = LayerInput { k: &rebuilt.data, v: &rebuilt.data, ..Default::default() };
    oracle.step(&steps(own), &[input, input]).unwrap();
    for layer in 0..2 {
        let state = rebuilt.cache.submit_and_read_state_blocking(layer, loaded).unwrap();
        assert!(state == oracle.state(layer, own).unwrap(), "layer {layer}");
    }
}

/// Two caches whose steps alternate in one encoder.
#[test]
fn two_caches_on_one_device() {
    let mut a = Pair::new(&config());
    let mut b = Pair::new(&config().with_group_size(16));
    let (s, t) = (a.create_sequence(), b.create_sequence());
    for n in [100, 7, 60] {
        let (device, queue) = device();
        let mut encoder = device.create_command_encoder(&Default::default());
        for _ in 0..2 {
            for (pair, sequence) in [(&mut a, s), (&mut b, t)] {
                let steps = [SequenceStep::extend(sequence, n)];
                let tensors = pair.tensors(&steps);
                pair.record(&mut encoder, &steps, &tensors);
            }
        }
        queue.submit([encoder.finish()]);
        a.check_state(s);
        b.check_state(t);
    }
    // A binding serves the cache that made it.
    let tensors: Vec<Tensors> = a.tensors(&[SequenceStep::decode(s)]);
    let k = crate::support::storage_buffer(bytemuck::cast_slice(&tensors[0].k));
    let v = crate::support::storage_buffer(bytemuck::cast_slice(&tensors[0].v));
    let view = |b| TensorView::new(b, Dtype::F32);
    let foreign = a.gpu.bind(&LayerIo::append(view(&k), view(&v))).unwrap();
    let mut encoder = device().0.create_command_encoder(&Default::default());
    let mut step = b.gpu.begin_step(&mut encoder, &[SequenceStep::append(t, 1)]).unwrap();
    assert_eq!(step.layer(&mut encoder, 0, &foreign), Err(Error::ForeignBinding));
}

/// One cache, two threads in turn, each with a sequence of its own.
#[test]
fn a_cache_used_from_two_threads_in_turn() {
    let mut pair = Pair::new(&config());
    let sequences = [pair.create_sequence(), pair.create_sequence()];
    let pair = Mutex::new(pair);
    let same_device = crate::support::same_device();
    std::thread::scope(|scope| {
        for s in sequences {
            let pair = &pair;
            scope.spawn(move || {
                same_device();
                for n in [50, 1, 100, 3, 64] {
                    let mut pair = pair.lock().unwrap();
                    pair.step(&[SequenceStep::extend(s, n)]);
                    let fork = pair.fork(s);
                    pair.remove(fork);
                }
            });
        }
    });
    let pair = pair.into_inner().unwrap();
    for s in sequences {
        assert_eq!(pair.gpu.tokens(s), Ok(218));
        pair.check_state(s);
    }
}
