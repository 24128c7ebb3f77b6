//! A kernel and what it reads and writes.

use crate::gpu::Gpu;
use kivi_wgpu::wgpu;

/// A pipeline with its buffers.
pub struct Kernel {
    pub pipeline: wgpu::ComputePipeline,
    pub group: wgpu::BindGroup,
}

impl Kernel {
    /// With buffers in the order of their bindings, from 0 on.
    pub fn new(gpu: &Gpu, pipeline: &wgpu::ComputePipeline, buffers: &[&wgpu::Buffer]) -> Kernel {
        let buffers: Vec<_> = (0..).zip(buffers.iter().copied()).collect();
        Kernel::numbered(gpu, pipeline, &buffers)
    }

    /// With the numbers of the bindings.
    pub fn numbered(gpu: &Gpu, pipeline: &wgpu::ComputePipeline, buffers: &[(u32, &wgpu::Buffer)]) -> Kernel {
        Kernel { pipeline: pipeline.clone(), group: gpu.bind(pipeline, buffers) }
    }

    pub fn dispatch(&self, pass: &mut wgpu::ComputePass<'_>, x: u32, y: u32) {
        pass.set_pipeline(&self.pipeline);
        pass.set_bind_group(0, &self.group, &[]);
        pass.dispatch_workgroups(x, y, 1);
    }
}
