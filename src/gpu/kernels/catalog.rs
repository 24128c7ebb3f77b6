//! Every kernel that the library can build, for tools that take them through compilers.

use super::lane_order;
use super::{Context, Pass, Reads, ShaderSource, Variant};
use crate::config::{CacheConfig, LayerAttention};
use crate::format::{Axis, Bits, Dtype, TensorFormat, ZeroPoint};
use crate::schedule::{TileLimits, Tiles};
use crate::shape::Shape;

/// Every trait of a head_dim that shaders tell apart: see `traits` below.
const HEAD_DIMS: [u32; 8] = [8, 40, 64, 80, 128, 136, 256, 512];

/// A kernel and the configuration that it is for.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct CatalogEntry {
    /// `pass/variant/configuration`, unique.
    pub name: String,
    /// Its entry point.
    pub entry_point: &'static str,
    /// The variant that runs it. Variants share many passes: entries may differ in nothing but unused
    /// constants.
    pub variant: Variant,
    /// The WGSL.
    pub source: ShaderSource,
}

/// Every pass of every variant: for all pairs of widths and one head_dim of each kind, and with each other
/// choice of a configuration in turn.
pub fn catalog() -> Vec<CatalogEntry> {
    let mut entries = Vec::new();
    for (configuration, config) in configurations() {
        // All of them are valid: a test checks it.
        let Ok(s) = Shape::new(&config) else { continue };
        let tiles = Tiles::new(&s, &TileLimits::WGSL);
        for variant in Variant::ALL.iter().copied().filter(|v| v.supports(&s).is_ok()) {
            let context = Context::new(&s, &tiles, variant);
            for pass in Pass::of(&context) {
                let name = format!("{}/{variant:?}/{configuration}", pass_name(pass)).to_lowercase();
                let (entry_point, source) = (pass.entry_point(), pass.source(&s, variant));
                entries.push(CatalogEntry { name, entry_point, variant, source });
            }
            if context.needs_linear_lanes() {
                let name = format!("lane_order/{variant:?}/{configuration}").to_lowercase();
                let (entry_point, source) = ("lane_order", lane_order::source(&context));
                entries.push(CatalogEntry { name, entry_point, variant, source });
            }
        }
    }
    entries
}

fn pass_name(pass: Pass) -> String {
    match pass {
        Pass::Decode(Reads::Packed, rows) => format!("decode_packed-{rows}"),
        Pass::Decode(Reads::Unpacked, rows) => format!("decode_unpacked-{rows}"),
        Pass::Decode(Reads::Both, rows) | Pass::Merge(rows) => {
            format!("{}-{rows}", pass.entry_point())
        }
        Pass::Pack(tensor) | Pass::RotateRows(tensor) | Pass::UnpackRotated(tensor) => {
            format!("{}-{tensor:?}", pass.entry_point())
        }
        _ => pass.entry_point().to_string(),
    }
}

