//! The life of a cache: batches that lose rows, growth, rollback, what it takes of the device's memory.

use crate::support::{Pair, Tensors, device, kernels, new_device};
use kivi_wgpu::{
    CacheConfig, Dtype, Error, KvCache, KvCacheOptions, LayerIo, SelfTest, SequenceId, SequenceStep,
    TensorView, Variant, wgpu,
};

fn config() -> CacheConfig {
    CacheConfig::new(2, 4, 2, 64).with_residual_window(32).with_max_step(100).with_capacity(2000)
}

/// A device of its own, with tensors for steps of up to 100 tokens, so that its buffers can be counted.
struct Host {
    device: wgpu::Device,
    queue: wgpu::Queue,
    /// Keys, values, queries, output.
    tensors: [wgpu::Buffer; 4],
}

impl Host {
    fn new() -> Host {
        let (device, queue) = new_device(wgpu::Limits::default());
        let tensor = |heads: u64| {
            device.create_buffer(&wgpu::BufferDescriptor {
                label: None,
                size: 100 * heads * 64 * 4,
                usage: wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_DST,
                mapped_at_creation: false,
            })
        };
        let tensors = [tensor(2), tensor(2), tensor(4), tensor(4)];
        // What wgpu itself needs at first is gone after that.
        queue.submit([]);
        device.poll(wgpu::PollType::wait_indefinitely()).unwrap();
        Host { tensors, device, queue }
    }

    fn cache(&self, config: &CacheConfig) -> KvCache {
        let options =
            KvCacheOptions::default().with_variant(Variant::Portable).with_self_test(SelfTest::Words);
        KvCache::with_options_blocking(&self.device, &self.queue, config, &options).unwrap()
    }

    fn step(&self, cache: &mut KvCache, steps: &[SequenceStep]) -> Result<(), Error> {
        let [k, v, q, out] = self.tensors.each_ref().map(|b| TensorView::new(b, Dtype::F32));
        let binding = cache.bind(&LayerIo::new(k, v, q, out))?;
        let mut encoder = self.device.create_command_encoder(&Default::default());
        let mut step = cache.begin_step(&mut encoder, steps)?;
        for layer in 0..2 {
            step.layer(&mut encoder, layer, &binding)?;
        }
        step.finish()?;
        self.queue.submit([encoder.finish()]);
        drop(binding);
        self.device.poll(wgpu::PollType::wait_indefinitely()).unwrap();
        Ok(())
    }

    /// Buffers that the device has.
    fn buffers(&self) -> isize {
        self.device.get_internal_counters().hal.buffers.read()
    }
}

/// The same random tokens for a sequence whichever batch it is in.
fn rows(pair: &mut Pair, batch: &[(SequenceId, u32)]) -> Vec<Vec<Tensors>> {
    let steps = |s: SequenceId, n: u32| [SequenceStep::extend(s, n)];
    batch.iter().map(|&(s, n)| pair.tensors(&steps(s, n))).collect()
}

/// One step of a batch; returns the outputs of each row, layer after layer.
fn batch_step(pair: &mut Pair, batch: &[(SequenceId, u32)], rows: &[Vec<Tensors>]) -> Vec<Vec<f32>> {
    let steps: Vec<_> = batch.iter().map(|&(s, n)| SequenceStep::extend(s, n)).collect();
    let join = |layer: usize, part: fn(&Tensors) -> &Vec<f32>| {
        rows.iter().flat_map(|row| part(&row[layer]).clone()).collect::<Vec<f32>>()
    };
    let joined: Vec<Tensors> = (0..2)
        .map(|l| Tensors { k: join(l, |t| &t.k), v: join(l, |t| &t.v), q: join(l, |t| &t.q) })
        .collect();
    let outputs = pair.step_with(&steps, &joined);
    let mut first = 0;
    let row = |(_, n): &(SequenceId, u32)| {
        let size = (n * 4 * 64) as usize;
        first += size;
        outputs.iter().flat_map(|out| out[first - size..first].to_vec()).collect()
    };
    batch.iter().map(row).collect()
}

