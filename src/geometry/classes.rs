//! Which layers go together.

use super::{Geometry, check};
use crate::config::{CacheConfig, LayerFormat};
use crate::error::Error;
use std::collections::HashMap;

/// Layers that agree on their format, and a configuration of a model that has no others.
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
    for layer in 0..c.layers {
        let format = c.format_of(layer);
        let at = *known.entry(format).or_insert_with(|| {
            let config = CacheConfig {
                layers: 0,
                layer_attention: Vec::new(),
                layer_formats: Default::default(),
                ..c.clone().with_format(format)
            };
            classes.push(Class { layers: Vec::new(), config });
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

impl Geometry {
    /// Of each layer of the model: its class among `classes`, and its index there.
    pub(crate) fn places(classes: &[Geometry]) -> Vec<(usize, usize)> {
        let mut places = vec![(0, 0); classes.iter().map(|g| g.layer_ids.len()).sum()];
        for (class, g) in classes.iter().enumerate() {
            for (index, &layer) in g.layer_ids.iter().enumerate() {
                places[layer as usize] = (class, index);
            }
        }
        places
    }
}
