//! The kernels that one class of layers runs.

use super::{Context, Grid, Kernel, Kernels, Pass, Variant};
use crate::error::Error;
use crate::schedule::Tiles;
use crate::shape::Shape;
use std::collections::HashMap;

/// By pass: which kernel it is, and its pipeline as far as it has been needed.
#[derive(Debug)]
pub(crate) struct KernelSet {
    pub(crate) store: Kernels,
    variant: Variant,
    kernels: HashMap<Pass, (Kernel, Option<wgpu::ComputePipeline>)>,
}

impl KernelSet {
    /// Nothing is built yet.
    pub(crate) fn new(store: Kernels, s: &Shape, tiles: &Tiles, variant: Variant) -> KernelSet {
        let context = Context::new(s, tiles, variant);
        let of = |pass: Pass| (pass, (pass.kernel(&context), None));
        KernelSet { store, variant, kernels: Pass::of(&context).into_iter().map(of).collect() }
    }

    pub(crate) fn variant(&self) -> Variant {
        self.variant
    }

    /// The pipeline of a pass, if it has been built.
    pub(crate) fn get(&self, pass: Pass) -> Option<&wgpu::ComputePipeline> {
        self.kernels.get(&pass)?.1.as_ref()
    }

    /// How the work of a pass becomes workgroups.
    pub(crate) fn grid(&self, pass: Pass) -> Grid {
        // A set has every pass that its layers can run.
        self.kernels.get(&pass).map_or_else(Grid::default, |(kernel, _)| kernel.grid)
    }

    /// Those that have not been built.
    pub(crate) fn missing(&self) -> impl Iterator<Item = &Kernel> {
        self.kernels.values().filter(|(_, pipeline)| pipeline.is_none()).map(|(kernel, _)| kernel)
    }

    /// Builds what a pass needs if that has not been done.
    pub(crate) fn ensure(&mut self, pass: Pass) -> Result<(), Error> {
        if let Some((kernel, pipeline @ None)) = self.kernels.get_mut(&pass) {
            *pipeline = Some(self.store.get(kernel)?);
        }
        Ok(())
    }

    /// Runs `edit` over the text of a pass, for tests of what happens where a kernel is wrong.
    #[cfg(test)]
    pub(crate) fn break_pass(&mut self, pass: Pass, edit: impl Fn(&str) -> String) {
        let (kernel, pipeline) = self.kernels.get_mut(&pass).unwrap();
        let text = edit(&kernel.source().target_text());
        *pipeline = Some(self.store.get_text(kernel, text).unwrap());
    }
}