fn configurations() -> Vec<(String, CacheConfig)> {
    let base = |head_dim: u32, ratio: u32| CacheConfig::new(1, 8 * ratio, 8, head_dim);
    let mut configs = Vec::new();
    for &keys in Bits::ALL {
        for &values in Bits::ALL {
            let name = format!("k{}v{}", keys.get(), values.get());
            for head_dim in HEAD_DIMS {
                configs.push((format!("{name}-d{head_dim}"), base(head_dim, 4).with_bits(keys, values)));
                if keys == values && keys.is_quantized() {
                    let rotated = TensorFormat::new(values).with_rotation().with_clipping();
                    let config = base(head_dim, 4).with_formats(TensorFormat::new(keys), rotated);
                    configs.push((format!("{name}-d{head_dim}-rotated"), config));
                    let config =
                        base(head_dim, 4).with_formats(TensorFormat::new(keys).with_rotation(), rotated);
                    configs.push((format!("{name}-d{head_dim}-both-rotated"), config));
                    let compact = TensorFormat::new(keys).with_compact_parameters();
                    let config = base(head_dim, 4).with_formats(compact, compact);
                    configs.push((format!("{name}-d{head_dim}-compact"), config));
                }
            }
            if keys != values {
                continue;
            }
            for head_dim in [64, 128] {
                let mut other = |what: &str, config: CacheConfig| {
                    configs.push((format!("{name}-d{head_dim}-{what}"), config.with_bits(keys, values)));
                };
                for ratio in [1, 7, 8] {
                    other(&format!("gqa{ratio}"), base(head_dim, ratio));
                }
                for group in [16, 64, 128] {
                    other(&format!("g{group}"), base(head_dim, 4).with_group_size(group));
                }
                other("gv", base(head_dim, 4).with_value_group_size(head_dim));
                for format in Dtype::ALL.iter().copied().filter(|d| *d != Dtype::F16) {
                    other(&format!("{format:?}"), base(head_dim, 4).with_window_format(format));
                }
                other("rounded", base(head_dim, 4).with_zero_point(ZeroPoint::Rounded));
                if keys.is_quantized() {
                    let clipped = TensorFormat::new(keys).with_clipping();
                    other("clipped", base(head_dim, 4).with_formats(clipped, clipped));
                    let compact = clipped.with_compact_parameters();
                    for group in [16, 64] {
                        let config = base(head_dim, 4).with_formats(compact, compact).with_group_size(group);
                        other(&format!("clipped-compact-g{group}"), config);
                    }
                    for (what, compact) in [("axes", false), ("axes-compact", true)] {
                        let format =
                            |axis| TensorFormat { compact, ..TensorFormat::new(keys).with_axis(axis) };
                        let (per_token, per_channel) = (format(Axis::PerToken), format(Axis::PerChannel));
                        other(what, base(head_dim, 4).with_formats(per_token, per_channel));
                        let rotated = [per_token, per_channel].map(TensorFormat::with_rotation);
                        let name = format!("{what}-rotated");
                        other(&name, base(head_dim, 4).with_formats(rotated[0], rotated[1]));
                    }
                    let rotated = TensorFormat::new(values).with_rotation();
                    other("unclipped-rotated", base(head_dim, 4).with_formats(clipped, rotated));
                }
                let capped = LayerAttention { soft_cap: Some(50.0), ..Default::default() };
                other("capped", base(head_dim, 4).with_layer_attention(vec![capped]));
            }
        }
    }
    configs
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// What makes shaders of two head_dims differ in more than the values of constants: whether the last
    /// chunk of 16 channels is full and shares among invocations are even, how many rows a workgroup takes,
    /// and which variants there are.
    fn traits(head_dim: u32) -> [String; 3] {
        let s = Shape::new(&CacheConfig::new(1, 32, 8, head_dim)).unwrap();
        let tiles = Tiles::new(&s, &TileLimits::WGSL);
        let variants: Vec<_> = Variant::ALL.iter().copied().filter(|v| v.supports(&s).is_ok()).collect();
        let even = head_dim.div_ceil(16).is_power_of_two();
        [
            format!("full chunks {}, even shares {even}", head_dim.is_multiple_of(16)),
            format!("rows {:?}, prefill {}", tiles.decode_tiles(), tiles.prefill_tile()),
            format!("{variants:?}"),
        ]
    }

    #[test]
    fn the_catalog_has_every_kind_of_head_dim() {
        let known: BTreeSet<_> = HEAD_DIMS.into_iter().flat_map(traits).collect();
        for head_dim in (8..=512).step_by(8) {
            for found in traits(head_dim) {
                assert!(known.contains(&found), "no head_dim of HEAD_DIMS is as {head_dim}: {found}");
            }
        }
    }

    #[test]
    fn the_configurations_of_the_catalog_are_valid() {
        for (name, config) in configurations() {
            Shape::new(&config).unwrap_or_else(|e| panic!("{name}: {e}"));
        }
    }

    #[test]
    fn the_catalog_has_every_width_variant_and_pass_by_one_name() {
        let entries = catalog();
        let names: BTreeSet<_> = entries.iter().map(|e| &e.name).collect();
        assert_eq!(names.len(), entries.len());
        for &keys in Bits::ALL {
            for &values in Bits::ALL {
                let pair = format!("/k{}v{}-", keys.get(), values.get());
                for &variant in Variant::ALL {
                    let wanted = |e: &CatalogEntry| e.variant == variant && e.name.contains(&pair);
                    assert!(entries.iter().any(wanted), "{variant:?} {pair}");
                }
            }
        }
    }
}
