//! What SmolLM2's file does not have, on tiny models of random weights: biases, RoPE of halves and of scaled
//! frequencies, 4-bit blocks of both kinds among others, SentencePiece. Tokens and losses are llama.cpp's, of
//! the same weights in f32 (tests/tiny/make.py).

use llama::format::Format;
use llama::gguf::Gguf;
use llama::gpu::Gpu;
use llama::model::Model;
use llama::room::Room;
use llama::score::read_and_score;
use llama::shape::Shape;
use llama::tokenizer::Tokenizer;
use std::path::Path;

#[derive(serde::Deserialize)]
struct Reference {
    text: String,
    tokens: Vec<u32>,
    losses: Vec<f32>,
}

fn check(name: &str) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/tiny");
    let reference = std::fs::read(folder.join(name).with_extension("json")).unwrap();
    let reference: Reference = serde_json::from_slice(&reference).unwrap();
    let mut file = Gguf::open(&folder.join(name).with_extension("gguf")).unwrap();
    let shape = Shape::of(&mut file).unwrap();
    let tokenizer = Tokenizer::new(&file).unwrap();
    assert_eq!(tokenizer.encode(&reference.text).unwrap(), reference.tokens);
    assert_eq!(tokenizer.decode(&reference.tokens).unwrap().trim_start(), reference.text);

    let room = Room { tokens: 32, logits: 32, context: reference.tokens.len() as u32 };
    let model = Model::load(Gpu::open(None).unwrap(), file, shape, room, |_, _| {}).unwrap();
    let sixteen: Format = "16".parse().unwrap();
    // Steps of many tokens and of one go through kernels of their own.
    for chunk in [32, 1] {
        let mut contexts = [model.context_with_sequence(&sixteen.apply(model.cache_config())).unwrap()];
        let scores = read_and_score(&model, &mut contexts, &reference.tokens, chunk, 1, |_| {}).unwrap();
        assert_eq!(scores[0].len(), reference.losses.len());
        let apart = scores[0].iter().zip(&reference.losses).map(|(score, loss)| (score.loss - loss).abs());
        let apart = apart.fold(0.0, f32::max);
        eprintln!("{name}, steps of {chunk}: losses at most {apart} apart");
        assert!(apart < 0.02, "{apart}");
    }
}

#[test]
fn qwen2_is_llama_cpps() {
    check("qwen2");
}

#[test]
fn llama_is_llama_cpps() {
    check("llama");
}
