//! The variants of the attention kernels, and which of them a device can run.

use super::lane_order::is_linear;
use super::shapes::{any_dot_fits, workgroup_bytes};
use crate::error::Error;
use crate::format::{Axis, Bits, Tensor};
use crate::geometry::Geometry;

/// How attention over the packed history is computed. Words and state are the same in all variants; outputs differ by rounding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Variant {
    /// f32 arithmetic and workgroup memory: runs on every WebGPU device, with every configuration.
    Portable,
    /// f32 arithmetic in clusters of 4 or 8 invocations that exchange data by subgroup shuffles, without workgroup memory or barriers. For a
    /// head_dim of 64 or 128, groups of at least `head_dim / 4` tokens and at most 4 value groups per token, on devices with
    /// [`wgpu::Features::SUBGROUP`] whose subgroups have at least `head_dim / 16` invocations.
    Subgroups,
    /// Logits of decode steps by integer dot products (`dot4I8Packed`), with the queries times the scales
    /// rounded to 8 bits per row and block; the rest as [`Variant::Portable`]. For keys of 2, 3 or 4 bits and
    /// a head_dim that is a multiple of 16, not on DX12; in tiles of more rows than workgroup memory holds
    /// (about 8: several new tokens, or more than 8 query heads per KV head) and in long chunks keys are as
    /// in `Portable`.
    ///
    /// Never chosen by default: what the rounding does to a row of the output depends on the model. With
    /// 2-bit keys and values it moves a row by 0.3 % of its norm on average and by up to 6 % on the
    /// activations in tests/data, by 1.9 % and 19.5 % on a layer of a real model that is not among them; 2
    /// bits have moved it by 13 %. It takes 5.1 instead of 8.0 vector instructions per element on AMD's
    /// compiler; on an NVIDIA H200 it is faster with one query head per KV head (148 instead of 188 µs), as
    /// fast with four, slower with eight.
    IntegerDot,
}

impl Variant {
    /// All variants.
    pub const ALL: [Variant; 3] = [Variant::Portable, Variant::Subgroups, Variant::IntegerDot];

    /// Features that it needs.
    pub fn features(self) -> wgpu::Features {
        match self {
            Variant::Portable | Variant::IntegerDot => wgpu::Features::empty(),
            Variant::Subgroups => wgpu::Features::SUBGROUP,
        }
    }

    /// Whether it runs on a backend of wgpu. On DX12, DXC refuses what naga makes of `dot4I8Packed`: `dot4add_i8packed(a, b, 0)`, whose 0 it takes for
    /// a 64-bit integer (<https://github.com/microsoft/DirectXShaderCompiler/issues/7400>).
    pub fn runs_on(self, backend: wgpu::Backend) -> bool {
        self != Variant::IntegerDot || backend != wgpu::Backend::Dx12
    }

    /// Whether it has kernels for this geometry; if not, what it needs.
    pub fn supports(self, g: &Geometry) -> Result<(), &'static str> {
        let l = &g.layout;
        let kivi_axes = l.tensor(Tensor::Keys).axis == Axis::PerChannel
            && l.tensor(Tensor::Values).axis == Axis::PerToken;
        match self {
            Variant::Portable => Ok(()),
            Variant::Subgroups if ![64, 128].contains(&l.head_dim) => Err("head_dim = 64 or 128"),
            Variant::Subgroups if l.group < l.head_dim / 4 => Err("group_size >= head_dim / 4"),
            Variant::Subgroups if !kivi_axes => Err("keys per channel and values per token"),
            Variant::Subgroups if l.tensor(Tensor::Values).channel_groups() > 4 => {
                Err("value_group_size >= head_dim / 4")
            }
            Variant::Subgroups => Ok(()),
            Variant::IntegerDot if ![Bits::Two, Bits::Three, Bits::Four].contains(&l.keys.bits) => {
                Err("keys of 2, 3 or 4 bits")
            }
            Variant::IntegerDot if !kivi_axes => Err("keys per channel and values per token"),
            Variant::IntegerDot if !l.head_dim.is_multiple_of(16) => {
                Err("a head_dim that is a multiple of 16")
            }
            Variant::IntegerDot if !any_dot_fits(g) => Err("at most 8 query heads per KV head"),
            Variant::IntegerDot => Ok(()),
        }
    }

    /// Whether `device` can run it with this geometry; if not, what is missing.
    pub(super) fn available(self, device: &wgpu::Device, g: &Geometry) -> Result<(), &'static str> {
        self.supports(g)?;
        if !self.runs_on(device.adapter_info().backend) {
            return Err("a backend other than DX12");
        }
        if !device.features().contains(self.features()) {
            return Err("a device with the features that Variant::features names");
        }
        if workgroup_bytes(g, self) > device.limits().max_compute_workgroup_storage_size {
            return Err("a device with 16 KiB of workgroup memory");
        }
        if self == Variant::Subgroups && device.adapter_info().subgroup_min_size < lanes(g) {
            return Err("an adapter whose smallest subgroup has head_dim / 16 invocations");
        }
        Ok(())
    }

    /// The variant to run on `device`: the one that the host `chose`, else the preferred one where it can run.
    pub(super) async fn choose(
        chose: Option<Variant>,
        device: &wgpu::Device,
        queue: &wgpu::Queue,
        g: &Geometry,
    ) -> Result<Variant, Error> {
        let wanted = chose.unwrap_or_else(|| Variant::preferred(&device.adapter_info()));
        let mut available = wanted.available(device, g);
        if wanted == Variant::Subgroups && available.is_ok() && !is_linear(device, queue, g).await? {
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

    /// The variant that pays on an adapter, and attends within the bound that the README states.
    ///
    /// `Subgroups` keeps the whole state of its rows in registers, which pays where workgroup memory and
    /// barriers are slow: on software adapters. GPUs have not the registers. `IntegerDot` is a host's own
    /// choice, since what it adds to the error depends on the model.
    pub fn preferred(adapter: &wgpu::AdapterInfo) -> Variant {
        if adapter.device_type == wgpu::DeviceType::Cpu { Variant::Subgroups } else { Variant::Portable }
    }
}

/// Invocations of a cluster: each owns 16 channels.
pub(super) fn lanes(g: &Geometry) -> u32 {
    g.layout.head_dim / 16
}
