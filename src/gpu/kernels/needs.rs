//! What a kernel needs of a device beyond WebGPU's defaults.

/// By default nothing.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Needs {
    pub(crate) features: wgpu::Features,
    /// Invocations of the smallest subgroup.
    pub(crate) subgroup_size: u32,
    /// Whether a workgroup's invocations must be numbered subgroup by subgroup, which no feature tells.
    pub(crate) linear_lanes: bool,
}

impl Needs {
    /// Whether a device has it, and that much workgroup memory; if not, what is missing.
    pub(super) fn check(&self, device: &wgpu::Device, workgroup_bytes: u32) -> Result<(), &'static str> {
        if !device.features().contains(self.features) {
            return Err("a device with the features that Variant::features names");
        }
        if workgroup_bytes > device.limits().max_compute_workgroup_storage_size {
            return Err("a device with 16 KiB of workgroup memory");
        }
        if device.adapter_info().subgroup_min_size < self.subgroup_size {
            return Err("an adapter whose smallest subgroup has head_dim / 16 invocations");
        }
        Ok(())
    }
}
