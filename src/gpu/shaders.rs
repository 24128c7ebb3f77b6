//! Shader assembly: a prelude of constants, the shared pieces, and the pass's own file, concatenated.

use super::io::ABSENT;
use super::shapes::{
    AttendShape, CLUSTER_WORKGROUP, FoldShape, PACK_WORKGROUP, Source, by_dots, cluster_rows, items_at_most,
    pack_batches, pack_channels, pack_tokens,
};
use super::variant::{Variant, lanes};
use crate::format::{
    Bits, CLIP_LEAST_EXPONENT, CLIP_STEP, CLIP_STEPS, Dtype, ZeroPoint, inverse_rotation_scale,
    rotation_scale, rotation_size,
};
use crate::geometry::{Geometry, ITEM_WORDS, SPLIT_WORDS, TILE_WORDS};
use crate::plan::Slot;
use std::fmt::Write;

/// Workgroups per dimension that every WebGPU device allows.
pub(crate) const MAX_GROUPS: u32 = 65535;

/// Words of a block that one workgroup copies.
pub(super) const COPY_WORDS: u32 = 4096;

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
    /// Attention of long chunks over pages.
    FoldHistory,
    /// Attention of long chunks over unpacked tokens.
    FoldWindow,
    /// Partial results of tiles of this many rows.
    Merge(u32),
    /// Unpacked tokens of another sequence.
    CopyTokens,
    /// Blocks within a slab.
    CopyBlocks,
    /// Blocks from one slab to another.
    CopyBlocksAcross,
    /// Packed tokens return to the window.
    Unpack,
    /// The same for values that are rotated.
    UnpackRotated,
}

impl Pass {
    /// Every pass that a cache of this geometry can run.
    pub fn all(g: &Geometry) -> Vec<Pass> {
        let mut passes = vec![Pass::Append, Pass::PackKeys, Pass::PackValues];
        passes.extend([Pass::CopyTokens, Pass::CopyBlocks, Pass::CopyBlocksAcross, Pass::Unpack]);
        if g.values.rotated {
            passes.push(Pass::UnpackRotated);
        }
        for rows in g.split_tiles() {
            passes.extend([Pass::AttendHistory(rows), Pass::AttendWindow(rows), Pass::Merge(rows)]);
        }
        if g.may_fold() {
            passes.extend([Pass::FoldHistory, Pass::FoldWindow, Pass::Merge(g.fold_tile())]);
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
            Pass::FoldHistory => "fold_history",
            Pass::FoldWindow => "fold_window",
            Pass::Merge(_) => "merge",
            Pass::CopyTokens => "copy_tokens",
            Pass::CopyBlocks => "copy_blocks",
            Pass::CopyBlocksAcross => "copy_blocks_across",
            Pass::Unpack => "unpack",
            Pass::UnpackRotated => "unpack_rotated",
        }
    }

