//! Shader assembly: a prelude of constants, the shared pieces, and the pass's own file, concatenated.

use super::io::ABSENT;
use crate::format::{Bits, Dtype, ZeroPoint};
use crate::geometry::Geometry;
use crate::plan::Slot;
use std::fmt::Write;

/// Workgroups per dimension that every WebGPU device allows.
pub(crate) const MAX_GROUPS: u32 = 65535;

/// A compute pass of the library. Attention and merge come in one variant per row tile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Pass {
    /// New tokens enter.
    Append,
    /// Keys of whole blocks.
    PackKeys,
    /// Values of whole blocks.
    PackValues,
    /// Attention over a page, with this many rows per workgroup.
    AttendHistory(u32),
    /// Attention over unpacked tokens, with this many rows per workgroup.
    AttendWindow(u32),
    /// Partial results of tiles of this many rows.
    Merge(u32),
}

impl Pass {
    /// Every pass that a cache of this geometry can run.
    pub fn all(g: &Geometry) -> Vec<Pass> {
        let mut passes = vec![Pass::Append, Pass::PackKeys, Pass::PackValues];
        for rows in g.row_tiles() {
            passes.extend([Pass::AttendHistory(rows), Pass::AttendWindow(rows), Pass::Merge(rows)]);
        }
        passes
    }

    /// Name of the entry point, and stem of the file.
    pub fn entry_point(self) -> &'static str {
        match self {
            Pass::Append => "append",
            Pass::PackKeys => "pack_keys",
            Pass::PackValues => "pack_values",
            Pass::AttendHistory(_) => "attend_history",
            Pass::AttendWindow(_) => "attend_window",
            Pass::Merge(_) => "merge",
        }
    }

    fn pieces(self) -> &'static [(&'static str, &'static str)] {
        macro_rules! piece {
            ($path:literal) => {
                ($path, include_str!(concat!("../../shaders/", $path)))
            };
        }
        macro_rules! pieces {
            ($($path:literal),*) => { &[$(piece!($path)),*] };
        }
        match self {
            Pass::Append => pieces!["lib/step.wgsl", "lib/element.wgsl", "append.wgsl"],
            Pass::PackKeys => {
                pieces![
                    "lib/step.wgsl",
                    "lib/element.wgsl",
                    "lib/tokens.wgsl",
                    "lib/quantizer.wgsl",
                    "pack_keys.wgsl"
                ]
            }
            Pass::PackValues => {
                pieces![
                    "lib/step.wgsl",
                    "lib/element.wgsl",
                    "lib/tokens.wgsl",
                    "lib/quantizer.wgsl",
                    "pack_values.wgsl"
                ]
            }
            Pass::AttendHistory(_) => {
                pieces!["lib/step.wgsl", "lib/element.wgsl", "lib/attend.wgsl", "attend_history.wgsl"]
            }
            Pass::AttendWindow(_) => {
                pieces!["lib/step.wgsl", "lib/element.wgsl", "lib/attend.wgsl", "attend_window.wgsl"]
            }
            Pass::Merge(_) => pieces!["lib/step.wgsl", "lib/element.wgsl", "merge.wgsl"],
        }
    }

    /// The shader for a cache of this geometry.
    pub fn source(self, g: &Geometry) -> ShaderSource {
        let mut source = ShaderSource { text: String::new(), pieces: Vec::new() };
        source.push("prelude", &prelude(self, g));
        for (path, text) in self.pieces() {
            source.push(path, text);
        }
        source
    }
}

/// An assembled shader that knows which file each line came from.
#[derive(Debug, Clone)]
pub struct ShaderSource {
    text: String,
    /// (file, its first line)
    pieces: Vec<(&'static str, u32)>,
}

impl ShaderSource {
    fn push(&mut self, name: &'static str, text: &str) {
        self.pieces.push((name, self.text.lines().count() as u32 + 1));
        self.text.push_str(text);
        if !text.ends_with('\n') {
            self.text.push('\n');
        }
    }

