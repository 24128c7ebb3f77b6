//! A check that the adapter numbers a workgroup's invocations as the cluster kernels need.

use super::Context;
use super::clusters::{WORKGROUP, lanes};
use super::constants::Constants;
use super::source::{ShaderSource, pieces};
use crate::error::Error;
use crate::gpu::device::{Mapping, buffer, now_or_never, scoped};

/// The check's shader.
pub(super) fn source(c: &Context<'_>) -> ShaderSource {
    let mut constants = Constants::default();
    constants.u32("WORKGROUP", WORKGROUP);
    constants.u32("LANES", lanes(c));
    ShaderSource::new(&pieces!["lane_order.wgsl"], &constants, true)
}

/// Whether `LANES` consecutive invocations share a subgroup, in order. Submits a small command buffer.
pub(super) async fn is_linear(
    device: &wgpu::Device,
    queue: &wgpu::Queue,
    c: &Context<'_>,
) -> Result<bool, Error> {
    let size = u64::from(WORKGROUP) * 4;
    let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC;
    let ordered = buffer(device, "kivi lane order", size, usage).await?;
    let usage = wgpu::BufferUsages::COPY_DST | wgpu::BufferUsages::MAP_READ;
    let target = buffer(device, "kivi lane order", size, usage).await?;

    let source = source(c);
    let scope = device.push_error_scope(wgpu::ErrorFilter::Validation);
    let module = device.create_shader_module(wgpu::ShaderModuleDescriptor {
        label: Some("lane_order"),
        source: wgpu::ShaderSource::Wgsl(source.target_text().into()),
    });
    let pipeline = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
        label: Some("lane_order"),
        layout: None,
        module: &module,
        entry_point: Some("lane_order"),
        compilation_options: wgpu::PipelineCompilationOptions::default(),
        cache: None,
    });
    let group = device.create_bind_group(&wgpu::BindGroupDescriptor {
        label: Some("lane_order"),
        layout: &pipeline.get_bind_group_layout(0),
        entries: &[wgpu::BindGroupEntry { binding: 0, resource: ordered.as_entire_binding() }],
    });
    if now_or_never(scope.pop()).flatten().is_some() {
        // An adapter that cannot build it cannot build the kernels either.
        return Ok(false);
    }
    let map = scoped(device, || {
        let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        {
            let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
            pass.set_pipeline(&pipeline);
            pass.set_bind_group(0, &group, &[]);
            pass.dispatch_workgroups(1, 1, 1);
        }
        encoder.copy_buffer_to_buffer(&ordered, 0, &target, 0, size);
        queue.submit([encoder.finish()]);
        Mapping::new(&target)
    })?;
    map.done(device).await?;
    let bytes = target.slice(..).get_mapped_range().map_err(|e| Error::Device(e.to_string()))?;
    Ok(bytemuck::pod_collect_to_vec::<u8, u32>(&bytes).iter().all(|&ordered| ordered == 1))
}
