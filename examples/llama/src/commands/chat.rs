//! `chat`: conversations that can be forked, taken back, saved and loaded.

use crate::ModelOptions;
use crate::commands::conversation::Conversation;
use crate::commands::interrupt::Interrupt;
use crate::commands::output::{is_closed_pipe, say, show, tell};
use crate::commands::{READ, SamplingOptions, report};
use anyhow::{Context as _, Result, anyhow, bail};
use kivi_wgpu::{Error, SequenceId};
use llama::format::Format;
use llama::generate::{Request, Sampler, Sampling, generate};
use llama::model::{Context, Model};
use llama::room::asked;
use llama::template::Message;
use llama::tokenizer::Tokenizer;
use std::io::{BufRead, IsTerminal};
use std::path::Path;
use std::time::Instant;

const COMMANDS: &str = "\
/fork NAME     a second conversation with the same past; go on in it
/switch NAME   go on in another conversation
/list          the conversations
/drop NAME     end another conversation
/undo          take the last answer and its question back
/save FILE     save the conversation, its text and its cache
/load FILE     a conversation from a file; go on in it
/memory        what the cache takes
/quit
Ctrl-C ends an answer";

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
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=65535))]
    conversations: u32,
    #[command(flatten)]
    sampling: SamplingOptions,
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
    interrupt: Interrupt,
}

/// Whether a chat goes on after a line.
#[derive(PartialEq)]
enum Next {
    GoesOn,
    Ends,
}

pub fn run(model: &ModelOptions, options: Options) -> Result<()> {
    let opened = model.open()?;
    let room = opened.room(asked(READ, ""), asked(1u32, ""), asked(options.context, "--context"))?;
    let sequences = asked(options.conversations, "--conversations");
    opened.check(room, std::slice::from_ref(&options.format), sequences, "--format, --context")?;
    let (model, tokenizer) = opened.load(room)?;
    let config = options.format.apply(model.cache_config()).with_max_sequences(options.conversations);
    let context = model.context(&config)?;
    let sampler = Sampler::new(&model)?;
    say!("{} on {}\n{COMMANDS}", model.shape.name, model.gpu.name());
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
        interrupt: Interrupt::install()?,
    };
    chat.begin("main")?;
    let mut input = std::io::stdin().lock();
    let echo = !input.is_terminal();
    let mut line = Vec::new();
    loop {
        chat.interrupt.prompt();
        tell(format_args!("\n{}> ", chat.conversations[chat.current].name))?;
        line.clear();
        if input.read_until(b'\n', &mut line)? == 0 {
            return Ok(());
        }
        chat.interrupt.line();
        // What fails has not changed what is known of the conversation; an answer that broke off is cut away
        // before anything else is done with the cache.
        match chat.line(&line, echo) {
            Ok(Next::GoesOn) => {}
            Ok(Next::Ends) => return Ok(()),
            Err(error) if is_closed_pipe(&error) => return Err(error),
            Err(error) => tell(format_args!("{error:#}\n"))?,
        }
    }
}

impl Chat {
    /// Does what a line says.
    fn line(&mut self, line: &[u8], echo: bool) -> Result<Next> {
        if echo {
            tell(format_args!("{}\n", String::from_utf8_lossy(line).trim_end()))?;
        }
        let line = std::str::from_utf8(line).context("the line is not UTF-8, and nothing was said")?.trim();
        let (command, argument) = line.split_once(' ').unwrap_or((line, ""));
        match command {
            "" => {}
            "/quit" => return Ok(Next::Ends),
            "/fork" => self.fork(argument)?,
            "/switch" => self.switch(argument)?,
            "/list" => self.list()?,
            "/drop" => self.end(argument)?,
            "/undo" => self.undo()?,
            "/save" => self.save(Path::new(argument))?,
            "/load" => self.load(Path::new(argument))?,
            "/memory" => self.memory()?,
            _ if command.starts_with('/') => say!("{COMMANDS}"),
            _ => self.say(line)?,
        }
        Ok(Next::GoesOn)
    }

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

