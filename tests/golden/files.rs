//! Saved sequences of every preset, as they were written once: tests/data/golden.

use kivi_wgpu::oracle::{CpuCache, LayerInput};
use kivi_wgpu::{CacheConfig, Preset, SequenceId, SequenceStep};

pub const KV_HEADS: usize = 3;
pub const DIM: usize = 32;
/// Two blocks of 64 tokens or four of 32, sinks and a window.
const TOKENS: usize = 150;

/// A preset's name, its file, and the configuration that has written it.
pub fn goldens() -> Vec<(Preset, &'static [u8], CacheConfig)> {
    macro_rules! golden {
        ($preset:ident) => {
            (
                Preset::$preset,
                &include_bytes!(concat!("../data/golden/", stringify!($preset), ".safetensors"))[..],
            )
        };
    }
    let files = [
        golden!(Kivi2),
        golden!(Kivi4),
        golden!(Bits2_25),
        golden!(Bits2_75),
        golden!(Bits3),
        golden!(Bits4_5),
    ];
    files.into_iter().map(|(preset, file)| (preset, file, config(preset))).collect()
}

pub fn config(preset: Preset) -> CacheConfig {
    CacheConfig::new(2, 2 * KV_HEADS as u32, KV_HEADS as u32, DIM as u32)
        .with_preset(preset)
        .with_residual_window(5)
        .with_capacity(300)
        .with_max_sequences(2)
}

/// The sequence that a preset's file holds. Heads, channels and layers differ in mean and size.
#[allow(dead_code)]
pub fn written(preset: Preset) -> (CpuCache, SequenceId) {
    let mut cache = CpuCache::new(&config(preset)).unwrap();
    let id = cache.create_sequence().unwrap();
    let mut state = 1u32;
    let mut tensor = |scale: f32| -> Vec<f32> {
        (0..TOKENS * KV_HEADS * DIM)
            .map(|i| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                let noise = (state >> 8) as f32 / 8_388_608.0 - 1.0;
                let (head, channel) = (i / DIM % KV_HEADS, i % DIM);
                scale * (noise * (1 + channel % 5) as f32 + (head * 4) as f32 + (channel % 7) as f32)
            })
            .collect()
    };
    let layers = [(tensor(1.0), tensor(0.5)), (tensor(-2.0), tensor(0.25))];
    let inputs = layers.each_ref().map(|(k, v)| LayerInput { k, v, ..LayerInput::default() });
    cache.step(&[SequenceStep::append(id, TOKENS as u32)], &inputs).unwrap();
    (cache, id)
}
