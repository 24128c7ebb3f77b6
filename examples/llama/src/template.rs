//! Chat templates: a conversation as the text that a model was trained to read. The engine is minijinja.

use anyhow::Result;
use minijinja::{Environment, ErrorKind, context};
use serde::Serialize;

/// One message of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, serde::Deserialize)]
pub struct Message {
    /// `system`, `user` or `assistant`.
    pub role: String,
    pub content: String,
}

/// The template of a model.
#[derive(Debug)]
pub struct Template {
    pub source: String,
    pub bos_token: String,
    pub eos_token: String,
}

/// A part of a rendered conversation.
#[derive(Debug, PartialEq, Eq)]
pub enum Part {
    /// What the template has added.
    Template(String),
    /// What a message has said.
    Message(String),
}

impl Template {
    /// The text of a conversation, with the beginning of the assistant's answer if `answer`.
    pub fn render(&self, messages: &[Message], answer: bool) -> Result<String> {
        let mut environment = Environment::new();
        // As those who write templates assume: Hugging Face renders them so.
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |message: String| -> Result<String, minijinja::Error> {
            Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
        });
        let Template { source, bos_token, eos_token } = self;
        let values = context! { messages, add_generation_prompt => answer, bos_token, eos_token };
        Ok(environment.render_str(source, values)?)
    }

    /// The same, its messages apart from what the template adds; `None` if the template does more to messages
    /// than to trim them.
    pub fn parts(&self, messages: &[Message], answer: bool) -> Result<Option<Vec<Part>>> {
        let whole = self.render(messages, answer)?;
        // Of Unicode's private use: two that stand nowhere else.
        let mut unused = ('\u{e000}'..='\u{f8ff}').filter(|c| !whole.contains(*c));
        let (Some(open), Some(close)) = (unused.next(), unused.next()) else { return Ok(None) };
        for trimmed in [false, true] {
            let marked = messages.iter().map(|Message { role, content }| {
                let content = if trimmed { content.trim() } else { content };
                Message { role: role.clone(), content: format!("{open}{content}{close}") }
            });
            let marked = self.render(&marked.collect::<Vec<_>>(), answer)?;
            if marked.replace([open, close], "") == whole
                && let Some(parts) = split(&marked, open, close)
            {
                return Ok(Some(parts));
            }
        }
        Ok(None)
    }
}

/// What stands between a mark that opens and the one that closes is a message's; `None` if they do not take
/// turns.
fn split(marked: &str, open: char, close: char) -> Option<Vec<Part>> {
    let mut parts = Vec::new();
    let mut rest = marked;
    while let Some((before, opened)) = rest.split_once(open) {
        let (message, after) = opened.split_once(close)?;
        parts.extend([Part::Template(before.into()), Part::Message(message.into())]);
        rest = after;
    }
    parts.push(Part::Template(rest.into()));
    parts.retain(|part| !part.text().is_empty());
    (!parts.iter().any(|part| part.text().contains([open, close]))).then_some(parts)
}

impl Part {
    fn text(&self) -> &str {
        match self {
            Part::Template(text) | Part::Message(text) => text,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(source: &str, content: &str) -> Option<Vec<Part>> {
        let template = Template { source: source.into(), bos_token: "<s>".into(), eos_token: "</s>".into() };
        let message = |role: &str, content: &str| Message { role: role.into(), content: content.into() };
        template.parts(&[message("user", content), message("assistant", "yes")], true).unwrap()
    }

    #[test]
    fn messages_stand_apart_from_the_template() {
        let template = |text: &str| Part::Template(text.into());
        let message = |text: &str| Part::Message(text.into());
        let chat = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>\n{% endfor %}{% if add_generation_prompt %}<|a|>{% endif %}";
        let ends = || template("</s>\n<|assistant|>");
        assert_eq!(
            parts(chat, " a</s>\u{e000}b "),
            Some(vec![
                template("<|user|>"),
                message(" a</s>\u{e000}b "),
                ends(),
                message("yes"),
                template("</s>\n<|a|>")
            ])
        );
        let trimming = chat.replace("m.content", "m.content | trim");
        assert_eq!(parts(&trimming, " a</s> ").unwrap()[1], message("a</s>"));
        let shouting = chat.replace("m.content", "m.content | upper");
        assert_eq!(parts(&shouting, "a</s>").unwrap()[1], message("A</S>"));
        // What cuts messages cannot be told from what a user says.
        for cutting in ["m.content.split('</s>')[0]", "m.content[1:]", "m.content ~ m.content[:1]"] {
            assert_eq!(parts(&chat.replace("m.content", cutting), "a</s>b"), None, "{cutting}");
        }
    }
}
