//! Ctrl-C in a chat: it ends an answer; it ends the chat only if it comes twice at the prompt, or three times
//! where what was asked for does not end.

use anyhow::Result;
use llama::complain;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};

/// What has been asked for by Ctrl-C.
#[derive(Clone, Default)]
pub struct Interrupt(Arc<State>);

#[derive(Default)]
struct State {
    /// Whether a line is being answered, from when it was read to the next prompt.
    busy: AtomicBool,
    /// How often what is written has been asked to end.
    stops: AtomicU32,
    /// Whether Ctrl-C has come at this prompt already.
    warned: AtomicBool,
}

impl Interrupt {
    /// From now on, Ctrl-C no longer ends the process at once.
    pub fn install() -> Result<Interrupt> {
        let interrupt = Interrupt::default();
        let handler = interrupt.clone();
        ctrlc::set_handler(move || {
            if handler.arrives() {
                // As a process that it ends.
                std::process::exit(130);
            }
        })?;
        Ok(interrupt)
    }

    /// Ctrl-C has come; returns whether the chat ends.
    fn arrives(&self) -> bool {
        let state = &self.0;
        if state.busy.load(SeqCst) {
            let before = state.stops.fetch_add(1, SeqCst);
            if before == 1 {
                complain(format_args!("\n(this has not ended yet: Ctrl-C once more ends the chat)"));
            }
            return before >= 2;
        }
        if state.warned.swap(true, SeqCst) {
            return true;
        }
        complain(format_args!("\n(Ctrl-C once more, or /quit, ends the chat)"));
        false
    }

    /// A line is awaited: Ctrl-C is meant for the chat.
    pub fn prompt(&self) {
        self.0.warned.store(false, SeqCst);
        self.0.busy.store(false, SeqCst);
    }

    /// A line has been read: from now on Ctrl-C ends what answers it.
    pub fn line(&self) {
        self.0.stops.store(0, SeqCst);
        self.0.busy.store(true, SeqCst);
    }

    /// Whether what is written should end.
    pub fn stops(&self) -> bool {
        self.0.stops.load(SeqCst) > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_ends_at_once_and_a_chat_at_the_second_time() {
        let interrupt = Interrupt::default();
        interrupt.line();
        assert!(!interrupt.stops());
        // Twice in an answer is once.
        assert!(!interrupt.arrives() && !interrupt.arrives());
        assert!(interrupt.stops());
        interrupt.prompt();
        assert!(!interrupt.arrives());
        interrupt.line();
        assert!(!interrupt.stops());
        interrupt.prompt();
        assert!(!interrupt.arrives());
        assert!(interrupt.arrives());
        // What does not end.
        interrupt.line();
        assert!(!interrupt.arrives() && !interrupt.arrives());
        assert!(interrupt.arrives());
    }
}
