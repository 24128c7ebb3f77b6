//! Layers that differ in their formats, windows and what they keep.

use crate::support::{Pair, device};
use kivi_wgpu::{
    Axis, Bits, CacheConfig, Error, LayerFormat, Preset, SequenceStep, Snapshot, TensorFormat, Variant,
};

fn format(edit: impl FnOnce(&mut LayerFormat)) -> LayerFormat {
    let mut format = LayerFormat::default();
    edit(&mut format);
    format
}

/// Seven layers in five classes.
fn mixed() -> CacheConfig {
    let sixteen = format(|f| {
        (f.keys, f.values) = (TensorFormat::new(Bits::Sixteen), TensorFormat::new(Bits::Sixteen));
        (f.residual_window, f.group_size) = (0, 16);
    });
    let limited = format(|f| {
        (f.residual_window, f.sink_tokens, f.history_limit) = (40, 4, Some(300));
    });
    let per_token = format(|f| {
        f.keys = TensorFormat::new(Bits::Eight).with_axis(Axis::PerToken);
        f.values = TensorFormat::new(Bits::Four);
        (f.group_size, f.residual_window) = (128, 10);
    });
    CacheConfig::new(7, 4, 2, 64)
        .with_layer_format([0, 6], Preset::Bits4_5.format())
        .with_layer_format([2], sixteen)
        .with_layer_format([3, 5], limited)
        .with_layer_format([4], per_token)
        .with_max_sequences(4)
        .with_max_step(200)
        .with_max_batch_tokens(400)
        .with_capacity(1000)
}

#[test]
fn layers_of_every_kind() {
    let mut pair = Pair::new(&mixed());
    let (a, b) = (pair.create_sequence(), pair.create_sequence());
    for (n, m) in [(1, 2), (150, 0), (7, 199), (200, 200), (1, 1), (200, 3), (180, 1)] {
        let steps = [SequenceStep::extend(a, n), SequenceStep::append(b, m)];
        pair.step(&steps[..if m > 0 { 2 } else { 1 }]);
    }
    for id in [a, b] {
        pair.check_state(id);
    }
    // Whole operations: in every class or in none.
    let c = pair.fork(a);
    pair.step(&[SequenceStep::extend(c, 60), SequenceStep::decode(a)]);
    let refused = pair.cpu.truncate(a, 100).unwrap_err();
    assert!(matches!(refused, Error::TruncateIntoEvicted { got: 100, .. }), "{refused}");
    let (device, _) = device();
    let mut encoder = device.create_command_encoder(&Default::default());
    assert_eq!(pair.gpu.truncate(&mut encoder, a, 100).unwrap_err(), refused);
    assert_eq!((pair.gpu.tokens(a), pair.cpu.planner().tokens(a)), (Ok(740), Ok(740)));
    pair.truncate(a, 701);
    pair.reorder(&[a, b, c], &[2, 0, 2]);
    pair.step(&[a, b, c].map(SequenceStep::decode));
    pair.remove(b);
    let d = pair.fork(c);
    assert!(d > c, "an id is never used again");
    pair.truncate(d, 3);
    pair.step(&[SequenceStep::extend(d, 33), SequenceStep::extend(a, 2)]);
    for id in [a, c, d] {
        pair.check_state(id);
    }
}

