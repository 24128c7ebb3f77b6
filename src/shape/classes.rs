//! Which layers go together.

use super::GROUPS;
use super::checks::check;
use crate::config::{CacheConfig, LayerFormat};
use crate::error::Error;
use crate::format::{Tensor, TensorFormat, ZeroPoint};
use std::collections::HashMap;

/// Layers that agree on their format, and a configuration of a model that has no others, with the format
/// written out: axes and the group of channels are named.
pub(super) struct Class {
    /// By their numbers in the whole model.
    pub(super) layers: Vec<u32>,
    pub(super) config: CacheConfig,
}

/// The classes of a configuration, in order of their first layers.
pub(super) fn classes(c: &CacheConfig) -> Result<Vec<Class>, Error> {
    check((1..=65535).contains(&c.layers), "layers", c.layers, "1 to 65535")?;
    let entries = c.layer_attention.len() as u32;
    check([0, c.layers].contains(&entries), "layer_attention entries", entries, "none, or one per layer")?;
    if let Some((&layer, _)) = c.layer_formats.range(c.layers..).next() {
        return Err(Error::LayerOutOfRange { got: layer, layers: c.layers });
    }
    let mut classes: Vec<Class> = Vec::new();
    let mut known: HashMap<LayerFormat, usize> = HashMap::new();
    let mut base = c.clone();
    base.layers = 0;
    base.layer_attention.clear();
    base.layer_formats.clear();
    for layer in 0..c.layers {
        let format = c.format_of(layer);
        check_format("keys", format.keys, c.head_dim)?;
        check_format("values", format.values, c.head_dim)?;
        let format = canonical(format, c.head_dim);
        let at = *known.entry(format).or_insert_with(|| {
            classes.push(Class { layers: Vec::new(), config: base.clone().with_format(format) });
            classes.len() - 1
        });
        let class = &mut classes[at];
        class.layers.push(layer);
        class.config.layers += 1;
        class.config.layer_attention.extend(c.layer_attention.get(layer as usize));
    }
    // Each class has a scratch of its own.
    let share = c.max_scratch_bytes / classes.len() as u64;
    for class in &mut classes {
        class.config.max_scratch_bytes = share;
    }
    Ok(classes)
}

/// A format in one of the ways in which it can be written: without what 16 bits leave without a meaning.
fn plain(tensor: Tensor, format: TensorFormat) -> TensorFormat {
    match format.bits.is_quantized() {
        true => format.with_axis(format.axis_of(tensor)),
        false => TensorFormat::new(format.bits),
    }
}

/// The same for a layer, so that layers that mean the same are of one class. A group wider than the row is
/// the whole row.
fn canonical(format: LayerFormat, head_dim: u32) -> LayerFormat {
    let wanted = format.value_group_size.unwrap_or(format.group_size);
    // What is no group is refused later.
    let group = if GROUPS.contains(&wanted) { wanted.min(head_dim) } else { wanted };
    let (keys, values) = (plain(Tensor::Keys, format.keys), plain(Tensor::Values, format.values));
    LayerFormat { keys, values, value_group_size: Some(group), ..format }
}

/// Refuses choices of a format that contradict each other.
fn check_format(name: &'static str, format: TensorFormat, head_dim: u32) -> Result<(), Error> {
    let TensorFormat { bits, rotated, compact, zero_point, .. } = format;
    let contradiction = |a: &str, b: String, instead| {
        let a = format!("{name}.{a}");
        Err(Error::Contradiction { a, b, instead })
    };
    if rotated && !head_dim.is_multiple_of(8) {
        let instead = "rotation needs a power of two, 8 or more, that divides head_dim";
        return contradiction("rotated", format!("head_dim = {head_dim}"), instead);
    }
    if rotated && !bits.is_quantized() {
        let instead = "quantize the tensor, or leave it unrotated";
        return contradiction("rotated", format!("{name}.bits = 16"), instead);
    }
    if compact && zero_point == ZeroPoint::Rounded {
        let instead = "compact parameters have a rule of their own: use ZeroPoint::Min";
        return contradiction("compact", format!("{name}.zero_point = Rounded"), instead);
    }
    Ok(())
}