/// Whichever row leaves a batch, the longest too, the others' outputs stay as they are, bit for bit.
#[test]
fn a_row_that_leaves_changes_no_other() {
    let lengths = [700, 33, 160, 400];
    for leaving in 0..lengths.len() {
        let mut whole = Pair::new(&config().with_max_sequences(4).with_max_batch_tokens(400));
        let mut less = Pair::new(&config().with_max_sequences(4).with_max_batch_tokens(400));
        let ids: Vec<SequenceId> = lengths.iter().map(|_| whole.create_sequence()).collect();
        let own: Vec<SequenceId> = lengths.iter().map(|_| less.create_sequence()).collect();
        for ((&s, &t), length) in ids.iter().zip(&own).zip(lengths) {
            whole.fill(s, length);
            less.fill(t, length);
        }
        less.remove(own[leaving]);
        for n in [1, 40, 1] {
            let batch: Vec<_> = ids.iter().map(|s| (*s, n)).collect();
            let tensors = rows(&mut whole, &batch);
            let mut expected = batch_step(&mut whole, &batch, &tensors);
            expected.remove(leaving);
            let kept = |i: &usize| *i != leaving;
            let batch: Vec<_> = (0..4).filter(kept).map(|i| (own[i], n)).collect();
            let tensors: Vec<_> =
                tensors.into_iter().enumerate().filter(|(i, _)| kept(i)).map(|(_, t)| t).collect();
            assert!(batch_step(&mut less, &batch, &tensors) == expected, "without {leaving}, {n} tokens");
        }
        for i in (0..4).filter(|i| *i != leaving) {
            less.check_state(own[i]);
            whole.check_state(ids[i]);
            let state = |pair: &Pair, s| pair.gpu.submit_and_read_state_blocking(1, s).unwrap();
            assert!(state(&less, own[i]) == state(&whole, ids[i]), "row {i}");
        }
    }
}

/// A pool that starts too small gives the same bits as one that was large enough.
#[test]
fn growth_changes_nothing_but_memory() {
    let page = kivi_wgpu::Shape::new(&config()).unwrap().layout.page_words() * 4;
    for slab_pages in [1, 3, 100] {
        let mut grown = Pair::new(&config().with_capacity(1).with_max_slab_bytes(slab_pages * page));
        let mut large = Pair::new(&config().with_capacity(3000));
        let s = grown.create_sequence();
        let t = large.create_sequence();
        assert_eq!(grown.gpu.planner().pool_size(0).pages, 0);
        let mut both = |append, attend| {
            let steps = [s, t].map(|sequence| [SequenceStep::new(sequence, append, attend)]);
            let tensors = grown.tensors(&steps[0]);
            assert!(grown.step_with(&steps[0], &tensors) == large.step_with(&steps[1], &tensors));
        };
        (0..20).for_each(|_| both(100, 9));
        both(1, 1);
        grown.check_state(s);
        let pages = grown.gpu.planner().slab_pages(0);
        assert!(pages.iter().all(|n| u64::from(*n) <= slab_pages), "{pages:?}");
        assert!(pages.iter().sum::<u32>() <= 12, "{pages:?}");
        grown.remove(s);
        grown.gpu.shrink_to_fit();
        assert_eq!(grown.gpu.planner().pool_size(0).pages, 0);
        assert_eq!(grown.gpu.memory().all_layers().slack, 2 * grown.gpu.shape().first().unpacked_bytes());
    }
}

/// Slabs are the only buffers that steps and operations create, besides a longer plan and a larger scratch
/// when the pool grows.
#[test]
fn steps_create_no_buffers() {
    let host = Host::new();
    let own = host.buffers();
    let mut cache = host.cache(&config().with_capacity(300).with_max_sequences(3));
    let s = cache.create_sequence().unwrap();
    host.step(&mut cache, &[SequenceStep::extend(s, 3)]).unwrap();
    let (mut known, mut slabs) = (host.buffers(), cache.planner().pool_size(0).slabs);
    let mut grown = 0;
    for round in 0..120u32 {
        let step = [SequenceStep::new(s, 1 + round % 60, 1 + round % 12)];
        host.step(&mut cache, &step).unwrap();
        let mut encoder = host.device.create_command_encoder(&Default::default());
        let (fork, _) = cache.fork(&mut encoder, s).unwrap();
        let tokens = cache.tokens(s).unwrap();
        cache.truncate(&mut encoder, s, tokens.saturating_sub(40 * (round % 2))).unwrap();
        cache.reorder(&mut encoder, &[s, fork], &[0, 0]).unwrap();
        host.queue.submit([encoder.finish()]);
        cache.remove_sequence(fork).unwrap();
        host.device.poll(wgpu::PollType::wait_indefinitely()).unwrap();
        let (now, slabs_now) = (host.buffers(), cache.planner().pool_size(0).slabs);
        // Each layer gets its slabs, and nothing else remains: plan, scratch and uploads take the place of
        // the old.
        let new = isize::try_from(2 * (slabs_now - slabs)).unwrap();
        grown += new;
        assert_eq!(now, known + new, "in round {round}");
        (known, slabs) = (now, slabs_now);
    }
    assert!(grown > 0, "the pool has grown");
    let memory = cache.memory();
    // Everything that the cache has created, and nothing else, is in the report: uploads are the plan's
    // besides its own buffer.
    let buffers = cache.buffers();
    assert_eq!(known - own, isize::try_from(buffers.len() + 3).unwrap());
    let bytes: u64 = buffers.iter().map(|b| b.size()).sum();
    assert_eq!(memory.total(), bytes + crate::support::upload_bytes(&cache));
    drop(cache);
    host.device.poll(wgpu::PollType::wait_indefinitely()).unwrap();
    assert_eq!(host.buffers(), own, "the cache leaves nothing behind");
}

