//! The device, and what is short about making buffers, pipelines and bind groups on it.

#[path = "../../support/adapters.rs"]
mod adapters;

use anyhow::{Result, bail};
use kivi_wgpu::{KvCache, wgpu};
use std::marker::PhantomData;
use std::ops::Range;
use wgpu::BufferUsages as Usage;

pub struct Gpu {
    pub device: wgpu::Device,
    pub queue: wgpu::Queue,
    pub info: wgpu::AdapterInfo,
}

/// Content of a buffer on its way to the host.
pub struct Reading<T> {
    mapped: wgpu::Buffer,
    submission: wgpu::SubmissionIndex,
    content: PhantomData<T>,
}

impl<T: bytemuck::Pod> Reading<T> {
    /// Waits for it, not for what was submitted later.
    pub fn wait(self, gpu: &Gpu) -> Result<Vec<T>> {
        gpu.wait_for(self.submission)?;
        Ok(bytemuck::pod_collect_to_vec(&self.mapped.slice(..).get_mapped_range()?))
    }
}

impl Gpu {
    /// The adapter that `name` (or `KIVI_ADAPTER`, as in the library's tests) names by its index or a part of
    /// its name, else wgpu's choice, with the largest buffers that it allows: the vocabulary's matrix is
    /// long.
    pub fn open(name: Option<&str>) -> Result<Gpu> {
        // Tests set this to see the kernels that run everywhere.
        let optional = std::env::var("KIVI_OPTIONAL_FEATURES").as_deref() != Ok("0");
        let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle_from_env());
        pollster::block_on(async {
            let adapter = adapters::choose(&instance, name).await.map_err(anyhow::Error::msg)?;
            let available = adapter.limits();
            let faster = if optional { KvCache::optional_features() } else { wgpu::Features::empty() };
            let descriptor = wgpu::DeviceDescriptor {
                required_features: adapter.features() & (faster | wgpu::Features::TIMESTAMP_QUERY),
                required_limits: wgpu::Limits {
                    max_buffer_size: available.max_buffer_size,
                    max_storage_buffer_binding_size: available.max_storage_buffer_binding_size,
                    ..wgpu::Limits::default()
                },
                ..Default::default()
            };
            let (device, queue) = adapter.request_device(&descriptor).await?;
            Ok(Gpu { device, queue, info: adapter.get_info() })
        })
    }

    /// Whether it is a software adapter whose subgroups have 8 invocations: its loads are so slow that it has
    /// kernels of its own.
    pub fn shuffles_eight(&self) -> bool {
        self.info.device_type == wgpu::DeviceType::Cpu
            && self.device.features().contains(wgpu::Features::SUBGROUP)
            && (self.info.subgroup_min_size, self.info.subgroup_max_size) == (8, 8)
    }

    /// As people read it.
    pub fn name(&self) -> String {
        let kind = match self.info.device_type {
            wgpu::DeviceType::Cpu => ", a software adapter: its times say nothing about a GPU",
            _ => "",
        };
        format!("{} ({}, {}{kind})", self.info.name, self.info.backend, self.info.driver_info)
    }

    /// Bytes that a kernel can see of one buffer.
    pub fn largest_buffer(&self) -> u64 {
        let limits = self.device.limits();
        limits.max_storage_buffer_binding_size.min(limits.max_buffer_size)
    }

    /// Whether a buffer of so many bytes is possible.
    pub fn check(&self, label: &str, bytes: u64) -> Result<()> {
        let limit = self.largest_buffer();
        if bytes > limit {
            bail!(
                "{label} needs {bytes} bytes, and {} allows {limit} in one buffer: choose a smaller model, context or chunk",
                self.info.name
            );
        }
        Ok(())
    }

    /// An empty buffer that kernels read and write.
    pub fn storage(&self, label: &str, bytes: u64) -> Result<wgpu::Buffer> {
        self.check(label, bytes)?;
        let scope = self.device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
        let buffer = self.device.create_buffer(&wgpu::BufferDescriptor {
            label: Some(label),
            size: bytes,
            usage: Usage::STORAGE | Usage::COPY_SRC | Usage::COPY_DST,
            mapped_at_creation: false,
        });
        if pollster::block_on(scope.pop()).is_some() {
            bail!("no memory for {label}, {bytes} bytes: choose a smaller model, context or chunk");
        }
        Ok(buffer)
    }

    /// A buffer with content.
    pub fn filled<T: bytemuck::NoUninit>(&self, label: &str, content: &[T]) -> Result<wgpu::Buffer> {
        let bytes: &[u8] = bytemuck::cast_slice(content);
        let buffer = self.storage(label, bytes.len() as u64)?;
        self.queue.write_buffer(&buffer, 0, bytes);
        Ok(buffer)
    }

    /// A compute pipeline from the `main` of pieces of WGSL, after `const` lines.
    pub fn pipeline(
        &self,
        label: &str,
        constants: &[(&str, String)],
        pieces: &[&str],
    ) -> wgpu::ComputePipeline {
        let mut source: String =
            constants.iter().map(|(name, value)| format!("const {name} = {value};\n")).collect();
        pieces.iter().for_each(|piece| source.push_str(piece));
        let module = self.device.create_shader_module(wgpu::ShaderModuleDescriptor {
            label: Some(label),
            source: wgpu::ShaderSource::Wgsl(source.into()),
        });
        self.device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: Some(label),
            layout: None,
            module: &module,
            entry_point: Some("main"),
            compilation_options: wgpu::PipelineCompilationOptions {
                zero_initialize_workgroup_memory: false,
                ..Default::default()
            },
            cache: None,
        })
    }

    /// Binds whole buffers to bindings.
    pub fn bind(
        &self,
        pipeline: &wgpu::ComputePipeline,
        buffers: &[(u32, &wgpu::Buffer)],
    ) -> wgpu::BindGroup {
        let entries: Vec<_> = buffers
            .iter()
            .map(|&(binding, buffer)| wgpu::BindGroupEntry { binding, resource: buffer.as_entire_binding() })
            .collect();
        self.device.create_bind_group(&wgpu::BindGroupDescriptor {
            label: None,
            layout: &pipeline.get_bind_group_layout(0),
            entries: &entries,
        })
    }

    pub fn encoder(&self) -> wgpu::CommandEncoder {
        self.device.create_command_encoder(&Default::default())
    }

    pub fn submit(&self, encoder: wgpu::CommandEncoder) -> wgpu::SubmissionIndex {
        self.queue.submit([encoder.finish()])
    }

    /// Waits for what was submitted, not for what was submitted later.
    pub fn wait_for(&self, submission: wgpu::SubmissionIndex) -> Result<()> {
        self.device.poll(wgpu::PollType::Wait { submission_index: Some(submission), timeout: None })?;
        Ok(())
    }

    /// Submits `encoder`, and has what it leaves at `bytes` of a buffer brought to the host.
    pub fn submit_and_read<T: bytemuck::Pod>(
        &self,
        mut encoder: wgpu::CommandEncoder,
        buffer: &wgpu::Buffer,
        bytes: Range<u64>,
    ) -> Reading<T> {
        let mapped = self.device.create_buffer(&wgpu::BufferDescriptor {
            label: Some("read back"),
            size: bytes.end - bytes.start,
            usage: Usage::COPY_DST | Usage::MAP_READ,
            mapped_at_creation: false,
        });
        encoder.copy_buffer_to_buffer(buffer, bytes.start, &mapped, 0, mapped.size());
        encoder.map_buffer_on_submit(&mapped, wgpu::MapMode::Read, .., |_| {});
        let submission = self.submit(encoder);
        Reading { mapped, submission, content: PhantomData }
    }

    /// Waits until the queue is idle.
    pub fn wait(&self) -> Result<()> {
        self.device.poll(wgpu::PollType::wait_indefinitely())?;
        Ok(())
    }
}