    /// The files of the shader, in order.
    fn pieces(self, g: &Geometry, variant: Variant) -> Vec<(&'static str, &'static str)> {
        macro_rules! pieces {
            ($($path:literal),*) => { vec![$(($path, include_str!(concat!("../../shaders/", $path)))),*] };
        }
        let mut pieces = pieces!["lib/step.wgsl", "lib/element.wgsl"];
        pieces.extend(match self {
            Pass::Append => pieces!["append.wgsl"],
            Pass::PackKeys => {
                pieces!["lib/tokens.wgsl", "lib/quantizer.wgsl", "lib/groups.wgsl", "pack_keys.wgsl"]
            }
            Pass::PackValues => {
                let mut pieces = pieces!["lib/tokens.wgsl", "lib/quantizer.wgsl", "lib/groups.wgsl"];
                pieces.extend(match g.values.rotated {
                    true => pieces!["lib/rotation.wgsl", "lib/rows_rotated.wgsl"],
                    false => pieces!["lib/rows_plain.wgsl"],
                });
                pieces.extend(pieces!["pack_values.wgsl"]);
                pieces
            }
            Pass::AttendHistory(_) | Pass::FoldHistory if variant == Variant::Subgroups => {
                let mut pieces = pieces![
                    "lib/rows.wgsl",
                    "lib/packed.wgsl",
                    "lib/products.wgsl",
                    "lib/clusters.wgsl",
                    "lib/clusters_packed.wgsl"
                ];
                pieces.extend(match self {
                    Pass::FoldHistory => pieces!["fold_history_clusters.wgsl"],
                    _ => pieces!["attend_history_clusters.wgsl"],
                });
                pieces
            }
            Pass::AttendWindow(_) | Pass::FoldWindow if variant == Variant::Subgroups => {
                let mut pieces = pieces![
                    "lib/rows.wgsl",
                    "lib/slots.wgsl",
                    "lib/clusters.wgsl",
                    "lib/clusters_window.wgsl"
                ];
                pieces.extend(match self {
                    Pass::FoldWindow => pieces!["fold_window_clusters.wgsl"],
                    _ => pieces!["attend_window_clusters.wgsl"],
                });
                pieces
            }
            Pass::AttendHistory(rows) => {
                let mut pieces =
                    pieces!["lib/rows.wgsl", "lib/attend.wgsl", "lib/packed.wgsl", "lib/products.wgsl"];
                pieces.extend(if !g.layout.key_bits.is_quantized() {
                    pieces!["lib/keys_plain.wgsl", "lib/queries_float.wgsl", "lib/keys_sixteen.wgsl"]
                } else if by_dots(g, variant, rows) {
                    pieces!["lib/keys_quantized.wgsl", "lib/keys_dot.wgsl"]
                } else {
                    pieces!["lib/keys_quantized.wgsl", "lib/queries_float.wgsl", "lib/keys_float.wgsl"]
                });
                pieces.extend(match g.layout.value_bits.is_quantized() {
                    true => pieces!["lib/values_quantized.wgsl"],
                    false => pieces!["lib/values_sixteen.wgsl"],
                });
                pieces.extend(pieces!["attend_history.wgsl"]);
                pieces
            }
            Pass::AttendWindow(_) => {
                pieces![
                    "lib/rows.wgsl",
                    "lib/attend.wgsl",
                    "lib/slots.wgsl",
                    "lib/products.wgsl",
                    "lib/keys_plain.wgsl",
                    "lib/queries_float.wgsl",
                    "attend_window.wgsl"
                ]
            }
            Pass::FoldHistory => pieces![
                "lib/rows.wgsl",
                "lib/packed.wgsl",
                "lib/fold.wgsl",
                "lib/vectors_packed.wgsl",
                "fold_history.wgsl"
            ],
            Pass::FoldWindow => {
                pieces!["lib/rows.wgsl", "lib/slots.wgsl", "lib/fold.wgsl", "fold_window.wgsl"]
            }
            Pass::Merge(_) => pieces!["merge.wgsl"],
            Pass::CopyTokens => pieces!["copy_tokens.wgsl"],
            Pass::CopyBlocks => pieces!["copy_blocks.wgsl"],
            Pass::CopyBlocksAcross => pieces!["copy_blocks_across.wgsl"],
            Pass::Unpack => pieces!["lib/quantizer.wgsl", "lib/elements_packed.wgsl", "unpack.wgsl"],
            Pass::UnpackRotated => pieces![
                "lib/quantizer.wgsl",
                "lib/elements_packed.wgsl",
                "lib/rotation.wgsl",
                "unpack_rotated.wgsl"
            ],
        });
        pieces
    }

    /// The shader for a cache of this geometry that runs this variant.
    pub fn source(self, g: &Geometry, variant: Variant) -> ShaderSource {
        let subgroups = variant.features().contains(wgpu::Features::SUBGROUP);
        let mut source = ShaderSource { text: String::new(), subgroups, pieces: Vec::new() };
        source.push("prelude", &prelude(self, g, variant));
        for (path, text) in self.pieces(g, variant) {
            source.push(path, text);
        }
        source
    }
}

