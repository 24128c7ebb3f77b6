//! Text to tokens and back, by the vocabulary in a GGUF file, and its chat template. The algorithms are Hugging Face's tokenizers, the template engine minijinja.

use crate::gguf::Gguf;
use anyhow::{Context, Result, anyhow, bail};
use minijinja::{Environment, ErrorKind, context};
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::HashMap;

/// How words are split where the digits of a number stand alone, in groups of three, or one by one.
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// A vocabulary and what belongs to it.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    template: Option<String>,
    bos: Option<u32>,
    adds_bos: bool,
    /// Tokens that end a text or a turn.
    pub ends: Vec<u32>,
}

/// One message of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, serde::Deserialize)]
pub struct Message {
    /// `system`, `user` or `assistant`.
    pub role: String,
    pub content: String,
}

impl Tokenizer {
    pub fn new(file: &Gguf) -> Result<Tokenizer> {
        let tokens = strings(file, "tokenizer.ggml.tokens")?;
        let vocabulary: HashMap<&str, usize> =
            tokens.iter().enumerate().map(|(id, token)| (token.as_str(), id)).collect();
        let mut model = json!({ "type": "BPE", "vocab": vocabulary, "merges": [] });
        let byte_level = |splits: bool| json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": splits });
        let split = |pattern: &str| json!({ "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated", "invert": false });
        let sequence = |parts: Vec<Value>| json!({ "type": "Sequence", "pretokenizers": parts });
        let (normalizer, pre_tokenizer, decoder);
        match file.string("tokenizer.ggml.model")? {
            "gpt2" => {
                model["merges"] = json!(strings(file, "tokenizer.ggml.merges")?);
                decoder = byte_level(true);
                // Old converters have not written it: how the model was trained to split words is unknown then.
                let splits = file.string("tokenizer.ggml.pre").context("convert the model anew")?;
                (normalizer, pre_tokenizer) = match splits {
                    "gpt-2" => (Value::Null, byte_level(true)),
                    "smollm" => {
                        let digits = json!({ "type": "Digits", "individual_digits": true });
                        (Value::Null, sequence(vec![digits, byte_level(true)]))
                    }
                    "qwen2" => (json!({ "type": "NFC" }), sequence(vec![split(QWEN2), byte_level(false)])),
                    "llama-bpe" | "llama3" => {
                        model["ignore_merges"] = json!(true);
                        (Value::Null, sequence(vec![split(LLAMA3), byte_level(false)]))
                    }
                    other => bail!("the tokenizer splits words as {other} does, which this example cannot"),
                };
            }
            "llama" => {
                model["merges"] = json!(merges(&tokens, &vocabulary, &scores(file)?));
                model["byte_fallback"] = json!(true);
                model["fuse_unk"] = json!(true);
                model["unk_token"] = json!("<unk>");
                let underscore = json!({ "type": "Replace", "pattern": { "String": " " }, "content": "▁" });
                let (mut steps, mut back) = (vec![underscore], Vec::new());
                let prefix = file.metadata().get("tokenizer.ggml.add_space_prefix");
                if prefix.is_none_or(|prefix| prefix.to_bool().unwrap_or(true)) {
                    steps.insert(0, json!({ "type": "Prepend", "prepend": "▁" }));
                    back.push(json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
                }
                normalizer = json!({ "type": "Sequence", "normalizers": steps });
                pre_tokenizer = Value::Null;
                let space = json!({ "type": "Replace", "pattern": { "String": "▁" }, "content": " " });
                let decoders = [space, json!({ "type": "ByteFallback" }), json!({ "type": "Fuse" })];
                let decoders: Vec<Value> = decoders.into_iter().chain(back).collect();
                decoder = json!({ "type": "Sequence", "decoders": decoders });
            }
            other => bail!("a tokenizer of kind {other}; this example knows gpt2 and llama"),
        }
        let kinds = file.list("tokenizer.ggml.token_type").unwrap_or_default();
        let added: Vec<Value> = kinds
            .iter()
            .zip(&tokens)
            .enumerate()
            // 3: control, 4: defined by the user.
            .filter_map(|(id, (kind, token))| match kind.to_i32() {
                Ok(kind @ (3 | 4)) => Some((id, kind == 3, token)),
                _ => None,
            })
            .map(|(id, special, content)| {
                json!({ "id": id, "content": content, "special": special, "normalized": false,
                        "single_word": false, "lstrip": false, "rstrip": false })
            })
            .collect();
        let description = json!({ "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
            "normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "post_processor": null, "decoder": decoder, "model": model });
        let inner = tokenizers::Tokenizer::from_bytes(serde_json::to_vec(&description)?).map_err(failed)?;

        let id = |key: &str| file.number(key).ok().map(|id| id as u32);
        let mut ends: Vec<u32> = id("tokenizer.ggml.eos_token_id").into_iter().collect();
        // Turns end with these in the models that have them, whatever the file calls the end of a text.
        let special = |id: &u32| kinds.get(*id as usize).is_some_and(|kind| matches!(kind.to_i32(), Ok(3)));
        let turns = ["<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "</s>"];
        ends.extend(turns.iter().filter_map(|name| inner.token_to_id(name)).filter(special));
        let bos = id("tokenizer.ggml.bos_token_id");
        let flag = |key: &str| file.metadata().get(key).and_then(|value| value.to_bool().ok());
        // Files of the older kind and those of Llama 3 do not say, and mean yes.
        let silent = matches!(file.string("tokenizer.ggml.model"), Ok("llama"))
            || matches!(file.string("tokenizer.ggml.pre"), Ok("llama-bpe" | "llama3"));
        let adds_bos = flag("tokenizer.ggml.add_bos_token").unwrap_or(silent);
        let template = file.string("tokenizer.chat_template").ok().map(str::to_string);
        Ok(Tokenizer { inner, template, bos, adds_bos, ends })
    }

    /// The tokens of a text, special ones by their names; with the token that begins a text if the model wants it.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let bos = self.bos.filter(|_| self.adds_bos);
        Ok(bos.into_iter().chain(self.encode_part(text)?).collect())
    }

    /// The tokens of a part of a text.
    pub fn encode_part(&self, text: &str) -> Result<Vec<u32>> {
        Ok(self.inner.encode_fast(text, false).map_err(failed)?.get_ids().to_vec())
    }

    pub fn decode(&self, tokens: &[u32]) -> Result<String> {
        self.inner.decode(tokens, true).map_err(failed)
    }

    /// A function that turns tokens to text one by one; a character that is not complete waits for its rest.
    pub fn streaming(&self) -> impl FnMut(u32) -> String {
        let mut stream = self.inner.decode_stream(true);
        move |token| match stream.step(token) {
            Ok(text) => text.unwrap_or_default(),
            // Bytes that are no character turn others before them, which are shown already, into what they are not.
            Err(_) => {
                stream = self.inner.decode_stream(true);
                "\u{fffd}".to_string()
            }
        }
    }

    /// A conversation as the model was trained to read it, with the beginning of the assistant's answer if `answer`.
    pub fn conversation(&self, messages: &[Message], answer: bool) -> Result<Vec<u32>> {
        let template = self.template.as_deref().context("the file has no chat template")?;
        let mut environment = Environment::new();
        // As those who write templates assume: Hugging Face renders them so.
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |message: String| -> Result<String, minijinja::Error> {
            Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
        });
        let name = |id: Option<u32>| id.and_then(|id| self.inner.id_to_token(id)).unwrap_or_default();
        let values = context! {
            messages,
            add_generation_prompt => answer,
            bos_token => name(self.bos),
            eos_token => name(self.ends.first().copied()),
        };
        let text = environment.render_str(template, values)?;
        let tokens = self.encode_part(&text)?;
        // Most templates begin with it themselves.
        let bos = self.bos.filter(|bos| self.adds_bos && tokens.first() != Some(bos));
        Ok(bos.into_iter().chain(tokens).collect())
    }
}

fn strings(file: &Gguf, key: &str) -> Result<Vec<String>> {
    file.list(key)?.iter().map(|value| Ok(value.to_string()?.clone())).collect()
}

fn scores(file: &Gguf) -> Result<Vec<f32>> {
    file.list("tokenizer.ggml.scores")?.iter().map(|value| Ok(value.to_f32()?)).collect()
}

/// The merges of a SentencePiece vocabulary, which has scores instead: every way to join two pieces to a third, those of higher scores first.
fn merges(tokens: &[String], vocabulary: &HashMap<&str, usize>, scores: &[f32]) -> Vec<[String; 2]> {
    let mut order: Vec<usize> = (0..tokens.len()).collect();
    order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
    let mut merges = Vec::new();
    for id in order {
        let token = &tokens[id];
        let mut halves: Vec<(&str, &str)> = token
            .char_indices()
            .skip(1)
            .map(|(at, _)| token.split_at(at))
            .filter(|(a, b)| vocabulary.contains_key(a) && vocabulary.contains_key(b))
            .collect();
        halves.sort_by_key(|(a, b)| (vocabulary[a], vocabulary[b]));
        merges.extend(halves.into_iter().map(|(a, b)| [a.to_string(), b.to_string()]));
    }
    merges
}

fn failed(error: tokenizers::Error) -> anyhow::Error {
    anyhow!(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merges_of_sentence_pieces() {
        let tokens = ["a", "b", "c", "ab", "bc", "abc"].map(String::from);
        let vocabulary = tokens.iter().enumerate().map(|(id, token)| (token.as_str(), id)).collect();
        let pair = |a: &str, b: &str| [a.to_string(), b.to_string()];
        let expected = [pair("b", "c"), pair("a", "b"), pair("a", "bc"), pair("ab", "c")];
        assert_eq!(merges(&tokens, &vocabulary, &[-9.0, -9.0, -9.0, -2.0, -1.0, -3.0]), expected);
    }
}
