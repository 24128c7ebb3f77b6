//! Text to tokens and back, by the vocabulary in a GGUF file. The algorithms are those of Hugging Face's
//! tokenizers.

use crate::gguf::{Gguf, integer};
use crate::template::{Message, Part, Template};
use anyhow::{Context, Result, anyhow, bail, ensure};
use candle_core::quantized::gguf_file;
use serde_json::{Value, json};
use std::collections::{HashMap, HashSet};

/// How words are split where the digits of a number stand alone, in groups of three, or one by one.
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Tokens that end a turn in the models that have them.
const TURNS: [&str; 6] =
    ["<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "</s>"];

/// A vocabulary and what belongs to it.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// The same, to which control tokens and marks in a text are text.
    plain: tokenizers::Tokenizer,
    /// Tokens that are no text.
    control: HashSet<u32>,
    /// Tokens that are text in what the model writes, and not in what it is told: the chat template's.
    marks: HashSet<u32>,
    template: Option<Template>,
    bos: Option<u32>,
    adds_bos: bool,
    /// Tokens that end a text or a turn.
    pub ends: Vec<u32>,
}

impl Tokenizer {
    pub fn new(file: &Gguf) -> Result<Tokenizer> {
        let tokens = file.texts("tokenizer.ggml.tokens")?;
        let whole = |value: &gguf_file::Value| integer(value).and_then(|kind| i32::try_from(kind).ok());
        let kinds = file.list("tokenizer.ggml.token_type", "a whole number", whole)?;
        let kinds =
            kinds.map_or(Ok(Vec::new()), |kinds| one_each("tokenizer.ggml.token_type", kinds, &tokens))?;
        let vocabulary: HashMap<&str, usize> =
            tokens.iter().enumerate().map(|(id, token)| (token.as_str(), id)).collect();
        let mut model = json!({ "type": "BPE", "vocab": vocabulary, "merges": [] });
        let byte_level = |splits: bool| json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": splits });
        let split = |pattern: &str| json!({ "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated", "invert": false });
        let sequence = |parts: Vec<Value>| json!({ "type": "Sequence", "pretokenizers": parts });
        let (normalizer, pre_tokenizer, decoder);
        let kind = file.string("tokenizer.ggml.model")?.context("the file has no tokenizer.ggml.model")?;
        match kind {
            "gpt2" => {
                model["merges"] = json!(file.texts("tokenizer.ggml.merges")?);
                decoder = byte_level(true);
                // Old converters have not written it: how the model was trained to split words is unknown
                // then.
                let splits = file.string("tokenizer.ggml.pre")?;
                let splits = splits.context("the file has no tokenizer.ggml.pre: convert the model anew")?;
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
                    other => bail!(
                        "tokenizer.ggml.pre = {other}: a way to split words that this example does not know"
                    ),
                };
            }
            "llama" => {
                let key = "tokenizer.ggml.scores";
                let scores =
                    file.list(key, "a finite number", |value| value.to_f32().ok().filter(|x| x.is_finite()))?;
                let scores =
                    one_each(key, scores.with_context(|| format!("the file has no {key}"))?, &tokens)?;
                model["merges"] = json!(merges(&tokens, &vocabulary, &scores));
                model["byte_fallback"] = json!(true);
                model["fuse_unk"] = json!(true);
                model["unk_token"] = json!("<unk>");
                let underscore = json!({ "type": "Replace", "pattern": { "String": " " }, "content": "▁" });
                let (mut steps, mut back) = (vec![underscore], Vec::new());
                if file.flag("tokenizer.ggml.add_space_prefix")?.unwrap_or(true) {
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
            other => bail!("tokenizer.ggml.model = {other}: this example knows gpt2 and llama"),
        }
        let last = (tokens.len() as u32).saturating_sub(1);
        let id = |key: &str| file.whole(key, 0..=last);
        let (bos, eos) = (id("tokenizer.ggml.bos_token_id")?, id("tokenizer.ggml.eos_token_id")?);
        let source = file.string("tokenizer.chat_template")?;
        let control = control(&tokens, &kinds, [bos, eos]);
        let marks = marks(&tokens, &kinds, source.unwrap_or_default());
        let mut description = json!({ "version": "1.0", "truncation": null, "padding": null,
            "normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "post_processor": null, "decoder": decoder, "model": model });
        let mut build = |special: &dyn Fn(u32) -> bool| {
            // 3: control, 4: defined by the user.
            let added =
                (0u32..).zip(kinds.iter().zip(&tokens)).filter(|(_, (kind, _))| matches!(kind, 3 | 4));
            let added = added.map(|(id, (_, content))| {
                json!({ "id": id, "content": content, "special": special(id), "normalized": false,
                        "single_word": false, "lstrip": false, "rstrip": false })
            });
            description["added_tokens"] = added.collect();
            tokenizers::Tokenizer::from_bytes(serde_json::to_vec(&description)?).map_err(failed)
        };
        let inner = build(&|id| control.contains(&id))?;
        let mut plain = build(&|id| control.contains(&id) || marks.contains(&id))?;
        plain.set_encode_special_tokens(true);

        // Turns end with these in the models that have them, whatever the file calls the end of a text.
        let turns = TURNS.iter().filter_map(|name| inner.token_to_id(name)).filter(|id| control.contains(id));
        let ends: Vec<u32> = eos.into_iter().chain(turns).collect();
        // Files of the older kind and those of Llama 3 do not say, and mean yes.
        let silent =
            kind == "llama" || matches!(file.string("tokenizer.ggml.pre")?, Some("llama-bpe" | "llama3"));
        let adds_bos = file.flag("tokenizer.ggml.add_bos_token")?.unwrap_or(silent);
        let name = |id: Option<u32>| id.and_then(|id| inner.id_to_token(id)).unwrap_or_default();
        let (bos_token, eos_token) = (name(bos), name(ends.first().copied()));
        let template = source.map(|source| Template { source: source.to_string(), bos_token, eos_token });
        Ok(Tokenizer { inner, plain, control, marks, template, bos, adds_bos, ends })
    }

    /// The tokens of a text, special ones by their names; with the token that begins a text if the model
    /// wants it.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let bos = self.bos.filter(|_| self.adds_bos);
        Ok(bos.into_iter().chain(self.encode_part(text)?).collect())
    }

    /// The tokens of a part of a text.
    pub fn encode_part(&self, text: &str) -> Result<Vec<u32>> {
        ids(&self.inner, text)
    }

    /// The tokens of a rendered conversation: the template's control tokens as such, and what stands between
    /// two of them in one piece, as it is encoded in a whole text.
    fn encode_parts(&self, parts: &[Part]) -> Result<Vec<u32>> {
        let named = self.control.iter().chain(&self.marks);
        let named = named.filter_map(|id| Some((self.inner.id_to_token(*id)?, *id)));
        let names: Vec<(String, u32)> = named.filter(|(name, _)| !name.is_empty()).collect();
        let (mut tokens, mut text) = (Vec::new(), String::new());
        for part in parts {
            let mut rest = match part {
                Part::Message(message) => {
                    text += message;
                    continue;
                }
                Part::Template(template) => template.as_str(),
            };
            // The first, and of those that begin there the longest.
            let next = |rest: &str| {
                let found = names.iter().filter_map(|(name, id)| Some((rest.find(name)?, name.len(), *id)));
                found.min_by_key(|(at, length, _)| (*at, std::cmp::Reverse(*length)))
            };
            while let Some((at, length, id)) = next(rest) {
                text += &rest[..at];
                tokens.extend(ids(&self.plain, &std::mem::take(&mut text))?);
                tokens.push(id);
                rest = &rest[at + length..];
            }
            text += rest;
        }
        tokens.extend(ids(&self.plain, &text)?);
        Ok(tokens)
    }

    pub fn decode(&self, tokens: &[u32]) -> Result<String> {
        self.inner.decode(tokens, true).map_err(failed)
    }

    /// For showing an answer while it is written.
    pub fn streaming(&self) -> Streaming<'_> {
        Streaming { tokenizer: self, shown: Vec::new(), waiting: Vec::new() }
    }

    /// A conversation as the model was trained to read it, with the beginning of the assistant's answer if
    /// `answer`.
    ///
    /// The template's control tokens are tokens; what looks like one in a message is text, so that nobody
    /// ends a turn or begins another by writing so.
    pub fn conversation(&self, messages: &[Message], answer: bool) -> Result<Vec<u32>> {
        let template = self.template.as_ref().context("the file has no chat template")?;
        let control = messages.iter().find_map(|message| {
            let told = message.role != "assistant";
            let is_control = |token: &u32| self.control.contains(token) || told && self.marks.contains(token);
            self.encode_part(&message.content).ok()?.into_iter().find(is_control)
        });
        let tokens = match control {
            // As one text, as others encode it: words may go across what the template ends with.
            None => self.encode_part(&template.render(messages, answer)?)?,
            Some(control) => {
                let parts = template.parts(messages, answer)?.with_context(|| {
                    let name = self.inner.id_to_token(control).unwrap_or_default();
                    format!(
                        "a message contains {name}, and the model's template changes messages: leave it out"
                    )
                })?;
                self.encode_parts(&parts)?
            }
        };
        // Most templates begin with it themselves.
        let bos = self.bos.filter(|bos| self.adds_bos && tokens.first() != Some(bos));
        Ok(bos.into_iter().chain(tokens).collect())
    }
}

/// Which tokens are no text: those that the file says, and those that begin and end texts and turns. Old
/// converters call all that was added defined by the user.
fn control(tokens: &[String], kinds: &[i32], ends: [Option<u32>; 2]) -> HashSet<u32> {
    let is_control =
        |(kind, token): (&i32, &String)| *kind == 3 || *kind == 4 && TURNS.contains(&token.as_str());
    let told = (0..).zip(kinds.iter().zip(tokens)).filter(|(_, entry)| is_control(*entry)).map(|(id, _)| id);
    told.chain(ends.into_iter().flatten()).collect()
}

/// Which tokens defined by the user the chat template writes in brackets: `<think>` and the like.
fn marks(tokens: &[String], kinds: &[i32], template: &str) -> HashSet<u32> {
    let bracketed = |token: &str| {
        let brackets = [("<", ">"), ("[", "]")];
        brackets.iter().any(|(open, close)| token.starts_with(open) && token.ends_with(close))
    };
    let is_mark = |kind: i32, token: &str| kind == 4 && bracketed(token) && template.contains(token);
    let entries = (0..).zip(kinds.iter().zip(tokens));
    entries.filter(|(_, (kind, token))| is_mark(**kind, token)).map(|(id, _)| id).collect()
}

/// Turns tokens to text one by one; a character that is not complete waits for its rest.
pub struct Streaming<'a> {
    tokenizer: &'a Tokenizer,
    /// Tokens of the text shown last, which decide how the next ones are spaced.
    shown: Vec<u32>,
    /// Those whose text is not shown yet.
    waiting: Vec<u32>,
}