/// 2000 steps among forks, truncations, undo and removals: no buffer more than after the first hundred.
#[test]
fn two_thousand_steps_keep_their_buffers() {
    let host = Host::new();
    let mut cache = host.cache(&config().with_capacity(800).with_max_sequences(3).with_max_capacity(3000));
    let s = cache.create_sequence().unwrap();
    let mut known = 0;
    for round in 0..2000u32 {
        host.step(&mut cache, &[SequenceStep::decode(s)]).unwrap();
        let mut encoder = host.device.create_command_encoder(&Default::default());
        let tokens = cache.tokens(s).unwrap();
        if round % 7 == 3 {
            let (fork, _) = cache.fork(&mut encoder, s).unwrap();
            host.queue.submit([encoder.finish()]);
            host.step(&mut cache, &[SequenceStep::extend(fork, 40), SequenceStep::decode(s)]).unwrap();
            cache.remove_sequence(fork).unwrap();
        } else if round % 7 == 5 {
            cache.truncate(&mut encoder, s, tokens - tokens.min(round % 50)).unwrap();
            host.queue.submit([encoder.finish()]);
        } else if round % 7 == 6 {
            let truncated = cache.truncate(&mut encoder, s, tokens / 2).unwrap();
            let (_, forked) = cache.fork(&mut encoder, s).unwrap();
            drop(encoder);
            cache.discard(forked).unwrap();
            cache.discard(truncated).unwrap();
            assert_eq!(cache.tokens(s), Ok(tokens));
        }
        // After a hundred rounds every kind of operation has happened, and each has built what it needs.
        // Encoders that are thrown away take an upload with them.
        match round {
            0..100 => known = known.max(host.buffers()),
            _ => assert!(host.buffers() <= known, "in round {round}: {} after {known}", host.buffers()),
        }
    }
}

/// To nothing, to what there is, to more than that; and where a limit of history has left a gap.
#[test]
fn truncation_at_every_end() {
    for limit in [None, Some(120)] {
        let mut config = config();
        config.format.history_limit = limit;
        let mut pair = Pair::new(&config.with_sink_tokens(3));
        let s = pair.create_sequence();
        for length in [1, 3, 40, 300] {
            let tokens = pair.gpu.tokens(s).unwrap();
            pair.fill(s, length - tokens.min(length));
            pair.truncate(s, length);
            pair.check_state(s);
            let mut encoder = device().0.create_command_encoder(&Default::default());
            let beyond = pair.gpu.truncate(&mut encoder, s, length + 1).unwrap_err();
            assert_eq!(beyond, Error::TruncateBeyondEnd { sequence: s, got: length + 1, tokens: length });
            if let (Some(_), 300) = (limit, length) {
                // 297 tokens after the sinks, of which whole blocks of 32 older than 120 are gone.
                let gone = Error::TruncateIntoEvicted { sequence: s, got: 100, first: 3 + 160, sinks: 3 };
                assert_eq!(pair.gpu.truncate(&mut encoder, s, 100).unwrap_err(), gone);
                pair.truncate(s, 170);
                pair.check_state(s);
            }
            pair.step(&[SequenceStep::decode(s)]);
            pair.check_state(s);
        }
        pair.truncate(s, 0);
        assert_eq!(pair.gpu.tokens(s), Ok(0));
        pair.fill(s, 200);
        pair.step(&[SequenceStep::decode(s)]);
        pair.check_state(s);
    }
}

