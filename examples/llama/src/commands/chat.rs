//! `chat`: conversations that can be forked, taken back, saved and loaded.

use crate::ModelOptions;
use crate::commands::{SamplingOptions, report};
use anyhow::{Context as _, Result, bail};
use kivi_wgpu::{Error, SequenceId, Snapshot};
use llama::format::Format;
use llama::generate::{Request, Sampler, Sampling, generate};
use llama::model::{Context, Model, Room};
use llama::tokenizer::{Message, Tokenizer};
use std::io::{BufRead, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

const COMMANDS: &str = "\
/fork NAME     a second conversation with the same past; go on in it
/switch NAME   go on in another conversation
/list          the conversations
/drop NAME     end another conversation
/undo          take the last answer and its question back
/save FILE     save the conversation (FILE, and FILE.json with its text)
/load FILE     a conversation from a file; go on in it
/memory        what the cache takes
/quit";

#[derive(clap::Args)]
pub struct Options {
    /// The cache's format.
    #[arg(long, default_value = "bits3")]
    format: Format,
    /// Tokens of an answer at most.
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u32).range(1..))]
    limit: u32,
    /// Positions that there is room for; 0: as many as the model was trained for.
    #[arg(long, default_value_t = 0)]
    context: u32,
    /// Conversations at a time.
    #[arg(long, default_value_t = 8)]
    conversations: u32,
    #[command(flatten)]
    sampling: SamplingOptions,
}

#[derive(Clone, serde::Serialize, serde::Deserialize)]
struct Conversation {
    name: String,
    /// The model that the cached keys and values are of.
    model: String,
    /// Its tokens are those below.
    #[serde(skip)]
    sequence: Option<SequenceId>,
    messages: Vec<Message>,
    /// What the cache holds.
    tokens: Vec<u32>,
}

struct Chat {
    model: Model,
    tokenizer: Tokenizer,
    sampler: Sampler,
    context: Context,
    format: Format,
    sampling: Sampling,
    limit: u32,
    conversations: Vec<Conversation>,
    current: usize,
}

pub fn run(model: &ModelOptions, options: Options) -> Result<()> {
    let (model, tokenizer) = model.load(Room { tokens: 128, logits: 1, context: options.context })?;
    let config = options.format.apply(model.cache_config()).with_max_sequences(options.conversations);
    let context = model.context(&config)?;
    let sampler = Sampler::new(&model)?;
    println!("{} on {}\n{COMMANDS}", model.shape.name, model.gpu.name());
    let (format, sampling, limit) = (options.format, options.sampling.get(), options.limit);
    let mut chat = Chat {
        model,
        tokenizer,
        sampler,
        context,
        format,
        sampling,
        limit,
        conversations: Vec::new(),
        current: 0,
    };
    chat.begin("main")?;
    let input = std::io::stdin().lock();
    let terminal = input.is_terminal();
    let prompt = |chat: &Chat| -> Result<()> {
        print!("\n{}> ", chat.conversations[chat.current].name);
        Ok(std::io::stdout().flush()?)
    };
    prompt(&chat)?;
    for line in input.lines() {
        let line = line?;
        if !terminal {
            println!("{line}");
        }
        let (command, argument) = line.trim().split_once(' ').unwrap_or((line.trim(), ""));
        // What fails here has not changed what is known of the conversation; an answer that broke off is cut away before anything else is done with the cache.
        let result = match command {
            "" => Ok(()),
            "/quit" => return Ok(()),
            "/fork" => chat.fork(argument),
            "/switch" => chat.switch(argument),
            "/list" => chat.list(),
            "/drop" => chat.end(argument),
            "/undo" => chat.undo(),
            "/save" => chat.save(Path::new(argument)),
            "/load" => chat.load(Path::new(argument)),
            "/memory" => chat.memory(),
            _ if command.starts_with('/') => {
                println!("{COMMANDS}");
                Ok(())
            }
            _ => chat.say(line.trim()),
        };
        if let Err(error) = result {
            println!("{error:#}");
        }
        prompt(&chat)?;
    }
    Ok(())
}

