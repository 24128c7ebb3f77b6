//! Keys, values and queries of real models: the GPU against the oracle on the same steps.

#[path = "../../examples/support/real_data.rs"]
mod files;

use crate::support::{Pair, Tensors, may_be_missing, skipped};
use files::RealData;
use kivi_wgpu::{Bits, CacheConfig, Error, SequenceStep, Variant};
use std::path::PathBuf;

/// Runs all files through `pair`s of a configuration, the last eight positions with queries.
fn run(key_bits: Bits, value_bits: Bits, sinks: u32, pair_of: impl Fn(&CacheConfig) -> Option<Pair>) {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    for file in ["qwen05b_L00", "qwen05b_L23", "smollm2_L00", "smollm2_L29"] {
        let data = RealData::load(&folder.join(format!("{file}.safetensors"))).unwrap();
        let (row, query_row) = (data.token_len(), data.query_heads * data.head_dim);
        let config = CacheConfig::new(1, data.query_heads as u32, data.kv_heads as u32, data.head_dim as u32)
            .with_bits(key_bits, value_bits)
            .with_sink_tokens(sinks);
        let Some(mut pair) = pair_of(&config) else { return };
        let s = pair.create_sequence();
        let mut done = 0usize;
        // A prompt in two chunks, then the eight positions with queries: five at once, then one at a time.
        for (n, queries) in [(500, 0), (512, 0), (4, 0), (5, 5), (1, 1), (1, 1), (1, 1)] {
            let first_query = done.saturating_sub(data.tokens - data.queries);
            let q = &data.q[first_query * query_row..(first_query + queries) * query_row];
            let tensors = Tensors {
                k: data.k[done * row..(done + n) * row].to_vec(),
                v: data.v[done * row..(done + n) * row].to_vec(),
                q: q.to_vec(),
            };
            let step = SequenceStep::new(s, n as u32, queries as u32);
            pair.step_with(&[step], &[tensors]);
            done += n;
        }
        assert_eq!(done, data.tokens);
        pair.check_state(s);
        let mean = pair.mean_error();
        let worst = pair.errors.borrow().iter().copied().fold(0.0, f64::max);
        // Most rows are far nearer than the worst.
        assert!(mean <= 1e-5, "{file}: {mean}");
        eprintln!(
            "{file}, {:?}: relative error {mean:.2e} on average, {worst:.2e} at worst",
            pair.gpu.variant()
        );
    }
}

#[test]
fn real_models() {
    run(Bits::Two, Bits::Two, 0, |config| Some(Pair::new(config)));
    run(Bits::Four, Bits::Two, 4, |config| Some(Pair::new(config)));
}

#[test]
fn real_models_with_subgroup_kernels() {
    let variant = Variant::Subgroups;
    run(Bits::Two, Bits::Two, 0, |config| match Pair::with_variant(config, variant) {
        Ok(pair) => Some(pair),
        Err(Error::VariantUnavailable { needed, .. }) if may_be_missing(variant) => {
            skipped(variant, needed);
            None
        }
        Err(other) => panic!("{other}"),
    });
}
