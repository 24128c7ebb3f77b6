//! The constants of a kernel's prelude.

use super::{Context, MAX_WORKGROUPS};
use crate::format::{Axis, Dtype, Tensor, inverse_rotation_scale, rotation_scale, rotation_size};
use crate::gpu::params::ABSENT;
use crate::plan::Slot;
use std::collections::BTreeSet;
use std::fmt::Write;

/// A constant's value, of its type in WGSL.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Value {
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
}

/// Constants by name, each once.
#[derive(Debug, Clone, Default)]
pub(crate) struct Constants(Vec<(&'static str, Value)>);

impl Constants {
    pub(super) fn u32(&mut self, name: &'static str, value: u32) {
        self.0.push((name, Value::U32(value)));
    }

    pub(super) fn i32(&mut self, name: &'static str, value: i32) {
        self.0.push((name, Value::I32(value)));
    }

    pub(super) fn f32(&mut self, name: &'static str, value: f32) {
        self.0.push((name, Value::F32(value)));
    }

    pub(super) fn flag(&mut self, name: &'static str, value: bool) {
        self.0.push((name, Value::Bool(value)));
    }

    /// WGSL that defines those that are `declared`.
    pub(super) fn declared(&self, declared: impl Iterator<Item = &'static str>) -> String {
        let declared: BTreeSet<&str> = declared.collect();
        let mut text = String::from("// Generated.\n");
        for (name, value) in self.0.iter().filter(|(name, _)| declared.contains(name)) {
            let _ = match value {
                Value::U32(value) => writeln!(text, "const {name}: u32 = {value}u;"),
                Value::I32(value) => writeln!(text, "const {name}: i32 = {value};"),
                Value::F32(value) => writeln!(text, "const {name}: f32 = {value:e};"),
                Value::Bool(value) => writeln!(text, "const {name}: bool = {value};"),
            };
        }
        text
    }

    /// What pieces of several families read: sizes of a cache.
    pub(super) fn of_cache(c: &Context<'_>) -> Constants {
        let (shape, layout) = (c.shape, &c.shape.layout);
        let mut k = Constants::default();
        k.u32("MAX_GROUPS", MAX_WORKGROUPS);
        k.u32("HEAD_DIM", layout.head_dim);
        k.u32("KV_HEADS", layout.kv_heads);
        k.u32("HEADS_PER_KV", shape.heads_per_kv);
        k.u32("F32", Dtype::F32.index());
        k.u32("F16", Dtype::F16.index());
        k.u32("BF16", Dtype::Bf16.index());
        k.u32("ABSENT", ABSENT);
        k.u32("WINDOW_FORMAT", shape.window_format.index());
        k.u32("PACKED_FORMAT", shape.sixteen_bit_format().index());
        k.u32("STAGING_BIT", Slot::STAGING_BIT);
        k.u32("RING_SLOTS", shape.unpacked_slots());
        k.u32("STAGING_SLOTS", shape.staging_tokens);
        k.u32("TOKEN_WORDS", shape.token_words());
        k.u32("ROW_WORDS", shape.row_words());
        k.u32("GROUP", layout.group);
        k.u32("BLOCK_WORDS", layout.block_words());
        k.u32("BLOCKS_PER_PAGE", layout.blocks_per_page());
        k.u32("HEAD_WORDS", layout.head_words());
        k.u32("CHANNEL_GROUP", layout.channel_group);
        k.tensors(c);
        k.u32("PARTIAL_VECS", (c.tiles.partial_bytes() / 16) as u32);
        k.u32("ROTATION_SIZE", rotation_size(layout.head_dim));
        k.flag("KEY_COMPACT", layout.keys.compact);
        k.flag("VALUE_COMPACT", layout.values.compact);
        k.flag("KEYS_PER_TOKEN", layout.tensor(Tensor::Keys).axis == Axis::PerToken);
        k.flag("VALUES_PER_CHANNEL", layout.tensor(Tensor::Values).axis == Axis::PerChannel);
        k.flag("KEYS_ROTATED", layout.keys.rotated);
        k.flag("VALUES_ROTATED", layout.values.rotated);
        k.flag("SOFT_CAPS", shape.has_soft_caps());
        k.f32("ROTATION_SCALE", rotation_scale(layout.head_dim));
        k.f32("UNROTATION_SCALE", inverse_rotation_scale(layout.head_dim));
        k.f32("LOGIT_SCALE", (f64::from(shape.softmax_scale) * std::f64::consts::LOG2_E) as f32);
        k
    }

    /// How keys and values are packed.
    fn tensors(&mut self, c: &Context<'_>) {
        let layout = &c.shape.layout;
        for (tensor, names) in [
            (
                Tensor::Keys,
                ["KEY_BITS", "KEY_LOW_BITS", "KEY_LOW_WORDS", "KEY_GROUPS", "KEY_CODES", "KEY_PARAMS"],
            ),
            (
                Tensor::Values,
                [
                    "VALUE_BITS",
                    "VALUE_LOW_BITS",
                    "VALUE_LOW_WORDS",
                    "VALUE_GROUPS",
                    "VALUE_CODES",
                    "VALUE_PARAMS",
                ],
            ),
        ] {
            let t = layout.tensor(tensor);
            let bits = t.format.bits;
            let values = [
                bits.get(),
                // Of the plane of the low bits; a width that is not a power of two has a high bit in another
                // plane.
                bits.low_bits(),
                bits.low_words(t.line_codes()),
                t.channel_groups(),
                t.first,
                t.first_param(),
            ];
            names.into_iter().zip(values).for_each(|(name, value)| self.u32(name, value));
        }
    }
}