#[test]
fn snapshots_of_mixed_layers() {
    let mut pair = Pair::new(&mixed());
    let s = pair.create_sequence();
    pair.fill(s, 777);
    let saved = pair.gpu.submit_and_save_blocking(s).unwrap();
    let file = saved.to_bytes().unwrap();
    assert!(file == pair.cpu.save(s).unwrap().to_bytes().unwrap());
    let read = Snapshot::from_bytes(&file).unwrap();
    assert!(read == saved);
    let (device, queue) = device();
    let mut encoder = device.create_command_encoder(&Default::default());
    let (loaded, _) = pair.gpu.load(&mut encoder, &read).unwrap();
    queue.submit([encoder.finish()]);
    assert_eq!(pair.cpu.load(&read).unwrap().0, loaded);
    pair.step(&[SequenceStep::extend(loaded, 5), SequenceStep::decode(s)]);
    pair.check_state(loaded);

    // Another layer's format, the same formats in other layers, and none of their own.
    let plain = |mut config: CacheConfig| {
        config.layer_formats.clear();
        config
    };
    let more = format(|f| f.residual_window = 127);
    for (field, other) in [
        ("residual_window", mixed().with_layer_format([1], more)),
        ("keys.bits", mixed().with_layer_format([1], Preset::Bits4_5.format())),
        ("keys.bits", plain(mixed())),
    ] {
        let mut cache = crate::support::new_cache(device, queue, &other).unwrap();
        let mut encoder = device.create_command_encoder(&Default::default());
        let error = cache.load(&mut encoder, &read).unwrap_err();
        assert!(matches!(error, Error::SnapshotMismatch { field: f, .. } if f == field), "{field}: {error}");
        assert_eq!(cache.sequences().count(), 0);
    }
}

/// What every buffer takes is said before it is made, and by layer.
#[test]
fn memory_of_mixed_layers() {
    let mut pair = Pair::new(&mixed().with_max_sequences(1));
    let s = pair.create_sequence();
    pair.fill(s, 900);
    let memory = pair.gpu.memory();
    let bytes: u64 = pair.gpu.buffers().iter().map(|buffer| buffer.size()).sum();
    assert_eq!(memory.total(), bytes + crate::support::upload_bytes(&pair.gpu));
    assert_eq!(memory, mixed().with_max_sequences(1).bytes_for(900).unwrap());
    let [first, second, sixteen, limited] = [0, 1, 2, 3].map(|layer| memory.layers[layer]);
    assert_eq!(memory.layers[6], first);
    assert_eq!((first.sinks, second.sinks), (4 * 2 * 64 * 4, 0));
    assert_eq!((sixteen.parameters, sixteen.codes), (0, 896 * 2 * 64 * 4));
    // 300 tokens back from the newest, of which 40 to 71 are in the window.
    assert!(limited.codes > 0 && limited.codes < second.codes / 2);
    let average = kivi_wgpu::cache_bytes(&mixed(), 900).unwrap().format_bits;
    let own = |layer| pair.gpu.shape_of(layer).unwrap().layout.format_bits();
    assert!((average - (0..7).map(own).sum::<f64>() / 7.0).abs() < 1e-12);
}

/// Classes whose axes no faster kernels read run the portable ones; the others keep theirs.
#[test]
fn each_class_has_its_own_variant() {
    let (device, queue) = device();
    let cache = crate::support::new_cache(device, queue, &mixed()).unwrap();
    assert_eq!(cache.variant_of(4), Ok(Variant::Portable));
    assert_eq!(cache.variant(), cache.variant_of(6).unwrap());
    assert_eq!(cache.variant_of(7), Err(Error::LayerOutOfRange { got: 7, layers: 7 }));
    let none = mixed().with_layer_format([7], LayerFormat::default());
    let error = crate::support::new_cache(device, queue, &none).unwrap_err();
    assert_eq!(error, Error::LayerOutOfRange { got: 7, layers: 7 });
}

/// History beyond the limit is gone from attention and from memory, and steps go on for ever in the same few
/// pages.
#[test]
fn a_limited_history() {
    let config = CacheConfig::new(1, 4, 2, 64).with_sink_tokens(4).with_residual_window(64);
    let config = config.with_history_limit(333).with_capacity(4000).with_max_step(300);
    let config = config.with_max_sequences(2);
    for rotated in [false, true] {
        let values = TensorFormat::new(Bits::Two);
        let values = if rotated { values.with_rotation() } else { values };
        let mut pair = Pair::new(&config.clone().with_formats(TensorFormat::new(Bits::Two), values));
        let s = pair.create_sequence();
        for n in [1, 300, 64, 300, 1, 1, 299, 33, 300, 1, 300, 300, 64, 1] {
            pair.step(&[SequenceStep::extend(s, n)]);
        }
        pair.check_state(s);
        let view = pair.gpu.planner().view(0, s).unwrap();
        assert!(view.blocks.len() <= 10 && view.lengths.evicted > 40, "{:?}", view.lengths);
        assert!(pair.gpu.planner().pool_size(0).pages <= 9);
        let fork = pair.fork(s);
        pair.step(&[SequenceStep::extend(fork, 70), SequenceStep::decode(s)]);
        pair.check_state(fork);
        pair.check_state(s);
    }
}