/// Forks that share pages need longer plans and nothing else where the scratch is as small as it gets: what
/// reads the plan is bound to the new buffer.
#[test]
fn a_plan_that_grows_alone() {
    let config = config().with_max_sequences(24).with_max_scratch_bytes(1).with_max_batch_tokens(100);
    let mut pair = Pair::new(&config);
    let sizes = |pair: &Pair| {
        let buffers = pair.gpu.buffers();
        let [.., plan, _, scratch] = buffers[..] else { panic!("plan, staging and scratch come last") };
        (plan.size(), scratch.size(), pair.gpu.planner().pool_size(0).slabs)
    };
    let s = pair.create_sequence();
    pair.fill(s, 1500);
    let mut all = vec![s];
    let mut grown = 0;
    while all.len() < 24 {
        let before = sizes(&pair);
        all.push(pair.fork(s));
        let after = sizes(&pair);
        assert_eq!((before.1, before.2), (after.1, after.2), "scratch and slabs stay");
        if after.0 > before.0 {
            grown += 1;
            let last = all[all.len() - 1];
            pair.step(&[SequenceStep::decode(last), SequenceStep::extend(s, 20)]);
            pair.check_state(last);
        }
    }
    assert!(grown > 1, "the plan has grown {grown} times");
    let steps: Vec<_> = all.iter().map(|&s| SequenceStep::decode(s)).collect();
    pair.step(&steps);
    for s in all {
        pair.check_state(s);
    }
}

/// Hosts spawn construction and what waits for the GPU on executors that move futures between threads.
#[test]
fn futures_can_be_sent() {
    fn sent<T: Send>(future: T) -> T {
        future
    }
    let (device, queue) = device();
    let config = config();
    let options = KvCacheOptions::default().with_variant(Variant::Portable).with_kernels(kernels());
    let mut cache =
        pollster::block_on(sent(KvCache::with_options(device, queue, &config, &options))).unwrap();
    let s = cache.create_sequence().unwrap();
    pollster::block_on(sent(cache.submit_and_read_state(0, s))).unwrap();
    pollster::block_on(sent(cache.submit_and_save(s))).unwrap();
    drop(sent(KvCache::new(device, queue, &config)));
}

/// Every kind of bytes, before anything is allocated, at each length; and the buffers that there really are.
#[test]
fn bytes_are_predicted_by_kind() {
    let config = config().with_sink_tokens(4).with_capacity(700);
    for max_step in [20, 100] {
        let config = config.clone().with_max_step(max_step);
        let mut pair = Pair::new(&config);
        let s = pair.create_sequence();
        for n in [3, 17, 1, 20, 20, 20, 20] {
            pair.fill(s, n);
            let tokens = pair.gpu.tokens(s).unwrap();
            let memory = pair.gpu.memory();
            assert_eq!(memory, config.bytes_for(tokens).unwrap(), "{tokens} tokens");
            let held = memory.all_layers();
            let state = pair.gpu.submit_and_read_state_blocking(0, s).unwrap();
            let bytes = |words: usize| 2 * 4 * words as u64;
            assert_eq!(held.codes + held.parameters, bytes(state.blocks.len()));
            assert_eq!(held.window, bytes(state.window.keys.len() + state.window.values.len()));
            assert_eq!(held.sinks, bytes(state.sinks.keys.len() + state.sinks.values.len()));
        }
        let buffers: u64 = pair.gpu.buffers().iter().map(|b| b.size()).sum();
        assert_eq!(pair.gpu.memory().total(), buffers + crate::support::upload_bytes(&pair.gpu));
    }
    // Of what forks share, each byte counts once: full pages, that is.
    let mut pair = Pair::new(&config.clone().with_max_sequences(2));
    let s = pair.create_sequence();
    pair.fill(s, 600);
    let alone = pair.gpu.memory().all_layers();
    pair.fork(s);
    let both = pair.gpu.memory().all_layers();
    // 17 blocks of 32 tokens, of which the last page holds one.
    assert_eq!((both.codes - alone.codes) * 17, alone.codes);
    assert_eq!((both.window, both.sinks), (2 * alone.window, 2 * alone.sinks));
    let more = config.bytes_for(5000).unwrap();
    assert_eq!(more, config.clone().with_capacity(5000).bytes_for(5000).unwrap());
    let refused = config.with_max_capacity(800).bytes_for(801).unwrap_err();
    assert!(matches!(refused, Error::Unsupported { name: "max_capacity", .. }), "{refused}");
}