/// The check that the adapter numbers a workgroup's invocations as the cluster kernels need.
pub(super) fn lane_order(g: &Geometry) -> ShaderSource {
    let mut source = ShaderSource { text: String::new(), subgroups: true, pieces: Vec::new() };
    let constants =
        format!("const WORKGROUP: u32 = {CLUSTER_WORKGROUP}u;\nconst LANES: u32 = {}u;\n", lanes(g));
    source.push("prelude", &constants);
    source.push("lane_order.wgsl", include_str!("../../shaders/lane_order.wgsl"));
    source
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
    pub(super) fn target_text(&self) -> String {
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
}

/// The constants of a pass.
fn prelude(pass: Pass, g: &Geometry, variant: Variant) -> String {
    let l = &g.layout;
    let mut text = String::from("// Generated: constants of this cache's geometry.\n");
    let mut u = |name: &str, value: u32| {
        let _ = writeln!(text, "const {name}: u32 = {value}u;");
    };
    u("MAX_GROUPS", MAX_GROUPS);
    u("TILE_WORDS", TILE_WORDS);
    u("ITEM_WORDS", ITEM_WORDS);
    u("SPLIT_WORDS", SPLIT_WORDS);
    u("HEAD_DIM", l.head_dim);
    u("KV_HEADS", l.kv_heads);
    u("HEADS_PER_GROUP", g.heads_per_group);
    u("F32", Dtype::F32.index());
    u("F16", Dtype::F16.index());
    u("BF16", Dtype::Bf16.index());
    u("ABSENT", ABSENT);
    u("WINDOW_FORMAT", g.window_format.index());
    u("PACKED_FORMAT", g.sixteen_bit_format().index());
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
    // Of the plane of the low bits; a width that is not a power of two has a high bit in another plane.
    u("KEY_LOW_BITS", l.key_bits.low_bits());
    u("KEY_LOW_WORDS", l.key_bits.low_words(l.head_dim));
    u("KEY_CODES_PER_WORD", 32 / l.key_bits.low_bits());
    u("KEY_PARTS", 8 / l.key_bits.low_bits());
    u("KEY_BYTE_MASK", byte_mask(l.key_bits));
    u("KEY_ROW_WORDS", l.key_row_words());
    u("KEY_PARAMS", l.key_param(0));
    u("VALUE_BITS", l.value_bits.get());
    u("VALUE_LOW_BITS", l.value_bits.low_bits());
    u("VALUE_LOW_WORDS", l.value_bits.low_words(l.head_dim));
    u("VALUE_CODES_PER_WORD", 32 / l.value_bits.low_bits());
    u("VALUE_BYTE_MASK", byte_mask(l.value_bits));
    u("VALUE_ROW_WORDS", l.value_row_words());
    u("VALUE_GROUP", l.value_group);
    // At least one of each, since shaders divide by the one and size an array by the other.
    let value_groups = l.value_groups().max(1);
    u("VALUE_GROUPS", value_groups);
    u("VALUE_CODES", l.value_code(0, 0));
    u("VALUE_PARAMS", l.value_param(0, 0));
    u("PARTIAL_VECS", (g.partial_bytes() / 16) as u32);
    let rows = match pass {
        Pass::AttendHistory(rows) | Pass::AttendWindow(rows) | Pass::Merge(rows) => rows,
        _ => g.fold_tile(),
    };
    u("ROWS", rows);
    match pass {
        Pass::Merge(_) => {
            let vecs = (l.head_dim / 4).next_power_of_two();
            u("MERGE_VECS", vecs);
            // Few splits leave most invocations without work, which costs a software adapter more than it gains with many.
            let workgroup = if variant == Variant::Subgroups { vecs.max(64) } else { 256 };
            u("MERGE_WORKGROUP", workgroup);
            u("MERGE_SHARES", (workgroup / vecs).min(16));
        }
        Pass::AttendHistory(_) | Pass::AttendWindow(_) | Pass::FoldHistory | Pass::FoldWindow
            if variant == Variant::Subgroups =>
        {
            u("WORKGROUP", CLUSTER_WORKGROUP);
            u("LANES", lanes(g));
            u("KEY_ROWS", cluster_rows(rows));
            u("ROW_GROUPS", rows / cluster_rows(rows));
            u("ITEMS_AT_MOST", items_at_most(variant, pass));
        }
        Pass::AttendHistory(_) | Pass::AttendWindow(_) => {
            let source = match pass {
                Pass::AttendWindow(_) => Source::Window,
                _ if by_dots(g, variant, rows) => Source::PageByDots,
                _ => Source::Page,
            };
            let shape = AttendShape::new(g, rows, source);
            u("KEY_ROWS", shape.key_rows);
            u("ROW_GROUPS", shape.row_groups);
            u("KEY_SLICES", shape.key_slices);
            u("WORKGROUP", shape.workgroup);
            u("QUERY_VECS", shape.query_vecs);
            u("VALUE_ROWS", shape.value_rows);
            u("ROW_PAIRS", shape.row_pairs);
            u("CHUNKS", shape.chunks);
            u("UNITS", shape.chunks * shape.row_pairs);
            u("TOKEN_SHARES", shape.token_shares);
            u("SH_VECS", shape.sh_vecs);
        }
        Pass::FoldHistory | Pass::FoldWindow => {
            let shape = FoldShape::new(g);
            u("COLUMNS", shape.columns);
            u("REDUCE_STEP", if shape.columns > 32 { 8 } else { 4 });
            u("KEY_TILE", shape.key_tile);
            u("TOKENS_EACH", shape.key_tile / shape.columns);
            u("OUTPUTS_EACH", (l.head_dim / 4).div_ceil(shape.columns));
            u("VALUE_TOKENS", shape.value_tokens);
            u("SH_VECS", shape.sh_vecs);
        }
        Pass::CopyBlocks | Pass::CopyBlocksAcross => u("COPY_WORDS", COPY_WORDS),
        Pass::PackKeys | Pass::PackValues => {
            let keys = pass == Pass::PackKeys;
            u("PACK_BITS", if keys { l.key_bits } else { l.value_bits }.get());
            let tokens = pack_tokens(g);
            u("PACK_BATCHES", pack_batches(g, pass));
            u("PACK_TOKENS", tokens);
            u("PACK_CHANNELS", pack_channels(g));
            u("ROTATED_ROWS", tokens);
            u("ROTATION_WORKGROUP", PACK_WORKGROUP);
            u("PACK_WORKGROUP", PACK_WORKGROUP);
            u("PACK_GROUPS", if keys { pack_channels(g) } else { tokens * value_groups });
            u("CLIP_STEPS", CLIP_STEPS);
        }
        Pass::Append | Pass::CopyTokens | Pass::Unpack | Pass::UnpackRotated => {}
    }
    let fold = matches!(pass, Pass::FoldHistory | Pass::FoldWindow);
    let scale = (f64::from(g.softmax_scale) * std::f64::consts::LOG2_E) as f32;
    let _ = writeln!(text, "const FOLD: bool = {fold};");
    let _ = writeln!(text, "const VALUES_ROTATED: bool = {};", g.values.rotated);
    let _ = writeln!(text, "const ROTATION_SIZE: u32 = {}u;", rotation_size(l.head_dim));
    let _ = writeln!(text, "const ROTATION_SCALE: f32 = {:?};", rotation_scale(l.head_dim));
    let _ = writeln!(text, "const UNROTATION_SCALE: f32 = {:?};", inverse_rotation_scale(l.head_dim));
    let _ = writeln!(text, "const SOFT_CAPS: bool = {};", g.has_soft_caps());
    let _ = writeln!(text, "const LOGIT_SCALE: f32 = {scale:e};");
    if matches!(pass, Pass::PackKeys | Pass::PackValues) {
        let format = if pass == Pass::PackKeys { g.keys } else { g.values };
        let _ = writeln!(text, "const PACK_ROUNDED: bool = {};", format.zero_point == ZeroPoint::Rounded);
        let _ = writeln!(text, "const CLIPPING: bool = {};", format.clipping);
        let _ = writeln!(text, "const CLIP_STEP: f32 = {CLIP_STEP:?};");
        let _ = writeln!(text, "const CLIP_LEAST_EXPONENT: i32 = {CLIP_LEAST_EXPONENT};");
    }
    text
}

/// The lowest code of each byte of the plane of low bits.
fn byte_mask(bits: Bits) -> u32 {
    if bits.is_quantized() { ((1 << bits.low_bits()) - 1) * 0x0101_0101 } else { 0 }
}
