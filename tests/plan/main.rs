//! The plan alone, against the naive model: random programs of operations on sequences whose tokens are only
//! names.

mod names;
mod recorder;
#[path = "../reference/mod.rs"]
mod reference;

use kivi_wgpu::{CacheConfig, CacheShape, Error, LayerAttention, SequenceStep, Shape};
use names::Run;
use proptest::prelude::*;
use recorder::Recorded;
use reference::program::{Executor, Machine, Op, Work, program};

fn config() -> impl Strategy<Value = CacheConfig> {
    let window = prop_oneof![Just(0u32), Just(1), Just(32), Just(128), 0u32..140];
    let group = prop_oneof![Just(16u32), Just(32), Just(64), Just(128)];
    let sinks = prop_oneof![Just(0u32), Just(4), 0u32..300];
    let scratch = prop_oneof![Just(1u64), 1u64..100_000, Just(16 << 20)];
    let heads = (1u32..4, 1u32..17);
    let limit = prop_oneof![Just(None), Just(None), (0u32..400).prop_map(Some)];
    let capacity = prop_oneof![
        Just((2000u32, Some(2000u32))),
        Just((300, None)),
        (300u32..900, (900u32..3000).prop_map(Some))
    ];
    let sequences = (1u32..5, capacity);
    let kept = (window, sinks, limit);
    (kept, group, sequences, prop_oneof![Just(200u32), 1u32..300], 1u32..3, heads, scratch).prop_map(
        |(
            (window, sinks, limit),
            group,
            (sequences, capacity),
            max_step,
            pages,
            (kv_heads, ratio),
            scratch,
        )| {
            let sliding = {
                let mut attention = LayerAttention::default();
                attention.sliding_window = Some(1 + window * 3 / 2);
                attention.soft_cap = None;
                attention
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
                .with_capacity(capacity.0);
            let base = capacity.1.map_or(base.clone(), |most| base.with_max_capacity(most));
            let page = Shape::new(&base).unwrap().layout.page_words() * 4;
            let base = base.with_max_slab_bytes(page * u64::from(pages));
            let rotated = base.format.values.with_rotation();
            let base =
                if max_step % 2 == 0 { base.clone().with_formats(base.format.keys, rotated) } else { base };
            match limit {
                Some(beyond) => base.with_history_limit(window + beyond),
                None => base,
            }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn programs_agree_with_the_naive_model(config in config(), program in program(40)) {
        Run::machine(&config).run(&program);
    }

    /// An executor without memory runs them too, with a second class of layers beside the first.
    #[test]
    fn programs_run_on_an_executor_that_records(config in config(), program in program(25)) {
        let mut wide = config.format;
        (wide.residual_window, wide.sink_tokens, wide.group_size) = (wide.residual_window + 3, 2, 64);
        wide.history_limit = None;
        let config = config.with_layer_format([1], wide);
        let page = CacheShape::new(&config).unwrap().classes.iter().map(|s| s.layout.page_words() * 4).max();
        Recorded::machine(&config.with_max_slab_bytes(page.unwrap() * 3)).run(&program);
    }

    /// `capacity` tokens fit however they are spread over the sequences.
    #[test]
    fn the_capacity_holds_for_any_spread(config in config(), parts in prop::collection::vec(0u32..2000, 3)) {
        let sequences = config.max_sequences as usize;
        let config = config.with_capacity(2000).with_max_capacity(2000);
        let mut run = Run::new(&config);
        let mut left = config.capacity;
        for (i, part) in parts.into_iter().take(sequences).enumerate() {
            let sequence = run.lifecycle.create_sequence().unwrap();
            let mut tokens = if i + 1 == sequences { left } else { part.min(left) };
            left -= tokens;
            while tokens > 0 {
                let n = tokens.min(config.max_step);
                let step = SequenceStep::append(sequence, n);
                let mut begun = run.lifecycle.begin_step(&mut false, &[step]).unwrap();
                (0..config.layers).for_each(|layer| begun.recorded(layer));
                run.lifecycle.finish_step(begun).unwrap();
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
        let mut chunked = Run::machine(&config.clone().with_capacity(4000).with_max_capacity(4000));
        chunked.apply(&Op::Create);
        let mut tokens = 0;
        for n in chunks {
            let n = n.min(config.max_step);
            chunked.apply(&Op::Step(vec![(0, n, n.min(20))]));
            tokens += n;
        }
        // This pool grows meanwhile.
        let mut single = Run::machine(&config.with_capacity(300).with_max_capacity(4000));
        single.apply(&Op::Create);
        for _ in 0..tokens {
            single.apply(&Op::Step(vec![(0, 1, 1)]));
        }
        prop_assert_eq!(&chunked.model[0].1, &single.model[0].1);
        let content = |machine: &Machine<Run>| machine.executor.content(machine.model[0].0);
        prop_assert_eq!(content(&chunked), content(&single));
    }

    /// Speculative decoding: as soon as the length is again the largest that it has been, everything is as
    /// without the drafted tokens.
    #[test]
    fn rolled_back_tokens_leave_no_trace(config in config(), start in 0u32..500, rounds in prop::collection::vec((1u32..140, 0u32..140), 1..20)) {
        let config = config.with_capacity(6000).with_max_capacity(6000);
        let mut drafted = Run::machine(&config);
        let mut plain = Run::machine(&config);
        let (mut longest, mut length) = (0, 0);
        for machine in [&mut drafted, &mut plain] {
            machine.apply(&Op::Create);
        }
        let grow = |machine: &mut Machine<Run>, mut n: u32| {
            while n > 0 {
                let step = n.min(config.max_step);
                machine.apply(&Op::Step(vec![(0, step, step.min(4))]));
                n -= step;
            }
        };
        grow(&mut drafted, start);
        longest = longest.max(start);
        length += start;
        for (append, back) in rounds {
            grow(&mut drafted, append);
            length += append;
            longest = longest.max(length);
            // Sinks are no part of the window.
            let back = back.min(append).min(config.format.residual_window).min(length.saturating_sub(config.format.sink_tokens));
            drafted.apply(&Op::Rollback(0, back));
            length -= back;
        }
        grow(&mut drafted, longest - length);
        grow(&mut plain, longest);
        let places = |machine: &Machine<Run>| {
            let (sinks, blocks, window) = machine.executor.content(machine.model[0].0);
            (sinks.len(), blocks.len(), window.len())
        };
        prop_assert_eq!(places(&drafted), places(&plain));
        // And each token once: the model would have another name for a token that went through a block.
        prop_assert!(drafted.model[0].1.tokens.iter().all(|name| name >> 63 == 0));
    }
}

/// With a limit, a pool for a few pages holds a sequence of any length, and never grows.
#[test]
fn a_limited_history_needs_a_limited_pool() {
    let config = CacheConfig::new(1, 1, 1, 64).with_sink_tokens(4).with_max_step(64).with_group_size(32);
    let config = config.with_residual_window(64).with_history_limit(300).with_capacity(1 << 30);
    let mut run = Run::machine(&config);
    let pages = run.executor.pages();
    assert!(pages <= 4, "{pages}");
    run.apply(&Op::Create);
    for n in (1..=64).cycle().take(200) {
        run.apply(&Op::Step(vec![(0, n, 1)]));
    }
    assert_eq!(run.executor.pages(), pages);
    let naive = &run.model[0].1;
    assert_eq!(naive.tokens.len(), 6276);
    // The oldest block that is kept has a token within the limit, the one before has none.
    let first = 4 + naive.evicted;
    assert!(first + 32 > 6276 - 300 && first <= 6276 - 300);
}

/// Two sequences that share a page, both cut into it, both extended in one step: each copies it while it is
/// still there.
#[test]
fn a_limited_pool_has_room_for_shared_pages() {
    let config = CacheConfig::new(1, 1, 1, 16).with_group_size(16).with_residual_window(0).with_max_step(50);
    let config = config.with_history_limit(50).with_max_batch_tokens(100).with_max_sequences(2);
    let mut run = Run::machine(&config.with_capacity(1 << 20));
    run.apply(&Op::Create);
    for n in [50, 50, 50, 50, 50, 6] {
        run.apply(&Op::Step(vec![(0, n, 0)]));
    }
    run.apply(&Op::Fork(0));
    for which in [0, 1] {
        // To 255 of 256.
        run.apply(&Op::Truncate(which, 1000, 1));
    }
    run.apply(&Op::Step(vec![(0, 50, 1), (1, 50, 1)]));
    assert_eq!(run.model.iter().map(|(_, naive)| naive.tokens.len()).collect::<Vec<_>>(), [305, 305]);
}

/// Lengths at which something happens for the first time, with exact counts of unpacked tokens.
#[test]
fn the_window_at_every_length() {
    let config = CacheConfig::new(1, 1, 1, 64).with_sink_tokens(4);
    let mut run = Run::machine(&config.with_capacity(1000));
    run.apply(&Op::Create);
    for length in 1..=700usize {
        run.apply(&Op::Step(vec![(0, 1, 1)]));
        let view = run.executor.planner().view(0, run.model[0].0).unwrap();
        let after_sinks = length.saturating_sub(4);
        let blocks = if after_sinks >= 160 { (after_sinks - 128) / 32 } else { 0 };
        assert_eq!((view.sinks.len(), view.blocks.len()), (length.min(4), blocks));
        assert_eq!(view.window.len(), after_sinks - 32 * blocks);
    }
}

/// Many sequences that share a long prompt: plans are as long as if each had pages of its own, and the budget
/// knows (the executor asserts it).
#[test]
fn many_forks_of_a_long_prompt() {
    for slab_pages in [1000, 1] {
        let config = CacheConfig::new(1, 8, 2, 16).with_max_step(400).with_max_sequences(40);
        let config = config.with_residual_window(0).with_group_size(128).with_capacity(30_000);
        let page = Shape::new(&config).unwrap().layout.page_words() * 4;
        let mut run = Run::machine(&config.with_max_slab_bytes(slab_pages * page));
        run.apply(&Op::Create);
        for _ in 0..70 {
            run.apply_unpoisoned(&Op::Step(vec![(0, 400, 1)]));
        }
        let fork = |run: &mut Machine<Run>| {
            let Ok((child, _)) = run.executor.fork(run.model[0].0, Work::Submitted) else {
                panic!("there is room")
            };
            run.model.push((child, run.model[0].1.clone()));
        };
        (0..39).for_each(|_| fork(&mut run));
        for n in [1, 10] {
            let all: Vec<_> = (0..40).map(|s| (s, n, n)).collect();
            run.apply_unpoisoned(&Op::Step(all));
        }
        // Beams that are all the first.
        run.apply_unpoisoned(&Op::Reorder(vec![0; 40]));
        run.apply_unpoisoned(&Op::Step((0..40).map(|s| (s, 1, 1)).collect()));
    }
}

/// What a removal freed may be in use again, or given back: then it can no longer be undone, and says so.
#[test]
fn operations_whose_pages_or_rings_are_gone_cannot_be_discarded() {
    let config = CacheConfig::new(1, 1, 1, 16).with_max_sequences(2).with_capacity(2000);
    let too_old =
        |result: Result<(), Error>| assert!(matches!(result, Err(Error::TooOld { .. })), "{result:?}");
    let filled = || {
        let mut run = Run::machine(&config);
        run.apply(&Op::Create);
        run.apply(&Op::Create);
        for _ in 0..2 {
            run.apply(&Op::Step(vec![(0, 400, 1), (1, 100, 1)]));
        }
        (run.model[0].0, run.executor)
    };
    // Its rings are a new sequence's.
    let (first, mut run) = filled();
    let removed = run.remove(first, Work::Submitted);
    run.create().unwrap();
    too_old(run.discard(removed));
    // Its pages' slab is gone, and comes back as another; what came after can be undone all the same.
    let (first, mut run) = filled();
    let removed = run.remove(first, Work::Submitted);
    let second = run.planner().sequences().next().unwrap();
    run.remove(second, Work::Submitted);
    let shrunk = run.lifecycle.shrink_to_fit();
    assert_eq!(run.planner().slab_pages(0), [0]);
    run.discard(shrunk).unwrap();
    too_old(run.discard(removed));
    too_old(run.discard(shrunk));
}