/// Drafted tokens are appended, attended to and taken back, many times; then the state is that of plain
/// decoding, and so is what follows.
#[test]
fn speculative_decoding_leaves_no_trace() {
    let mut drafted = Pair::new(&config().with_sink_tokens(2));
    let mut plain = Pair::new(&config().with_sink_tokens(2));
    let s = drafted.create_sequence();
    let t = plain.create_sequence();
    // The real tokens, in order.
    let tokens: Vec<Vec<Tensors>> = (0..330).map(|_| drafted.tensors(&[SequenceStep::decode(s)])).collect();
    let take = |range: std::ops::Range<usize>| -> Vec<Tensors> {
        let join = |layer: usize, part: fn(&Tensors) -> &Vec<f32>| {
            tokens[range.clone()].iter().flat_map(|t| part(&t[layer]).clone()).collect::<Vec<f32>>()
        };
        (0..2).map(|l| Tensors { k: join(l, |t| &t.k), v: join(l, |t| &t.v), q: join(l, |t| &t.q) }).collect()
    };
    let mut done = 0;
    let mut round = 0;
    while done < 300 {
        // k ≤ W drafted tokens, of which the first `accepted` are right; the others are other tokens.
        let drafts = 1 + (7 * round) % 30;
        let accepted = (5 * round) % (drafts + 1);
        let right = accepted.min(300 - done);
        let mut draft = take(done..done + right);
        let wrong = [SequenceStep::extend(s, (drafts - right.min(drafts)) as u32)];
        for (own, other) in draft.iter_mut().zip(drafted.tensors(&wrong)) {
            own.k.extend(other.k);
            own.v.extend(other.v);
            own.q.extend(other.q);
        }
        drafted.step_with(&[SequenceStep::extend(s, drafts as u32)], &draft);
        done += right;
        drafted.truncate(s, done as u32);
        drafted.check_state(s);
        // No packed word is changed by the drafts: those of the real tokens are there.
        round += 1;
    }
    // On until the length is beyond the largest that it has been.
    drafted.step_with(&[SequenceStep::extend(s, 30)], &take(300..330));
    for first in (0..330).step_by(66) {
        plain.step_with(&[SequenceStep::extend(t, 66)], &take(first..first + 66));
    }
    for layer in 0..2 {
        let state = |pair: &Pair, s| pair.gpu.submit_and_read_state_blocking(layer, s).unwrap();
        let (drafted, plain) = (state(&drafted, s), state(&plain, t));
        assert_eq!(drafted.window.keys.len(), plain.window.keys.len());
        assert!(drafted.window == plain.window && drafted.sinks == plain.sinks);
        // A block that held rejected tokens would differ from one packed of the accepted ones; none did, as
        // the window was never cut.
        assert!(drafted.blocks == plain.blocks);
    }
    let decode = [s, t].map(|s| [SequenceStep::decode(s)]);
    let next = drafted.tensors(&decode[0]);
    assert!(drafted.step_with(&decode[0], &next) == plain.step_with(&decode[1], &next));
}

/// Pages that leave every sequence come back, and what does not fit says how much would.
#[test]
fn dropped_sequences_make_room() {
    let mut pair = Pair::new(&config().with_capacity(1000).with_max_capacity(1000).with_max_sequences(3));
    let s = pair.create_sequence();
    pair.fill(s, 900);
    let free = pair.gpu.planner().free_pages(0);
    let forks = [pair.fork(s), pair.fork(s)];
    // 868 packed tokens are 3 full pages and one that is not, which each fork has of its own.
    assert_eq!(pair.gpu.planner().free_pages(0) + 2, free);
    let full = {
        let mut encoder = device().0.create_command_encoder(&Default::default());
        pair.gpu.fork(&mut encoder, s).unwrap_err()
    };
    assert_eq!(full, Error::TooManySequences { max: 3 });
    pair.reorder(&[s, forks[0], forks[1]], &[1, 0, 1]);
    pair.check_state(s);
    for fork in forks {
        pair.step(&[SequenceStep::extend(fork, 1), SequenceStep::extend(s, 2)]);
        pair.check_state(fork);
        pair.remove(fork);
    }
    pair.check_state(s);
    assert_eq!(pair.gpu.planner().free_pages(0), free);
    pair.truncate(s, 3);
    pair.fill(s, 997);
    pair.check_state(s);
}
