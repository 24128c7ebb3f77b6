//! The files of saved sequences do not change by accident, and their heads lie where the format says.

mod files;

use files::{DIM, KV_HEADS, goldens, written};
use kivi_wgpu::oracle::{CpuCache, LayerInput};
use kivi_wgpu::{CacheConfig, Preset, SequenceStep, Snapshot};
use safetensors::SafeTensors;

/// Every preset writes today what it wrote once, and reads it. `KIVI_RECORD=1` writes the files anew.
#[test]
fn every_preset_writes_its_file() {
    assert_eq!(goldens().len(), Preset::ALL.len());
    for (preset, file, config) in goldens() {
        let (cache, id) = written(preset);
        let snapshot = cache.save(id).unwrap();
        let bytes = snapshot.to_bytes().unwrap();
        if std::env::var("KIVI_RECORD").is_ok() {
            let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/golden");
            std::fs::write(format!("{folder}/{preset:?}.safetensors"), &bytes).unwrap();
            continue;
        }
        assert!(bytes == file, "{preset:?}: the bytes of a snapshot have changed: that needs a new version");
        let read = Snapshot::from_bytes(file).unwrap();
        assert!(read == snapshot, "{preset:?}");
        let mut other = CpuCache::new(&config).unwrap();
        let (loaded, _) = other.load(&read).unwrap();
        for layer in 0..2 {
            assert!(other.state(layer, loaded).unwrap() == cache.state(layer, id).unwrap(), "{preset:?}");
        }
    }
}

fn half(x: f32) -> u16 {
    half::f16::from_f32(x).to_bits()
}

/// A sequence whose heads are constants of their own, read without the library: each head's tokens, codes and
/// parameters stand in its own place.
#[test]
fn heads_lie_in_their_order() {
    // KIVI's format: 2 bits in groups of 32, here with a window of 3 and two sinks.
    let config = CacheConfig::new(1, KV_HEADS as u32, KV_HEADS as u32, DIM as u32)
        .with_residual_window(3)
        .with_sink_tokens(2);
    let key = |head: usize| 1.0 + head as f32;
    let value = |head: usize| -10.0 * (1.0 + head as f32);
    let tokens = 2 + 32 + 3;
    let rows = |x: &dyn Fn(usize) -> f32| -> Vec<f32> {
        (0..tokens).flat_map(|_| (0..KV_HEADS).flat_map(|head| vec![x(head); DIM])).collect()
    };
    let (k, v) = (rows(&key), rows(&value));
    let mut cache = CpuCache::new(&config).unwrap();
    let id = cache.create_sequence().unwrap();
    let input = LayerInput { k: &k, v: &v, ..LayerInput::default() };
    cache.step(&[SequenceStep::append(id, tokens as u32)], &[input]).unwrap();
    let file = cache.save(id).unwrap().to_bytes().unwrap();

    let tensors = SafeTensors::deserialize(&file).unwrap();
    for (name, x) in [("keys", &key as &dyn Fn(usize) -> f32), ("values", &value)] {
        for (part, count) in [("sinks", 2), ("window", 3)] {
            let tensor = tensors.tensor(&format!("layers.0.{part}.{name}")).unwrap();
            assert_eq!(tensor.shape(), [count, KV_HEADS, DIM]);
            for (i, bytes) in tensor.data().chunks(2).enumerate() {
                let head = i / DIM % KV_HEADS;
                assert_eq!(
                    u16::from_le_bytes([bytes[0], bytes[1]]),
                    half(x(head)),
                    "{part} {name}, head {head}"
                );
            }
        }
    }
    let blocks = tensors.tensor("layers.0.blocks").unwrap();
    let words: Vec<u32> =
        blocks.data().chunks(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    // Keys: a word of 16 codes per token and 16 channels, then a parameter per channel. Values: the same
    // codes, then a parameter per token.
    let codes = 32 * DIM / 16;
    let head_words = codes + DIM + codes + 32;
    assert_eq!(blocks.shape(), [1, KV_HEADS, head_words]);
    for (head, words) in words.chunks(head_words).enumerate() {
        // A constant is its minimum, with scale and codes 0.
        let constant = |x: f32| u32::from(half(x)) << 16;
        let expected =
            [vec![0; codes], vec![constant(key(head)); DIM], vec![0; codes], vec![constant(value(head)); 32]];
        assert!(words == expected.concat(), "head {head}");
    }
}
