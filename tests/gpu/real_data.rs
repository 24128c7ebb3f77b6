//! Keys, values and queries of real models: the GPU against the oracle on the same steps.

#[path = "../../examples/support/real_data.rs"]
mod files;

use crate::support::{Pair, Tensors};
use files::RealData;
use kivi_wgpu::{Bits, CacheConfig, SequenceStep};
use std::path::PathBuf;

#[test]
fn real_models() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    for file in ["qwen05b_L00", "qwen05b_L23", "smollm2_L00", "smollm2_L29"] {
        let data = RealData::load(&folder.join(format!("{file}.safetensors"))).unwrap();
        let (row, query_row) = (data.token_len(), data.query_heads * data.head_dim);
        for (key_bits, value_bits, sinks) in [(Bits::Two, Bits::Two, 0), (Bits::Four, Bits::Two, 4)] {
            let config =
                CacheConfig::new(1, data.query_heads as u32, data.kv_heads as u32, data.head_dim as u32)
                    .with_bits(key_bits, value_bits)
                    .with_sink_tokens(sinks);
            let mut pair = Pair::new(&config);
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
                let step = SequenceStep { sequence: s, append: n as u32, attend: queries as u32 };
                pair.step_with(&[step], &[tensors]);
                done += n;
            }
            assert_eq!(done, data.tokens);
            pair.check_state(s);
        }
    }
}
