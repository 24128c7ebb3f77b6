//! Scripts in Python, where there is one.

use std::io::Write;
use std::process::Command;

/// A Python that has these packages, separated by commas: `KIVI_PYTHON`, or python3.
pub fn with(packages: &str) -> Option<Command> {
    let command = || Command::new(std::env::var("KIVI_PYTHON").unwrap_or("python3".into()));
    let probe = command().args(["-c", &format!("import {packages}")]).output();
    probe.is_ok_and(|output| output.status.success()).then(command)
}

/// Says that a test has not run, past the harness, which would hide it.
pub fn skipped(test: &str, packages: &str) {
    let _ = writeln!(std::io::stderr(), "skipped in {test}: python3 with {packages}");
}