    /// The WGSL text.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// File and line of a line of the text, both counted from 1.
    pub fn locate(&self, line: u32) -> (&'static str, u32) {
        let piece = self.pieces.iter().rev().find(|(_, first)| *first <= line);
        piece.map_or(("prelude", line), |(name, first)| (*name, line - first + 1))
    }
}

/// How the attention of one tile is divided among the invocations of a workgroup.
struct AttendShape {
    key_rows: u32,
    workgroup: u32,
    query_vecs: u32,
    value_rows: u32,
    row_pairs: u32,
    chunks: u32,
    token_shares: u32,
    sh_vecs: u32,
}

impl AttendShape {
    fn new(g: &Geometry, rows: u32) -> AttendShape {
        const QUADS: u32 = 64;
        let padded = g.layout.head_dim.next_multiple_of(16);
        let key_rows = rows.min(4);
        let row_groups = rows / key_rows;
        let workgroup = QUADS * row_groups;
        let value_rows = rows.min(2);
        let row_pairs = rows / value_rows;
        let chunks = padded / 16;
        let token_shares = previous_power_of_two(workgroup / (chunks * row_pairs));
        // Workgroup memory in vec4, by phase: see lib/attend.wgsl.
        let logits = rows * padded / 4 + 2 * workgroup;
        let weights = rows * QUADS;
        let row_sums = token_shares * row_pairs + row_groups;
        let sums = token_shares / 2 * rows * padded / 4;
        AttendShape {
            key_rows,
            workgroup,
            query_vecs: padded / 4,
            value_rows,
            row_pairs,
            chunks,
            token_shares,
            sh_vecs: logits.max(weights).max(row_sums).max(sums),
        }
    }
}

/// Bytes of workgroup memory that the largest attention variant of this geometry uses.
pub(crate) fn workgroup_bytes(g: &Geometry) -> u32 {
    let attention = g.row_tiles().into_iter().map(|rows| 16 * AttendShape::new(g, rows).sh_vecs);
    let values = 4 * g.layout.group * g.layout.value_groups();
    attention.max().unwrap_or(0).max(values)
}

fn previous_power_of_two(n: u32) -> u32 {
    1 << n.max(1).ilog2()
}

/// The constants of a pass.
fn prelude(pass: Pass, g: &Geometry) -> String {
    let l = &g.layout;
    let mut text = String::from("// Generated: constants of this cache's geometry.\n");
    let mut u = |name: &str, value: u32| {
        let _ = writeln!(text, "const {name}: u32 = {value}u;");
    };
    u("MAX_GROUPS", MAX_GROUPS);
    u("HEAD_DIM", l.head_dim);
    u("KV_HEADS", l.kv_heads);
    u("HEADS_PER_GROUP", g.heads_per_group);
    u("F32", Dtype::F32.index());
    u("F16", Dtype::F16.index());
    u("BF16", Dtype::Bf16.index());
    u("ABSENT", ABSENT);
    u("WINDOW_FORMAT", g.window_format.index());
    u("STAGING_BIT", Slot::STAGING_BIT);
    u("RING_SLOTS", g.unpacked_slots());
    u("STAGING_SLOTS", g.staging_tokens);
    u("TOKEN_WORDS", g.token_words());
    u("ROW_WORDS", g.row_words());
    u("GROUP", l.group);
    u("BLOCK_WORDS", l.block_words());
    u("BLOCKS_PER_PAGE", l.blocks_per_page());
    u("HEAD_WORDS", l.head_words());
    u("KEY_BITS", l.key_bits.get());
    u("KEY_CODES_PER_WORD", 32 / l.key_bits.get());
    u("KEY_PARTS", 8 / l.key_bits.get());
    u("KEY_BYTE_MASK", byte_mask(l.key_bits));
    u("KEY_ROW_WORDS", l.key_row_words());
    u("KEY_PARAMS", l.key_param(0));
    u("VALUE_BITS", l.value_bits.get());
    u("VALUE_CODES_PER_WORD", 32 / l.value_bits.get());
    u("VALUE_BYTE_MASK", byte_mask(l.value_bits));
    u("VALUE_ROW_WORDS", l.value_row_words());
    u("VALUE_GROUP", l.value_group);
    u("VALUE_GROUPS", l.value_groups());
    u("VALUE_PARAM_COUNT", l.group * l.value_groups());
    u("VALUE_CODES", l.value_code(0, 0));
    u("VALUE_PARAMS", l.value_param(0, 0));
    u("PARTIAL_VECS", (g.partial_bytes() / 16) as u32);
    if let Pass::AttendHistory(rows) | Pass::AttendWindow(rows) | Pass::Merge(rows) = pass {
        let shape = AttendShape::new(g, rows);
        u("ROWS", rows);
        u("KEY_ROWS", shape.key_rows);
        u("WORKGROUP", shape.workgroup);
        u("QUERY_VECS", shape.query_vecs);
        u("VALUE_ROWS", shape.value_rows);
        u("ROW_PAIRS", shape.row_pairs);
        u("CHUNKS", shape.chunks);
        u("UNITS", shape.chunks * shape.row_pairs);
        u("TOKEN_SHARES", shape.token_shares);
        u("SH_VECS", shape.sh_vecs);
        let vecs = (l.head_dim / 4).next_power_of_two();
        u("MERGE_VECS", vecs);
        u("MERGE_SHARES", (128 / vecs).min(16));
    }
    let scale = (f64::from(g.softmax_scale) * std::f64::consts::LOG2_E) as f32;
    let _ = writeln!(text, "const LOGIT_SCALE: f32 = {scale:e};");
    let _ = writeln!(text, "const ZERO_POINT_ROUNDED: bool = {};", g.zero_point == ZeroPoint::Rounded);
    text
}

/// The low code of each byte.
fn byte_mask(bits: Bits) -> u32 {
    bits.max_code() * 0x0101_0101
}
