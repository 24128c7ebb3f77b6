//! Shader assembly: a prelude of constants, the shared pieces, and the pass's own file, concatenated.

use super::io::ABSENT;
use super::shapes::{
    AttendShape, CLUSTER_WORKGROUP, FoldShape, PACK_WORKGROUP, PackShape, Source, by_dots, cluster_rows,
    items_at_most,
};
use super::variant::{Variant, lanes};
use crate::format::{
    Axis, Bits, CLIP_LEAST_EXPONENT, CLIP_STEP, CLIP_STEPS, Dtype, Tensor, ZeroPoint, inverse_rotation_scale,
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
    /// Keys or values of whole blocks.
    Pack(Tensor),
    /// Keys or values that are about to be packed per channel, rotated first.
    RotateRows(Tensor),
    /// Queries of a layer whose keys are rotated.
    RotateQueries,
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
    /// The same for keys or values that are rotated.
    UnpackRotated(Tensor),
}

impl Pass {
    /// Every pass that a cache of this geometry can run.
    pub fn all(g: &Geometry) -> Vec<Pass> {
        let mut passes = vec![Pass::Append];
        let tensors = [Tensor::Keys, Tensor::Values].map(|tensor| g.layout.tensor(tensor));
        for t in tensors {
            passes.extend(t.rotates_apart().then_some(Pass::RotateRows(t.tensor)));
            passes.push(Pass::Pack(t.tensor));
        }
        passes.extend([Pass::CopyTokens, Pass::CopyBlocks, Pass::CopyBlocksAcross]);
        if tensors.iter().any(|t| !t.format.rotated) {
            passes.push(Pass::Unpack);
        }
        for t in tensors.into_iter().filter(|t| t.format.rotated) {
            passes.push(Pass::UnpackRotated(t.tensor));
        }
        if g.layout.keys.rotated {
            passes.push(Pass::RotateQueries);
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
            Pass::Pack(_) => "pack",
            Pass::RotateRows(_) => "rotate_rows",
            Pass::RotateQueries => "rotate_queries",
            Pass::AttendHistory(_) => "attend_history",
            Pass::AttendWindow(_) => "attend_window",
            Pass::FoldHistory => "fold_history",
            Pass::FoldWindow => "fold_window",
            Pass::Merge(_) => "merge",
            Pass::CopyTokens => "copy_tokens",
            Pass::CopyBlocks => "copy_blocks",
            Pass::CopyBlocksAcross => "copy_blocks_across",
            Pass::Unpack => "unpack",
            Pass::UnpackRotated(_) => "unpack_rotated",
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
            Pass::Pack(tensor) => {
                let layout = g.layout.tensor(tensor);
                let mut pieces = pieces!["lib/quantizer.wgsl", "lib/fit.wgsl"];
                pieces.extend(if layout.rotates_apart() {
                    pieces!["lib/rows_stored.wgsl"]
                } else if layout.format.rotated {
                    pieces!["lib/tokens.wgsl", "lib/rotation.wgsl", "lib/rows_rotated.wgsl"]
                } else {
                    pieces!["lib/tokens.wgsl", "lib/rows_plain.wgsl"]
                });
                pieces.extend(pieces!["lib/groups.wgsl", "pack.wgsl"]);
                pieces
            }
            Pass::RotateRows(_) => pieces!["lib/tokens.wgsl", "lib/rotation.wgsl", "rotate_rows.wgsl"],
            Pass::RotateQueries => pieces!["lib/rotation.wgsl", "rotate_queries.wgsl"],
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
                let [keys, values] = [Tensor::Keys, Tensor::Values].map(|tensor| g.layout.tensor(tensor));
                let keys_by_vectors = keys.axis == Axis::PerToken;
                let values_by_vectors = values.axis == Axis::PerChannel;
                if keys_by_vectors || values_by_vectors {
                    pieces.extend(pieces!["lib/vectors_packed.wgsl"]);
                }
                pieces.extend(if keys_by_vectors {
                    pieces!["lib/keys_plain.wgsl", "lib/queries_float.wgsl", "lib/keys_by_vectors.wgsl"]
                } else if !keys.format.bits.is_quantized() {
                    pieces!["lib/keys_plain.wgsl", "lib/queries_float.wgsl", "lib/keys_sixteen.wgsl"]
                } else if by_dots(g, variant, rows) {
                    pieces!["lib/keys_quantized.wgsl", "lib/keys_dot.wgsl"]
                } else {
                    pieces!["lib/keys_quantized.wgsl", "lib/queries_float.wgsl", "lib/keys_float.wgsl"]
                });
                pieces.extend(if values_by_vectors {
                    pieces!["lib/values_by_vectors.wgsl"]
                } else if values.format.bits.is_quantized() {
                    pieces!["lib/values_quantized.wgsl"]
                } else {
                    pieces!["lib/values_sixteen.wgsl"]
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
            Pass::UnpackRotated(_) => pieces![
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
    u("CHANNEL_GROUP", l.channel_group);
    for (tensor, name) in [(Tensor::Keys, "KEY"), (Tensor::Values, "VALUE")] {
        let t = l.tensor(tensor);
        let bits = t.format.bits;
        let mut u = |what: &str, value: u32| u(&format!("{name}_{what}"), value);
        u("BITS", bits.get());
        // Of the plane of the low bits; a width that is not a power of two has a high bit in another plane.
        u("LOW_BITS", bits.low_bits());
        u("LOW_WORDS", bits.low_words(l.head_dim));
        u("CODES_PER_WORD", 32 / bits.low_bits());
        u("BYTE_MASK", byte_mask(bits));
        u("ROW_WORDS", t.row_words());
        u("GROUPS", t.channel_groups());
        u("CODES", t.first);
        u("PARAMS", t.first_param());
    }
    u("KEY_PARTS", 8 / l.keys.bits.low_bits());
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
        Pass::Pack(tensor) => {
            let (t, shape) = (l.tensor(tensor), PackShape::new(g, tensor));
            u("PACK_TENSOR", u32::from(tensor == Tensor::Values));
            u("PACK_BITS", t.format.bits.get());
            u("PACK_LOW_BITS", t.format.bits.low_bits());
            u("PACK_LOW_WORDS", t.format.bits.low_words(l.head_dim));
            u("PACK_ROW_WORDS", t.row_words());
            u("PACK_ROW_GROUPS", t.channel_groups());
            u("PACK_CODES", t.first);
            u("PACK_PARAMS", t.first_param());
            u("PACK_BATCHES", shape.batches);
            u("PACK_TOKENS", shape.tokens);
            u("PACK_CHANNELS", shape.channels);
            u("PACK_GROUPS", shape.groups);
            u("ROTATED_ROWS", shape.tokens);
            u("ROTATION_WORKGROUP", PACK_WORKGROUP);
            u("PACK_WORKGROUP", PACK_WORKGROUP);
            u("CLIP_STEPS", CLIP_STEPS);
        }
        Pass::RotateRows(tensor) | Pass::UnpackRotated(tensor) => {
            u("ROTATED_TENSOR", u32::from(tensor == Tensor::Values));
        }
        Pass::RotateQueries | Pass::Append | Pass::CopyTokens | Pass::Unpack => {}
    }
    let fold = matches!(pass, Pass::FoldHistory | Pass::FoldWindow);
    let scale = (f64::from(g.softmax_scale) * std::f64::consts::LOG2_E) as f32;
    let mut flag = |name: &str, value: bool| {
        let _ = writeln!(text, "const {name}: bool = {value};");
    };
    flag("FOLD", fold);
    flag("KEY_COMPACT", l.keys.compact);
    flag("VALUE_COMPACT", l.values.compact);
    flag("KEYS_PER_TOKEN", l.tensor(Tensor::Keys).axis == Axis::PerToken);
    flag("VALUES_PER_CHANNEL", l.tensor(Tensor::Values).axis == Axis::PerChannel);
    flag("KEYS_ROTATED", l.keys.rotated);
    flag("VALUES_ROTATED", l.values.rotated);
    flag("SOFT_CAPS", g.has_soft_caps());
    if let Pass::Pack(tensor) = pass {
        let t = l.tensor(tensor);
        flag("PACK_PER_TOKEN", t.axis == Axis::PerToken);
        flag("PACK_COMPACT", t.format.compact);
        flag("PACK_ROUNDED", t.format.zero_point == ZeroPoint::Rounded);
        flag("CLIPPING", t.format.clipping);
        let _ = writeln!(text, "const CLIP_STEP: f32 = {CLIP_STEP:?};");
        let _ = writeln!(text, "const CLIP_LEAST_EXPONENT: i32 = {CLIP_LEAST_EXPONENT};");
    }
    let _ = writeln!(text, "const ROTATION_SIZE: u32 = {}u;", rotation_size(l.head_dim));
    let _ = writeln!(text, "const ROTATION_SCALE: f32 = {:?};", rotation_scale(l.head_dim));
    let _ = writeln!(text, "const UNROTATION_SCALE: f32 = {:?};", inverse_rotation_scale(l.head_dim));
    let _ = writeln!(text, "const LOGIT_SCALE: f32 = {scale:e};");
    text
}

/// The lowest code of each byte of the plane of low bits.
fn byte_mask(bits: Bits) -> u32 {
    if bits.is_quantized() { ((1 << bits.low_bits()) - 1) * 0x0101_0101 } else { 0 }
}
