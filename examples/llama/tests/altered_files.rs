//! Altered GGUF files: each is an error that names the key, the tensor or the file, never a panic and never
//! nonsense.

use candle_core::quantized::gguf_file::{self, Content, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use llama::gguf::Gguf;
use llama::gpu::Gpu;
use llama::model::Model;
use llama::room::{Room, asked};
use llama::shape::Shape;
use llama::tokenizer::Tokenizer;
use std::collections::BTreeMap;
use std::io::Cursor;
use std::path::{Path, PathBuf};

/// The parts of a tiny model's file.
struct File {
    metadata: BTreeMap<String, Value>,
    tensors: BTreeMap<String, QTensor>,
}

fn tiny(name: &str) -> Vec<u8> {
    std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/tiny").join(name)).unwrap()
}

impl File {
    fn read(bytes: &[u8]) -> File {
        let mut bytes = Cursor::new(bytes);
        let content = Content::read(&mut bytes).unwrap();
        let names: Vec<String> = content.tensor_infos.keys().cloned().collect();
        let tensor = |name: String| {
            let tensor = content.tensor(&mut bytes, &name, &Device::Cpu).unwrap();
            (name, tensor)
        };
        File {
            tensors: names.into_iter().map(tensor).collect(),
            metadata: content.metadata.into_iter().collect(),
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let metadata: Vec<_> = self.metadata.iter().map(|(key, value)| (key.as_str(), value)).collect();
        let tensors: Vec<_> = self.tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
        let mut bytes = Cursor::new(Vec::new());
        gguf_file::write(&mut bytes, &metadata, &tensors).unwrap();
        bytes.into_inner()
    }

    fn set(&mut self, key: &str, value: Value) {
        self.metadata.insert(key.into(), value);
    }

    /// Puts a tensor of f32 in the place of another, or beside the others.
    fn put(&mut self, name: &str, values: Vec<f32>, shape: &[usize]) {
        let tensor = Tensor::from_vec(values, shape, &Device::Cpu).unwrap();
        self.tensors.insert(name.into(), QTensor::quantize(&tensor, GgmlDType::F32).unwrap());
    }
}

/// A file of its own for each test and case.
fn written(folder: &Path, bytes: &[u8]) -> PathBuf {
    let path = folder.join("altered.gguf");
    std::fs::write(&path, bytes).unwrap();
    path
}

/// Everything that is read before the weights.
fn open(path: &Path) -> anyhow::Result<(Gguf, Shape, Tokenizer)> {
    let mut file = Gguf::open(path)?;
    let shape = Shape::of(&mut file)?;
    let tokenizer = Tokenizer::new(&file)?;
    Ok((file, shape, tokenizer))
}

fn error(folder: &Path, bytes: &[u8]) -> String {
    match open(&written(folder, bytes)) {
        Ok(_) => "no error".into(),
        Err(error) => format!("{error:#}"),
    }
}

#[test]
fn metadata_out_of_range_or_of_another_type() {
    use Value::{Array, Bool, F32, I32, String as Text, U32, U64};
    let folder = tempfile::tempdir().unwrap();
    let list = |values: &[u32]| Array(values.iter().map(|x| U32(*x)).collect());
    for name in ["llama", "qwen2"] {
        let original = tiny(&format!("{name}.gguf"));
        let layers = match File::read(&original).metadata[&format!("{name}.block_count")].to_u32() {
            Ok(layers) => layers as usize,
            Err(error) => panic!("{error}"),
        };
        let of = |key: &str| format!("{name}.{key}");
        let numbers = [
            (
                of("attention.head_count"),
                vec![U32(0), I32(-1), U32(5000), Text("3".into()), F32(2.0), Bool(true), list(&[])],
            ),
            (
                of("attention.head_count_kv"),
                vec![U32(0), U32(1000), I32(-2), Array(vec![]), Array(vec![Text("1".into()); layers])],
            ),
            (of("block_count"), vec![U32(0), U32(u32::MAX), U64(1 << 40)]),
            (of("embedding_length"), vec![U32(0), U32(31), U32(1 << 31), U64(1 << 33)]),
            (of("feed_forward_length"), vec![U32(0), U32(33), U32(u32::MAX)]),
            (of("context_length"), vec![U32(0), U64(1 << 31), F32(f32::NAN)]),
            (
                of("attention.layer_norm_rms_epsilon"),
                vec![F32(f32::NAN), F32(0.0), F32(-1e-5), F32(f32::INFINITY), Text("1e-5".into())],
            ),
            (of("attention.key_length"), vec![U32(0), U32(12), U32(1 << 20)]),
            (of("attention.value_length"), vec![U32(8), U32(0)]),
            (of("rope.freq_base"), vec![F32(0.0), F32(-1.0), F32(f32::NAN), F32(f32::INFINITY)]),
            (of("rope.dimension_count"), vec![U32(0), U32(8), U32(u32::MAX)]),
            (of("rope.scaling.factor"), vec![F32(-2.0), F32(f32::NAN)]),
            (of("rope.scaling.type"), vec![Text("yarn".into()), U32(1)]),
            (of("expert_count"), vec![U32(8)]),
            ("general.architecture".into(), vec![Text("mamba".into()), U32(1)]),
            ("general.name".into(), vec![U32(1)]),
            ("tokenizer.ggml.model".into(), vec![Text("bert".into()), U32(1)]),
            ("tokenizer.ggml.tokens".into(), vec![Array(vec![]), list(&[1, 2, 3, 4]), Text("a".into())]),
            (
                "tokenizer.ggml.token_type".into(),
                vec![list(&[1, 1, 1]), Array(vec![Text("1".into())]), U32(1)],
            ),
            ("tokenizer.ggml.bos_token_id".into(), vec![U32(1 << 20), I32(-1), Text("<s>".into())]),
            ("tokenizer.ggml.eos_token_id".into(), vec![U32(u32::MAX), F32(2.0)]),
            ("tokenizer.ggml.add_bos_token".into(), vec![U32(1)]),
            ("tokenizer.chat_template".into(), vec![U32(1)]),
        ];
        for (key, values) in numbers {
            for value in values {
                let mut file = File::read(&original);
                let what = format!("{name}: {key} = {value:?}");
                file.set(&key, value);
                // A scaling's factor counts where it is linear.
                if key.ends_with("factor") {
                    file.set(&of("rope.scaling.type"), Text("linear".into()));
                }
                let error = error(folder.path(), &file.bytes());
                assert!(error.contains(&key), "{what}: {error}");
            }
        }
        for key in [
            "block_count",
            "embedding_length",
            "attention.head_count",
            "feed_forward_length",
            "context_length",
        ] {
            let mut file = File::read(&original);
            file.metadata.remove(&of(key));
            let error = error(folder.path(), &file.bytes());
            assert!(error.contains(&format!("the file has no {}", of(key))), "{error}");
        }

        // Written once for each layer, alike or not.
        let mut file = File::read(&original);
        let heads = file.metadata[&of("attention.head_count_kv")].to_u32().unwrap();
        file.set(&of("attention.head_count_kv"), list(&vec![heads; layers]));
        let (_, shape, _) = open(&written(folder.path(), &file.bytes())).unwrap();
        assert_eq!(shape.kv_heads, heads);
        let mut different = vec![heads; layers];
        different[layers - 1] = if heads == 1 { 2 } else { 1 };
        file.set(&of("attention.head_count_kv"), list(&different));
        let refused = error(folder.path(), &file.bytes());
        assert!(refused.contains("head_count_kv differs"), "{refused}");
        assert!(open(&written(folder.path(), &original)).is_ok());
    }
}

#[test]
fn scores_and_kinds_of_another_number_than_tokens() {
    let folder = tempfile::tempdir().unwrap();
    for key in ["tokenizer.ggml.scores", "tokenizer.ggml.token_type"] {
        let mut file = File::read(&tiny("llama.gguf"));
        let Value::Array(list) = file.metadata[key].clone() else { panic!("{key} is no list") };
        let mut altered = vec![list[1..].to_vec(), [&list[..], &list[..1]].concat(), vec![]];
        if key == "tokenizer.ggml.scores" {
            altered.push([&list[1..], &[Value::F32(f32::NAN)]].concat());
        }
        for altered in altered {
            file.set(key, Value::Array(altered));
            let error = error(folder.path(), &file.bytes());
            assert!(error.contains(key), "{error}");
        }
    }
}

#[test]
fn files_that_are_empty_cut_or_foreign() {
    let folder = tempfile::tempdir().unwrap();
    let original = tiny("llama.gguf");
    let foreign = [
        &b""[..],
        b"GG",
        b"PK\x03\x04 a zip file and more of it",
        &original[..200],
        &original[..4000],
        &[0xff; 5000],
    ];
    for bytes in foreign {
        let error = error(folder.path(), bytes);
        assert!(
            error.contains("altered.gguf") && error.contains("fetch it again"),
            "{} bytes: {error}",
            bytes.len()
        );
    }
    let mut aligned = File::read(&original);
    for zero in [Value::U32(0), Value::I32(0), Value::U16(0), Value::U8(0)] {
        aligned.set("general.alignment", zero);
        let refused = error(folder.path(), &aligned.bytes());
        assert!(refused.contains("altered.gguf") && refused.contains("general.alignment"), "{refused}");
    }
    // What is only called so is no alignment.
    let mut called = File::read(&original);
    called.set("general.name", Value::String("about general.alignment".into()));
    called.set("a.general.alignment", Value::U32(0));
    assert_eq!(error(folder.path(), &called.bytes()), "no error");
    // A kind of blocks that nobody has made yet: the file may be as it should be.
    let mut unknown = original.clone();
    let kind = dimensions(&original, "blk.0.attn_q.weight") + 4 + 16;
    unknown[kind..kind + 4].copy_from_slice(&999u32.to_le_bytes());
    let refused = error(folder.path(), &unknown);
    assert!(refused.contains("cannot read") && !refused.contains("again"), "{refused}");
    // All of the header is there: the first tensor that is cut is named.
    for kept in [original.len() - 1, original.len() / 2] {
        let error = error(folder.path(), &original[..kept]);
        let named = error.contains(if kept == original.len() / 2 {
            "the tensor blk."
        } else {
            "the tensor rope_freqs"
        });
        assert!(error.contains("altered.gguf: the file was cut") && named, "{error}");
    }
    let missing = format!("{:#}", open(&folder.path().join("none.gguf")).map(drop).unwrap_err());
    assert!(missing.contains("none.gguf") && missing.contains("cargo xtask model"), "{missing}");
}

/// Where a tensor's number of dimensions stands in a file.
fn dimensions(bytes: &[u8], tensor: &str) -> usize {
    let name = [&(tensor.len() as u64).to_le_bytes()[..], tensor.as_bytes()].concat();
    bytes.windows(name.len()).position(|w| w == name).unwrap() + name.len()
}

#[test]
fn tensors_of_impossible_shapes_and_places() {
    let folder = tempfile::tempdir().unwrap();
    let tensor = "blk.0.attn_q.weight";
    let at = dimensions(&tiny("llama.gguf"), tensor);
    // Two dimensions, the type, the offset.
    for (place, value) in [
        (4, 1u64 << 40),
        (4, u64::MAX),
        (4, 0),
        (4 + 8, 1 << 60),
        (4 + 16 + 4, u64::MAX),
        (4 + 16 + 4, 1 << 40),
    ] {
        let mut bytes = tiny("llama.gguf");
        bytes[at + place..at + place + 8].copy_from_slice(&value.to_le_bytes());
        if value == 1 << 40 && place == 4 {
            // Both: their product overflows.
            bytes[at + 12..at + 20].copy_from_slice(&value.to_le_bytes());
        }
        let error = error(folder.path(), &bytes);
        assert!(error.contains(tensor) && error.contains("again"), "{place} {value}: {error}");
    }
}

/// Weights that are no numbers, tensors that are not there or of another shape: found while they are loaded.
#[test]
fn weights_that_are_no_numbers() {
    let folder = tempfile::tempdir().unwrap();
    let load = |bytes: &[u8]| {
        let (file, shape, _) = open(&written(folder.path(), bytes))?;
        let gpu = Gpu::open(None)?;
        let small = |option| asked(16u32, option);
        let room = Room::new(&gpu, &shape, small("--chunk"), small("--chunk"), small("--context"))?;
        Model::load(gpu, file, shape, room, |_, _| {}).map(drop)
    };
    let original = tiny("llama.gguf");
    load(&original).unwrap();
    let shape = open(&written(folder.path(), &original)).unwrap().1;
    let (hidden, pairs) = (shape.hidden as usize, shape.head_dim as usize / 2);
    let check = |name: &str, alter: &dyn Fn(&mut File)| {
        let mut file = File::read(&original);
        alter(&mut file);
        let error = format!("{:#}", load(&file.bytes()).unwrap_err());
        assert!(error.contains(name), "{name}: {error}");
    };
    let norm = "blk.1.attn_norm.weight";
    for wrong in [f32::NAN, f32::INFINITY] {
        check(norm, &|file| file.put(norm, [vec![1.0; hidden - 1], vec![wrong]].concat(), &[hidden]));
    }
    check(norm, &|file| file.put(norm, vec![1.0; hidden + 32], &[hidden + 32]));
    check(norm, &|file| drop(file.tensors.remove(norm)));
    let output = "blk.0.attn_output.weight";
    // A NaN, and what f16 does not hold.
    for wrong in [f32::NAN, f32::NEG_INFINITY, 70_000.0] {
        let columns = (shape.query_heads * shape.head_dim) as usize;
        let values = [vec![wrong], vec![0.1; hidden * columns - 1]].concat();
        check(output, &|file| file.put(output, values.clone(), &[hidden, columns]));
    }
    for factor in [0.0, -1.0, f32::NAN] {
        check("rope_freqs.weight", &|file| file.put("rope_freqs.weight", vec![factor; pairs], &[pairs]));
    }
    check("token_embd.weight", &|file| file.put("token_embd.weight", vec![0.5; hidden * 4], &[4, hidden]));

    // The scale of a 4-bit block.
    let content = Content::read(&mut Cursor::new(&original)).unwrap();
    let (name, info) = content
        .tensor_infos
        .iter()
        .filter(|(_, info)| matches!(info.ggml_dtype, GgmlDType::Q4_0 | GgmlDType::Q4_1))
        .min_by_key(|(_, info)| info.offset)
        .unwrap();
    let mut bytes = original.clone();
    let at = (content.tensor_data_offset + info.offset) as usize;
    bytes[at..at + 2].copy_from_slice(&0x7e00u16.to_le_bytes());
    let error = format!("{:#}", load(&bytes).unwrap_err());
    assert!(error.contains(name.as_str()), "{error}");
}