    /// Cuts the cache to what the conversation's tokens have in common with `wanted`, and returns how many
    /// these are.
    fn cut_to(&mut self, wanted: &[u32]) -> Result<usize> {
        let sequence = self.sequence()?;
        let held = &self.conversations[self.current].tokens;
        let mut common = held.iter().zip(wanted).take_while(|(a, b)| a == b).count();
        if common < self.context.cache.tokens(sequence)? as usize {
            let mut encoder = self.model.gpu.encoder();
            match self.context.cache.truncate(&mut encoder, sequence, common as u32) {
                Ok(_) => {
                    self.model.gpu.submit(encoder);
                }
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
        let mut text = self.tokenizer.streaming();
        let (start, mut answer) = (Instant::now(), Vec::new());
        let (model, sampler, context) = (&self.model, &self.sampler, &mut self.context);
        let (sampling, limit, ends) = (self.sampling, self.limit, &self.tokenizer.ends[..]);
        let stop = || self.interrupt.stops();
        let request = Request { prompt: &wanted[common..], sampling, limit, ends, stop: &stop };
        generate(model, sampler, context, sequence, request, |token| {
            answer.push(token);
            show(format_args!("{}", text.push(token)?))?;
            Ok(true)
        })?;
        if answer.is_empty() {
            bail!("[stopped before the answer began; nothing was said]");
        }
        say!("{}", text.finish()?);
        let (read, written, took) = (wanted.len() - common, answer.len(), start.elapsed().as_secs_f64());
        say!("[{read} tokens read, {written} written in {took:.1} s]");
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
        let (sequence, _) = self.context.cache.fork(&mut encoder, self.sequence()?).map_err(of_options)?;
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
            say!("{mark} {}: {} messages, {} tokens", c.name, c.messages.len(), c.tokens.len());
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
        say!("{} tokens are left", self.conversations[self.current].tokens.len());
        Ok(())
    }

    fn save(&mut self, file: &Path) -> Result<()> {
        if file.as_os_str().is_empty() {
            bail!("/save FILE");
        }
        self.forget_unknown()?;
        let snapshot = self.context.cache.submit_and_save_blocking(self.sequence()?)?;
        let bytes = self.conversations[self.current].save(file, &snapshot)?;
        say!("{bytes} bytes for {} tokens", snapshot.tokens());
        Ok(())
    }

    fn load(&mut self, file: &Path) -> Result<()> {
        let shape = &self.model.shape;
        let (mut conversation, snapshot) = Conversation::load(file, &shape.name, shape.vocabulary)?;
        if snapshot.tokens() > self.model.room.context {
            bail!(
                "{}: {} tokens are more than the context of {}: begin with more --context",
                file.display(),
                snapshot.tokens(),
                self.model.room.context
            );
        }
        let mut encoder = self.model.gpu.encoder();
        let (sequence, _) = self.context.cache.load(&mut encoder, &snapshot).map_err(of_options)?;
        self.model.gpu.submit(encoder);
        conversation.sequence = Some(sequence);
        while self.conversations.iter().any(|c| c.name == conversation.name) {
            conversation.name.push('\'');
        }
        let tokens = conversation.tokens.len();
        self.conversations.push(conversation);
        self.current = self.conversations.len() - 1;
        say!("{tokens} tokens loaded");
        Ok(())
    }

    fn memory(&self) -> Result<()> {
        say!("{}", report(&self.model, &self.context, self.sequence()?, &self.format)?);
        Ok(())
    }
}

/// An error of the cache in the words of the options.
fn of_options(error: Error) -> anyhow::Error {
    match error {
        Error::TooManySequences { max } => {
            anyhow!("there are {max} conversations already: /drop one, or begin with more --conversations")
        }
        other => other.into(),
    }
}
