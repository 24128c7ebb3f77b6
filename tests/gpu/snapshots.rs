//! Saved sequences: the oracle's bytes on every adapter, and what follows a load is what would have followed
//! without.

#[path = "../golden/files.rs"]
mod goldens;

use crate::support::{Pair, Tensors, device};
use kivi_wgpu::{Bits, CacheConfig, Dtype, Error, SequenceId, SequenceStep, Snapshot};

/// Lengths at which other projects' saved caches diverged.
const LENGTHS: [u32; 18] =
    [0, 1, 31, 32, 33, 127, 128, 129, 130, 255, 256, 257, 383, 384, 385, 511, 512, 513];

fn config() -> CacheConfig {
    CacheConfig::new(2, 2, 2, 64)
        .with_sink_tokens(4)
        .with_max_sequences(3)
        .with_max_step(513)
        .with_capacity(500)
}

/// Saves a sequence on both; the files are equal.
fn save(pair: &Pair, s: SequenceId) -> Vec<u8> {
    let file = pair.gpu.submit_and_save_blocking(s).unwrap().to_bytes().unwrap();
    assert!(
        file == pair.cpu.save(s).unwrap().to_bytes().unwrap(),
        "the GPU writes another file than the oracle"
    );
    file
}

fn load(pair: &mut Pair, file: &[u8]) -> SequenceId {
    let snapshot = Snapshot::from_bytes(file).unwrap();
    let (device, queue) = device();
    let mut encoder = device.create_command_encoder(&Default::default());
    let (id, _) = pair.gpu.load(&mut encoder, &snapshot).unwrap();
    queue.submit([encoder.finish()]);
    assert_eq!(pair.cpu.load(&snapshot).unwrap().0, id);
    id
}

/// The same tokens for two sequences: the same outputs and states, bit for bit.
fn continue_both(pair: &mut Pair, a: SequenceId, b: SequenceId) {
    for n in [1, 100] {
        let tensors: Vec<Tensors> = pair.tensors(&[SequenceStep::extend(a, n)]);
        let outputs = [a, b].map(|s| pair.step_with(&[SequenceStep::extend(s, n)], &tensors));
        assert!(outputs[0] == outputs[1]);
        assert!(save(pair, a) == save(pair, b));
    }
    pair.check_state(b);
}

#[test]
fn saved_sequences_continue_bit_for_bit() {
    let mut pair = Pair::new(&config());
    // A sequence that is there all along: snapshots are loaded into a cache in use.
    let other = pair.create_sequence();
    pair.fill(other, 200);
    for length in LENGTHS {
        let s = pair.create_sequence();
        if length > 0 {
            pair.step(&[SequenceStep::append(s, length)]);
        }
        let file = save(&pair, s);
        let loaded = load(&mut pair, &file);
        assert_eq!(pair.gpu.tokens(loaded), Ok(length));
        continue_both(&mut pair, s, loaded);
        pair.remove(loaded);
        pair.remove(s);
        pair.check_state(other);
    }
    // After a fork, and a truncation into a page that is shared.
    pair.fill(other, 313);
    let fork = pair.fork(other);
    pair.truncate(fork, 300);
    let file = save(&pair, fork);
    let loaded = load(&mut pair, &file);
    continue_both(&mut pair, fork, loaded);
    pair.check_state(other);
}

/// The committed files of every preset: what the GPU loads is what the oracle holds, and is saved as it was.
#[test]
fn the_files_of_every_preset() {
    for (preset, file, config) in goldens::goldens() {
        let mut pair = Pair::new(&config);
        let loaded = load(&mut pair, file);
        assert!(save(&pair, loaded) == file, "{preset:?}");
        pair.check_state(loaded);
        pair.step(&[SequenceStep::extend(loaded, 70)]);
        pair.check_state(loaded);
    }
}

/// The committed file of the first version of the format.
#[test]
fn the_first_version_of_the_format() {
    let file = include_bytes!("../data/snapshot_v1.safetensors");
    let config = CacheConfig::new(2, 2, 1, 16)
        .with_bits(Bits::Two, Bits::Four)
        .with_group_size(16)
        .with_residual_window(5)
        .with_sink_tokens(2)
        .with_max_sequences(2);
    let mut pair = Pair::new(&config);
    let loaded = load(&mut pair, file);
    assert!(save(&pair, loaded) == file);
    pair.step(&[SequenceStep::extend(loaded, 70)]);
    pair.check_state(loaded);
}

#[test]
fn what_cannot_be_loaded_changes_nothing() {
    let mut pair = Pair::new(&config().with_max_sequences(2).with_max_capacity(500));
    let s = pair.create_sequence();
    pair.fill(s, 480);
    let file = save(&pair, s);
    let before = pair.gpu.memory();
    let mut encoder = device().0.create_command_encoder(&Default::default());
    let mut refused = |pair: &mut Pair, file: &[u8]| {
        let loaded = Snapshot::from_bytes(file).and_then(|snapshot| pair.gpu.load(&mut encoder, &snapshot));
        let error = loaded.unwrap_err();
        assert_eq!(pair.gpu.memory().all_layers(), before.all_layers());
        error
    };
    // No room for another sequence of this length.
    assert!(matches!(refused(&mut pair, &file), Error::CapacityExceeded { .. }));
    let mut altered = file.clone();
    let middle = file.len() / 2;
    altered[middle] ^= 1;
    assert!(matches!(refused(&mut pair, &altered), Error::SnapshotCorrupt { .. }));
    assert!(matches!(refused(&mut pair, &file[..middle]), Error::SnapshotCorrupt { .. }));
    let mut bf16 = Pair::new(&config().with_window_format(Dtype::Bf16));
    let t = bf16.create_sequence();
    let foreign = save(&bf16, t);
    let mismatch = refused(&mut pair, &foreign);
    assert!(matches!(mismatch, Error::SnapshotMismatch { field: "window_format", .. }), "{mismatch}");
    let empty = load(&mut bf16, &foreign);
    assert_eq!(bf16.gpu.tokens(empty), Ok(0));
    pair.check_state(s);
    pair.step(&[SequenceStep::decode(s)]);
}
