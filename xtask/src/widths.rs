//! Lines of comments and documents are as wide as those of the code: rustfmt does not look at them.

use std::path::Path;
use std::process::Command;

/// Columns, as in rustfmt.toml.
const WIDTH: usize = 110;

/// Lists every line of a comment (Rust, WGSL, Python, shell, TOML, YAML) or of a Markdown text that is wider.
/// Tables, code and links are as wide as they must be.
pub fn check() -> Result<(), String> {
    let files = Command::new("git").args(["ls-files", "-co", "--exclude-standard"]).output();
    let files = files.map_err(|error| format!("git: {error}"))?.stdout;
    let mut wide = Vec::new();
    for file in String::from_utf8_lossy(&files).lines().map(Path::new).filter(|file| file.is_file()) {
        let extension = file.extension().and_then(|extension| extension.to_str());
        let kind = match extension {
            Some("rs" | "wgsl") => Kind::Comments("//"),
            Some("py" | "toml" | "yml" | "sh") => Kind::Comments("#"),
            Some("md") => Kind::Text,
            _ => continue,
        };
        let text = std::fs::read_to_string(file).map_err(|error| format!("{}: {error}", file.display()))?;
        wide.extend(wide_lines(kind, &text).into_iter().map(|line| format!("{}:{line}", file.display())));
    }
    if wide.is_empty() {
        return Ok(());
    }
    Err(format!("wider than {WIDTH} columns:\n{}", wide.join("\n")))
}

#[derive(Clone, Copy)]
enum Kind {
    /// Lines that begin so.
    Comments(&'static str),
    /// Lines that are neither code nor of a table.
    Text,
}

/// Numbers of the lines that are too wide.
fn wide_lines(kind: Kind, text: &str) -> Vec<usize> {
    let mut in_code = false;
    let mut wide = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let start = line.trim_start();
        let counts = match kind {
            Kind::Comments(mark) => {
                start.starts_with(mark) && !start.trim_start_matches(['/', '!', ' ']).starts_with('|')
            }
            Kind::Text => {
                in_code ^= start.starts_with("```");
                !in_code && !start.starts_with('|')
            }
        };
        // One word, a link for example, cannot be broken.
        let words =
            start.split_whitespace().filter(|word| !["//", "///", "//!", "#", "-", "*"].contains(word));
        if counts && line.chars().count() > WIDTH && words.count() > 1 {
            wide.push(number);
        }
    }
    wide
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wide_comments_and_texts_are_found() {
        let long = "word ".repeat(30);
        let comment = Kind::Comments("//");
        assert_eq!(
            wide_lines(comment, &format!("    // {long}\nlet x = \"{long}\";\n/// | {long} |\n")),
            [1]
        );
        assert_eq!(wide_lines(comment, &format!("// {}\n", "x".repeat(200))), [] as [usize; 0]);
        assert_eq!(wide_lines(Kind::Text, &format!("| {long} |\n```\n{long}\n```\n{long}\n")), [5]);
    }
}