impl Streaming<'_> {
    /// What is to be shown after one more token.
    pub fn push(&mut self, token: u32) -> Result<String> {
        self.waiting.push(token);
        let text = self.text()?;
        // Bytes of a character that is not complete are shown as this one.
        if text.ends_with('\u{fffd}') {
            return Ok(String::new());
        }
        self.shown = std::mem::take(&mut self.waiting);
        Ok(text)
    }

    /// What is left to show when no token follows: a character that was cut.
    pub fn finish(&mut self) -> Result<String> {
        let text = self.text()?;
        (self.shown, self.waiting) = (Vec::new(), Vec::new());
        Ok(text)
    }

    /// The text of the tokens that wait.
    fn text(&self) -> Result<String> {
        let before = self.tokenizer.decode(&self.shown)?;
        let all = self.tokenizer.decode(&[&self.shown[..], &self.waiting[..]].concat())?;
        // Bytes that are no character may turn others before them, which are shown already, into what they
        // are not.
        Ok(all.strip_prefix(&before).unwrap_or("\u{fffd}").to_string())
    }
}

/// The tokens of a text; none of none, which some tokenizers would begin with a space.
fn ids(tokenizer: &tokenizers::Tokenizer, text: &str) -> Result<Vec<u32>> {
    if text.is_empty() {
        return Ok(Vec::new());
    }
    Ok(tokenizer.encode_fast(text, false).map_err(failed)?.get_ids().to_vec())
}

/// The merges of a SentencePiece vocabulary, which has scores instead: every way to join two pieces to a
/// third, those of higher scores first.
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

/// A list that has an entry for each token.
fn one_each<T>(key: &str, list: Vec<T>, tokens: &[String]) -> Result<Vec<T>> {
    ensure!(list.len() == tokens.len(), "{key} has {} entries for {} tokens", list.len(), tokens.len());
    Ok(list)
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
