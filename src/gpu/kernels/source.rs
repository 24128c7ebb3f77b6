//! Shader assembly: a prelude of constants and the pieces of a kernel, concatenated.
//!
//! A piece is a file of `shaders/`. Its head names the constants that it reads, on lines that begin with
//! `// Constants:` and end with a full stop, and likewise the records of plans (`// Records:`). The prelude
//! has these and no others, so that two kernels that do the same have the same text.

use super::constants::Constants;
use super::twins::twins;

/// A file of `shaders/`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Piece {
    /// Below `shaders/`.
    pub(crate) path: &'static str,
    pub(crate) text: &'static str,
}

/// Pieces by their paths below `shaders/`.
macro_rules! pieces {
    ($($path:literal),* $(,)?) => {
        [$($crate::gpu::kernels::source::Piece {
            path: $path,
            text: include_str!(concat!("../../../shaders/", $path)),
        }),*]
    };
}
pub(crate) use pieces;

impl Piece {
    /// What the head of the file declares of a kind.
    fn declared(self, kind: &'static str) -> impl Iterator<Item = &'static str> {
        let head = self.text.lines().take_while(|line| line.starts_with("//"));
        let mut inside = false;
        head.filter_map(move |line| {
            let line = line.trim_start_matches("//").trim_start();
            let list = match line.strip_prefix(kind) {
                Some(first) => first.trim_start(),
                None if inside => line,
                None => return None,
            };
            inside = !list.ends_with('.');
            Some(list.trim_end_matches('.').split(", ").map(|name| name.trim_end_matches(',')))
        })
        .flatten()
    }
}

/// An assembled shader that knows which file each line came from.
#[derive(Debug, Clone)]
pub struct ShaderSource {
    text: String,
    /// Whether it uses subgroup operations.
    subgroups: bool,
    /// (file, its first line)
    pieces: Vec<(&'static str, u32)>,
}

impl ShaderSource {
    pub(super) fn new(pieces: &[Piece], constants: &Constants, subgroups: bool) -> ShaderSource {
        let mut source = ShaderSource { text: String::new(), subgroups, pieces: Vec::new() };
        let declared = |kind| pieces.iter().flat_map(move |piece| piece.declared(kind));
        let constants = constants.declared(declared("Constants:"));
        source.push("prelude", &format!("{constants}{}", twins(declared("Records:"))));
        for piece in pieces {
            source.push(piece.path, piece.text);
        }
        source
    }

    fn push(&mut self, name: &'static str, text: &str) {
        self.pieces.push((name, self.text.lines().count() as u32 + 1));
        self.text.push_str(text);
        if !text.ends_with('\n') {
            self.text.push('\n');
        }
    }

    /// The WGSL text, as naga reads it.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The WGSL text for browsers, which want a line for each feature that naga refuses.
    pub fn browser_text(&self) -> String {
        let enable = if self.subgroups { "enable subgroups;\n" } else { "" };
        format!("{enable}{}", self.text)
    }

    /// The WGSL text for the target that this is compiled for.
    pub(crate) fn target_text(&self) -> String {
        if cfg!(target_arch = "wasm32") { self.browser_text() } else { self.text.clone() }
    }

    /// Stem of the pass's own file.
    pub fn file(&self) -> &'static str {
        self.pieces.last().map_or("", |(name, _)| name.trim_end_matches(".wgsl"))
    }

    /// File and line of a line of the text, both counted from 1.
    pub fn locate(&self, line: u32) -> (&'static str, u32) {
        let piece = self.pieces.iter().rev().find(|(_, first)| *first <= line);
        piece.map_or(("prelude", line), |(name, first)| (*name, line - first + 1))
    }

    /// The files that it is made of.
    pub fn files(&self) -> impl Iterator<Item = &'static str> {
        self.pieces.iter().map(|(name, _)| *name)
    }
}
