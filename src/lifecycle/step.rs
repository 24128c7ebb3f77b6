//! A step that has begun: which of its layers have been recorded.

use crate::error::Error;
use crate::plan::{Plan, PlannedStep};
use crate::shape::CacheShape;

/// One step through all layers, until it is finished or dropped. The layers may be recorded in any order,
/// each once.
#[derive(Debug)]
pub struct Begun<W> {
    planned: PlannedStep,
    /// The executor's.
    pub work: W,
    /// Of each layer of the model: its class, and whether it has been recorded.
    layers: Vec<(usize, bool)>,
    /// By class: the layer whose new tokens are in the staging buffer.
    staged: Vec<Option<u32>>,
}

impl<W> Begun<W> {
    pub(super) fn new(shape: &CacheShape, planned: PlannedStep, work: W) -> Begun<W> {
        let layers = shape.places.iter().map(|(class, _)| (*class, false)).collect();
        let staged = vec![None; shape.classes.len()];
        Begun { planned, work, layers, staged }
    }

    /// The work of each class.
    pub fn plans(&self) -> &[Plan] {
        &self.planned.plans
    }

    /// New tokens over all sequences: rows of keys and values.
    pub fn tokens(&self) -> u32 {
        self.planned.plans[0].tokens
    }

    /// Queries over all sequences: rows of queries and outputs.
    pub fn queries(&self) -> u32 {
        self.planned.plans[0].queries
    }

    fn layer(&self, layer: u32) -> Result<(usize, bool), Error> {
        let error = Error::LayerOutOfRange { got: layer, layers: self.layers.len() as u32 };
        self.layers.get(layer as usize).copied().ok_or(error)
    }

    /// Whether a layer may be recorded.
    ///
    /// # Errors
    /// [`Error::LayerOutOfRange`], [`Error::LayerRepeated`].
    pub fn check_record(&self, layer: u32) -> Result<(), Error> {
        let (_, recorded) = self.layer(layer)?;
        if recorded { Err(Error::LayerRepeated(layer)) } else { Ok(()) }
    }

    /// A layer has been recorded.
    pub fn recorded(&mut self, layer: u32) {
        if let Some((class, recorded)) = self.layers.get_mut(layer as usize) {
            *recorded = true;
            if self.planned.plans[*class].uses_staging {
                self.staged[*class] = Some(layer);
            }
        }
    }

    /// Whether queries may attend to a layer that has been recorded.
    ///
    /// # Errors
    /// [`Error::LayerOutOfRange`]; [`Error::LayerMissing`] if the layer has not been recorded;
    /// [`Error::StagingOverwritten`] if another layer was recorded since and the step is longer than the
    /// ring.
    pub fn check_attend(&self, layer: u32) -> Result<(), Error> {
        let (class, recorded) = self.layer(layer)?;
        if self.tokens() > 0 && !recorded {
            return Err(Error::LayerMissing(layer));
        }
        match self.staged[class] {
            Some(by) if by != layer => Err(Error::StagingOverwritten { layer, by }),
            _ => Ok(()),
        }
    }

    /// The plan, if every layer has been recorded.
    pub(super) fn complete(self) -> Result<PlannedStep, Error> {
        let missing = self.layers.iter().position(|(_, recorded)| !recorded);
        match missing.filter(|_| self.tokens() > 0) {
            Some(missing) => Err(Error::LayerMissing(missing as u32)),
            None => Ok(self.planned),
        }
    }
}
