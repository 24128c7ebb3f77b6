//! Any bytes as a snapshot: an error, or a sequence that can be loaded, continued, and saved as the same
//! bytes.
//!
//! `cargo +nightly fuzz run snapshot`, from the repository's root; `fuzz/seed` has files to begin with.
#![no_main]

use kivi_wgpu::oracle::{CpuCache, LayerInput};
use kivi_wgpu::{Bits, CacheConfig, Dtype, SequenceStep, Snapshot};
use libfuzzer_sys::fuzz_target;

/// Configurations that the seeds have.
fn configs() -> [CacheConfig; 3] {
    let small = |bits, format| {
        CacheConfig::new(2, 1, 1, 16)
            .with_bits(bits, bits)
            .with_group_size(16)
            .with_residual_window(5)
            .with_sink_tokens(2)
            .with_window_format(format)
            .with_capacity(64)
            .with_max_step(16)
            .with_max_sequences(2)
    };
    [small(Bits::Two, Dtype::F16), small(Bits::Sixteen, Dtype::Bf16), small(Bits::Four, Dtype::F32)]
}

/// With the checksum made right, so that what it guards is reached too.
fn mended(file: &[u8]) -> Option<Vec<u8>> {
    let mark = br#"\"checksum\":\""#;
    let at = file.windows(mark.len()).position(|w| w == mark)? + mark.len();
    let mut file = file.to_vec();
    file.get_mut(at..at + 8)?.copy_from_slice(b"00000000");
    let checksum = format!("{:08x}", crc32fast::hash(&file));
    file[at..at + 8].copy_from_slice(checksum.as_bytes());
    Some(file)
}

fn check(file: &[u8]) {
    let Ok(snapshot) = Snapshot::from_bytes(file) else { return };
    let again = snapshot.to_bytes().expect("what was read can be written");
    assert!(Snapshot::from_bytes(&again).expect("and read") == snapshot);
    for config in configs() {
        let mut cache = CpuCache::new(&config).expect("the configurations are valid");
        let empty = cache.create_sequence().expect("there is room");
        let Ok((id, _)) = cache.load(&snapshot) else {
            assert_eq!(cache.planner().sequences().collect::<Vec<_>>(), [empty]);
            continue;
        };
        assert!(cache.save(id).and_then(|s| s.to_bytes()).expect("it can be saved") == again);
        let row = [0.5; 16 * 16];
        let input = LayerInput { k: &row, v: &row, q: &row, ..Default::default() };
        let (_, outputs) = cache.step(&[SequenceStep::extend(id, 16)], &[input, input]).expect("it goes on");
        assert!(outputs.iter().flat_map(|o| &o.out).all(|x| x.is_finite()));
        cache.truncate(id, cache.planner().tokens(id).unwrap_or(0) / 2).expect("it can be cut");
    }
}

fuzz_target!(|data: &[u8]| {
    check(data);
    if let Some(file) = mended(data) {
        check(&file);
    }
});