impl Chat {
    fn begin(&mut self, name: &str) -> Result<()> {
        let sequence = Some(self.context.cache.create_sequence()?);
        self.conversations.push(Conversation {
            name: name.into(),
            model: self.model.shape.name.clone(),
            sequence,
            messages: Vec::new(),
            tokens: Vec::new(),
        });
        self.current = self.conversations.len() - 1;
        Ok(())
    }

    fn sequence(&self) -> Result<SequenceId> {
        self.conversations[self.current].sequence.context("the conversation has no sequence")
    }

    /// After an error in the middle of an answer the cache holds more than is known: that is cut away.
    fn forget_unknown(&mut self) -> Result<()> {
        let known = self.conversations[self.current].tokens.clone();
        self.cut_to(&known)?;
        Ok(())
    }

    /// Cuts the cache to what the conversation's tokens have in common with `wanted`, and returns how many these are.
    fn cut_to(&mut self, wanted: &[u32]) -> Result<usize> {
        let sequence = self.sequence()?;
        let held = &self.conversations[self.current].tokens;
        let mut common = held.iter().zip(wanted).take_while(|(a, b)| a == b).count();
        if common < self.context.cache.tokens(sequence)? as usize {
            let mut encoder = self.model.gpu.encoder();
            match self.context.cache.truncate(&mut encoder, sequence, common as u32) {
                Ok(_) => self.model.gpu.submit(encoder),
                // A format that forgets: what is gone is read again.
                Err(Error::TruncateIntoEvicted { .. }) => {
                    self.context.cache.remove_sequence(sequence)?;
                    let sequence = self.context.cache.create_sequence()?;
                    self.conversations[self.current].sequence = Some(sequence);
                    common = 0;
                }
                Err(error) => return Err(error.into()),
            }
            self.conversations[self.current].tokens.truncate(common);
        }
        Ok(common)
    }

    fn say(&mut self, text: &str) -> Result<()> {
        let mut messages = self.conversations[self.current].messages.clone();
        messages.push(Message { role: "user".into(), content: text.into() });
        let wanted = self.tokenizer.conversation(&messages, true)?;
        if wanted.len() as u32 >= self.model.room.context {
            bail!(
                "the conversation is longer than the context of {} tokens: /undo, or begin with more --context",
                self.model.room.context
            );
        }
        // At least one token is left to be read, for its logits.
        let common = self.cut_to(&wanted[..wanted.len().saturating_sub(1)])?;
        let sequence = self.sequence()?;
        let mut stream = self.tokenizer.streaming();
        let (start, mut answer) = (Instant::now(), Vec::new());
        let request = Request {
            prompt: &wanted[common..],
            sampling: self.sampling,
            limit: self.limit,
            ends: &self.tokenizer.ends,
        };
        let (model, sampler, context) = (&self.model, &self.sampler, &mut self.context);
        generate(model, sampler, context, sequence, request, |token| {
            answer.push(token);
            print!("{}", stream(token));
            std::io::stdout().flush()?;
            Ok(true)
        })?;
        let took = start.elapsed().as_secs_f64();
        println!("\n[{} tokens read, {} written in {took:.1} s]", wanted.len() - common, answer.len());
        messages.push(Message { role: "assistant".into(), content: self.tokenizer.decode(&answer)? });
        let held = self.context.cache.tokens(sequence)? as usize;
        let conversation = &mut self.conversations[self.current];
        conversation.messages = messages;
        conversation.tokens = wanted.into_iter().chain(answer).take(held).collect();
        Ok(())
    }

    fn fork(&mut self, name: &str) -> Result<()> {
        if name.is_empty() || self.conversations.iter().any(|c| c.name == name) {
            bail!("/fork NAME, with a name that no conversation has");
        }
        self.forget_unknown()?;
        let mut encoder = self.model.gpu.encoder();
        let (sequence, _) = self.context.cache.fork(&mut encoder, self.sequence()?)?;
        self.model.gpu.submit(encoder);
        let conversation = self.conversations[self.current].clone();
        self.conversations.push(Conversation { name: name.into(), sequence: Some(sequence), ..conversation });
        self.current = self.conversations.len() - 1;
        Ok(())
    }

