//! Writes `fuzz/seed`: snapshots of the configurations that the target loads.

use kivi_wgpu::oracle::{CpuCache, LayerInput};
use kivi_wgpu::{Bits, CacheConfig, Dtype, SequenceStep};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    std::fs::create_dir_all("fuzz/seed")?;
    for (bits, format) in [(Bits::Two, Dtype::F16), (Bits::Sixteen, Dtype::Bf16), (Bits::Four, Dtype::F32)] {
        let config = CacheConfig::new(2, 1, 1, 16).with_bits(bits, bits).with_group_size(16);
        let config = config.with_residual_window(5).with_sink_tokens(2).with_window_format(format);
        for tokens in [0, 1, 20, 50] {
            let mut cache = CpuCache::new(&config)?;
            let id = cache.create_sequence()?;
            let row: Vec<f32> = (0..tokens * 16).map(|i| (i as f32 * 0.7).sin()).collect();
            let input = LayerInput { k: &row, v: &row, ..Default::default() };
            if tokens > 0 {
                cache.step(&[SequenceStep::append(id, tokens)], &[input, input])?;
            }
            let name = format!("fuzz/seed/{}-{format:?}-{tokens}.safetensors", bits.get());
            std::fs::write(name, cache.save(id)?.to_bytes()?)?;
        }
    }
    Ok(())
}