/// Formats that mean the same are of one class, however they are written, and a snapshot of them is a file.
#[test]
fn equal_formats_in_other_words() {
    let explicit = format(|f| {
        f.value_group_size = Some(32);
        f.keys = f.keys.with_axis(Axis::PerChannel);
    });
    let sixteen = |f: TensorFormat| format(|own| (own.keys, own.values) = (f, f));
    let plain = TensorFormat::new(Bits::Sixteen);
    let config = CacheConfig::new(4, 4, 2, 64)
        .with_layer_format([1], explicit)
        .with_layer_format([2], sixteen(plain))
        .with_layer_format([3], sixteen(plain.with_clipping()));
    let mut pair = Pair::new(&config);
    assert_eq!(pair.gpu.shape().first().layers, [0, 1]);
    assert_eq!(pair.gpu.shape_of(3).unwrap().layers, [2, 3]);
    let s = pair.create_sequence();
    pair.fill(s, 300);
    let file = pair.gpu.submit_and_save_blocking(s).unwrap().to_bytes().unwrap();
    assert!(Snapshot::from_bytes(&file).unwrap() == pair.cpu.save(s).unwrap());
}

/// Where memory fails in any class, nothing has happened in any; and what is undone is undone in all.
#[test]
fn failures_and_undo_in_every_class() {
    let (device, queue) = device();
    let mut pair = Pair::new(&mixed().with_capacity(200).with_max_sequences(2));
    let s = pair.create_sequence();
    pair.fill(s, 450);
    let mut failures = 0;
    for extra in (0..).step_by(5_000) {
        pair.gpu.set_memory_limit(Some(pair.gpu.memory().total() + extra));
        let mut encoder = device.create_command_encoder(&Default::default());
        let before = pair.gpu.tokens(s);
        match pair.gpu.begin_step(&mut encoder, &[SequenceStep::append(s, 200)]).map(drop) {
            Ok(()) => break,
            Err(Error::OutOfMemory { .. }) => failures += 1,
            Err(other) => panic!("{other}"),
        }
        assert_eq!(pair.gpu.tokens(s), before);
        assert!(pair.gpu.fork(&mut encoder, s).is_err() || extra > 0);
        let forked: Vec<_> = pair.gpu.sequences().filter(|id| *id != s).collect();
        forked.into_iter().for_each(|id| drop(pair.gpu.remove_sequence(id)));
    }
    assert!(failures > 3, "{failures} allocations");
    pair.gpu.set_memory_limit(None);
    pair.step(&[SequenceStep::extend(s, 200)]);
    pair.check_state(s);

    // Undo, of operations that were thrown away.
    let mut encoder = device.create_command_encoder(&Default::default());
    let (fork, forked) = pair.gpu.fork(&mut encoder, s).unwrap();
    let cut = pair.gpu.truncate(&mut encoder, s, 640).unwrap();
    let shrunk = pair.gpu.shrink_to_fit();
    assert!(matches!(pair.gpu.discard(cut), Err(Error::NotLatest { .. })));
    for operation in [shrunk, cut, forked] {
        pair.gpu.discard(operation).unwrap();
    }
    assert_eq!(pair.gpu.tokens(fork), Err(Error::UnknownSequence(fork)));
    drop(encoder);
    queue.submit([]);
    pair.step(&[SequenceStep::extend(s, 70)]);
    pair.check_state(s);
    let snapshot = pair.cpu.save(s).unwrap();
    let mut encoder = device.create_command_encoder(&Default::default());
    let (loaded, _) = pair.gpu.load(&mut encoder, &snapshot).unwrap();
    queue.submit([encoder.finish()]);
    assert!(loaded > fork);
    assert!(pair.gpu.submit_and_save_blocking(loaded).unwrap() == snapshot);
}
