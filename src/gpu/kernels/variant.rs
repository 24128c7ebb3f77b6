//! The variants of the attention kernels, and which of them a device can run.

use super::lane_order::is_linear;
use super::{Context, Reads, clusters};
use crate::error::Error;
use crate::schedule::{TileLimits, Tiles};
use crate::shape::Shape;

/// How attention over the packed pages is computed. Words and state are the same in all variants; outputs
/// differ by rounding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Variant {
    /// f32 arithmetic and workgroup memory: runs on every WebGPU device, with every configuration.
    Portable,
    /// f32 arithmetic in clusters of 4 or 8 invocations that exchange data by subgroup shuffles, without
    /// workgroup memory or barriers. For a head_dim of 64 or 128, groups of at least `head_dim / 4` tokens
    /// and at most 4 value groups per token, on devices with [`wgpu::Features::SUBGROUP`] whose subgroups
    /// have at least `head_dim / 16` invocations.
    Subgroups,
}

/// How attention of decode steps is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DecodeKernels {
    Portable,
    Clusters,
}

/// How attention of long chunks is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PrefillKernels {
    Portable,
    Clusters,
}

/// How partial results are joined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MergeKernels {
    Wide,
    Narrow,
}

impl Variant {
    /// All variants.
    pub const ALL: &'static [Variant] = &[Variant::Portable, Variant::Subgroups];

    pub(super) fn decode(self) -> DecodeKernels {
        match self {
            Variant::Portable => DecodeKernels::Portable,
            Variant::Subgroups => DecodeKernels::Clusters,
        }
    }

    /// What its decode passes read, each by a kernel of its own.
    pub(crate) fn decode_reads(self) -> &'static [Reads] {
        match self.decode() {
            // One pass instead of two: a GPU that has little to do waits for each.
            DecodeKernels::Portable => &[Reads::Both],
            // Processors run both sides of a branch.
            DecodeKernels::Clusters => &[Reads::Unpacked, Reads::Packed],
        }
    }

    pub(super) fn prefill(self) -> PrefillKernels {
        match self {
            Variant::Portable => PrefillKernels::Portable,
            Variant::Subgroups => PrefillKernels::Clusters,
        }
    }

    pub(super) fn merge(self) -> MergeKernels {
        match self {
            Variant::Portable => MergeKernels::Wide,
            Variant::Subgroups => MergeKernels::Narrow,
        }
    }

    /// Features that it needs.
    pub fn features(self) -> wgpu::Features {
        match self {
            Variant::Portable => wgpu::Features::empty(),
            Variant::Subgroups => wgpu::Features::SUBGROUP,
        }
    }

    /// Whether it has kernels for layers of a shape; if not, what it needs.
    ///
    /// # Errors
    /// What the configuration should have.
    pub fn supports(self, s: &Shape) -> Result<(), &'static str> {
        self.has_kernels(&Context::new(s, &Tiles::new(s, &TileLimits::WGSL), self))
    }

    fn has_kernels(self, c: &Context<'_>) -> Result<(), &'static str> {
        match self.decode() {
            DecodeKernels::Portable => Ok(()),
            DecodeKernels::Clusters => clusters::supports(c),
        }
    }

    /// The variant to run on `device`: the one that the host `chose`, else the preferred one where it can
    /// run.
    pub(crate) async fn choose(
        chose: Option<Variant>,
        device: &wgpu::Device,
        queue: &wgpu::Queue,
        s: &Shape,
        tiles: &Tiles,
    ) -> Result<Variant, Error> {
        let wanted = chose.unwrap_or_else(|| Variant::preferred(&device.adapter_info()));
        let context = Context::new(s, tiles, wanted);
        let mut available = wanted.has_kernels(&context).and_then(|()| context.check(device));
        if available.is_ok() && context.needs_linear_lanes() && !is_linear(device, queue, &context).await? {
            available = Err("an adapter that numbers a workgroup's invocations subgroup by subgroup");
        }
        match (available, chose) {
            (Ok(()), _) => Ok(wanted),
            (Err(_), None) => Ok(Variant::Portable),
            (Err(needed), Some(_)) => {
                Err(Error::VariantUnavailable { variant: format!("{wanted:?}"), needed })
            }
        }
    }

    /// The variant that pays on an adapter.
    ///
    /// `Subgroups` keeps the whole state of its rows in registers, which pays where workgroup memory and
    /// barriers are slow: on software adapters. GPUs have not the registers.
    pub fn preferred(adapter: &wgpu::AdapterInfo) -> Variant {
        if adapter.device_type == wgpu::DeviceType::Cpu { Variant::Subgroups } else { Variant::Portable }
    }
}
