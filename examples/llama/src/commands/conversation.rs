//! A conversation, and its file: a safetensors file of two byte tensors, `conversation` (JSON) and `snapshot`
//! (what the library saves of the cache). One file, so that the two always belong together.

use crate::commands::output::write_file;
use anyhow::{Context as _, Result, bail, ensure};
use kivi_wgpu::{SequenceId, Snapshot};
use llama::template::Message;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use std::path::Path;

#[derive(Clone, serde::Serialize, serde::Deserialize)]
pub struct Conversation {
    pub name: String,
    /// The model that the cached keys and values are of.
    pub model: String,
    /// Its tokens are those below.
    #[serde(skip)]
    pub sequence: Option<SequenceId>,
    pub messages: Vec<Message>,
    /// What the cache holds.
    pub tokens: Vec<u32>,
}

impl Conversation {
    /// Saves it with what the cache holds of it; returns the bytes of the file.
    pub fn save(&self, path: &Path, snapshot: &Snapshot) -> Result<usize> {
        let (text, cache) = (serde_json::to_vec(self)?, snapshot.to_bytes()?);
        let tensor = |bytes| TensorView::new(Dtype::U8, vec![<[u8]>::len(bytes)], bytes);
        let tensors = [("conversation", tensor(&text[..])?), ("snapshot", tensor(&cache[..])?)];
        let file = safetensors::serialize(tensors, None)?;
        write_file(path, &file)?;
        Ok(file.len())
    }

    /// Loads one with a model of so many tokens.
    pub fn load(path: &Path, model: &str, vocabulary: u32) -> Result<(Conversation, Snapshot)> {
        let name = || format!("{}", path.display());
        let file = std::fs::read(path).with_context(name)?;
        let read = || -> Result<(Conversation, Snapshot)> {
            let tensors = SafeTensors::deserialize(&file)?;
            let conversation: Conversation = serde_json::from_slice(tensors.tensor("conversation")?.data())?;
            Ok((conversation, Snapshot::from_bytes(tensors.tensor("snapshot")?.data())?))
        };
        let (conversation, snapshot) =
            read().with_context(|| format!("{}: this is no saved conversation", path.display()))?;
        if conversation.model != model {
            bail!("{}: a conversation with {}, and this is {model}", path.display(), conversation.model);
        }
        let tokens = &conversation.tokens;
        ensure!(
            tokens.len() == snapshot.tokens() as usize && tokens.iter().all(|token| *token < vocabulary),
            "{}: its text and its cache do not belong together",
            path.display()
        );
        Ok((conversation, snapshot))
    }
}
