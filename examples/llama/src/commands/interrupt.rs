//! Ctrl-C in a chat: it ends an answer; at the prompt it ends the chat only if it comes twice.

use anyhow::Result;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

/// What has been asked for by Ctrl-C.
#[derive(Clone, Default)]
pub struct Interrupt(Arc<State>);

#[derive(Default)]
struct State {
    /// Whether an answer is being written.
    answering: AtomicBool,
    /// Whether it should end.
    stop: AtomicBool,
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
        if state.answering.load(SeqCst) {
            state.stop.store(true, SeqCst);
            return false;
        }
        if state.warned.swap(true, SeqCst) {
            return true;
        }
        eprintln!("\n(Ctrl-C once more, or /quit, ends the chat)");
        false
    }

    /// A line has been read: the next Ctrl-C is a first one again.
    pub fn line(&self) {
        self.0.warned.store(false, SeqCst);
    }

    /// Runs what writes an answer; it is given a question that is answered by yes once it should stop.
    pub fn answering<T>(&self, write: impl FnOnce(&dyn Fn() -> bool) -> T) -> T {
        let state = &self.0;
        state.stop.store(false, SeqCst);
        state.answering.store(true, SeqCst);
        let written = write(&|| state.stop.load(SeqCst));
        state.answering.store(false, SeqCst);
        written
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_ends_at_once_and_a_chat_at_the_second_time() {
        let interrupt = Interrupt::default();
        interrupt.answering(|stop| {
            assert!(!stop());
            assert!(!interrupt.arrives());
            assert!(stop());
        });
        assert!(!interrupt.arrives());
        interrupt.line();
        assert!(!interrupt.arrives());
        assert!(interrupt.arrives());
        interrupt.answering(|stop| assert!(!stop()));
    }
}