    fn switch(&mut self, name: &str) -> Result<()> {
        let found = self.conversations.iter().position(|c| c.name == name);
        self.current = found.with_context(|| format!("no conversation is called {name}"))?;
        Ok(())
    }

    fn end(&mut self, name: &str) -> Result<()> {
        let found = self.conversations.iter().position(|c| c.name == name);
        match found.with_context(|| format!("no conversation is called {name}"))? {
            index if index == self.current => bail!("/switch to another conversation first"),
            index => {
                let ended = self.conversations.remove(index);
                if let Some(sequence) = ended.sequence {
                    self.context.cache.remove_sequence(sequence)?;
                }
                self.current -= usize::from(index < self.current);
            }
        }
        Ok(())
    }

    fn list(&self) -> Result<()> {
        for (index, c) in self.conversations.iter().enumerate() {
            let mark = if index == self.current { '*' } else { ' ' };
            println!("{mark} {}: {} messages, {} tokens", c.name, c.messages.len(), c.tokens.len());
        }
        Ok(())
    }

    fn undo(&mut self) -> Result<()> {
        let messages = &self.conversations[self.current].messages;
        let Some(question) = messages.iter().rposition(|m| m.role == "user") else {
            bail!("there is nothing to take back");
        };
        let kept = messages[..question].to_vec();
        let wanted = if kept.is_empty() { Vec::new() } else { self.tokenizer.conversation(&kept, false)? };
        self.cut_to(&wanted)?;
        self.conversations[self.current].messages = kept;
        println!("{} tokens are left", self.conversations[self.current].tokens.len());
        Ok(())
    }

    fn save(&mut self, file: &Path) -> Result<()> {
        if file.as_os_str().is_empty() {
            bail!("/save FILE");
        }
        self.forget_unknown()?;
        let snapshot = self.context.cache.submit_and_save_blocking(self.sequence()?)?;
        let bytes = snapshot.to_bytes()?;
        std::fs::write(file, &bytes).with_context(|| format!("{}", file.display()))?;
        let text = serde_json::to_string_pretty(&self.conversations[self.current])?;
        std::fs::write(beside(file), text)?;
        println!("{} bytes for {} tokens", bytes.len(), snapshot.tokens());
        Ok(())
    }

    fn load(&mut self, file: &Path) -> Result<()> {
        let bytes = std::fs::read(file).with_context(|| format!("{}", file.display()))?;
        let text =
            std::fs::read_to_string(beside(file)).with_context(|| format!("{}", beside(file).display()))?;
        let mut conversation: Conversation = serde_json::from_str(&text)?;
        let snapshot = Snapshot::from_bytes(&bytes)?;
        if snapshot.tokens() as usize != conversation.tokens.len() {
            bail!("{} does not belong to {}", beside(file).display(), file.display());
        }
        if conversation.model != self.model.shape.name {
            bail!("it is a conversation with {}, this is {}", conversation.model, self.model.shape.name);
        }
        let mut encoder = self.model.gpu.encoder();
        let (sequence, _) = self.context.cache.load(&mut encoder, &snapshot)?;
        self.model.gpu.submit(encoder);
        conversation.sequence = Some(sequence);
        while self.conversations.iter().any(|c| c.name == conversation.name) {
            conversation.name.push('\'');
        }
        println!("{} tokens loaded", conversation.tokens.len());
        self.conversations.push(conversation);
        self.current = self.conversations.len() - 1;
        Ok(())
    }

    fn memory(&self) -> Result<()> {
        println!("{}", report(&self.model, &self.context, self.sequence()?, &self.format)?);
        Ok(())
    }
}

/// Where the text of a saved conversation is.
fn beside(file: &Path) -> PathBuf {
    let mut name = file.as_os_str().to_os_string();
    name.push(".json");
    name.into()
}
