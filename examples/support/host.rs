//! What an application has anyway: a device, buffers, a way to read them back.

#[path = "adapters.rs"]
mod adapters;

use kivi_wgpu::{KvCache, wgpu};

pub struct Gpu {
    pub device: wgpu::Device,
    pub queue: wgpu::Queue,
    #[allow(dead_code)]
    pub info: wgpu::AdapterInfo,
}

impl Gpu {
    /// The adapter that `KIVI_ADAPTER` names or wgpu prefers, with these limits and those of its features
    /// that make the kernels faster.
    pub fn open(limits: &wgpu::Limits) -> Result<Gpu, Box<dyn std::error::Error>> {
        let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle_from_env());
        pollster::block_on(async {
            let adapter = adapters::choose(&instance, None).await?;
            let descriptor = wgpu::DeviceDescriptor {
                required_features: adapter.features() & KvCache::optional_features(),
                required_limits: limits.clone(),
                ..Default::default()
            };
            let (device, queue) = adapter.request_device(&descriptor).await?;
            Ok(Gpu { device, queue, info: adapter.get_info() })
        })
    }

    pub fn storage(&self, label: &str, bytes: u64) -> wgpu::Buffer {
        self.device.create_buffer(&wgpu::BufferDescriptor {
            label: Some(label),
            size: bytes,
            usage: wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST,
            mapped_at_creation: false,
        })
    }

    /// Waits until the queue is idle.
    #[allow(dead_code)]
    pub fn wait(&self) -> Result<(), wgpu::PollError> {
        self.device.poll(wgpu::PollType::wait_indefinitely()).map(drop)
    }

    /// The f32 values at the start of `buffer`. Submits and waits.
    #[allow(dead_code)]
    pub fn read(&self, buffer: &wgpu::Buffer, values: usize) -> Result<Vec<f32>, Box<dyn std::error::Error>> {
        let target = self.device.create_buffer(&wgpu::BufferDescriptor {
            label: Some("read back"),
            size: values as u64 * 4,
            usage: wgpu::BufferUsages::COPY_DST | wgpu::BufferUsages::MAP_READ,
            mapped_at_creation: false,
        });
        let mut encoder = self.device.create_command_encoder(&Default::default());
        encoder.copy_buffer_to_buffer(buffer, 0, &target, 0, target.size());
        encoder.map_buffer_on_submit(&target, wgpu::MapMode::Read, .., |_| {});
        self.queue.submit([encoder.finish()]);
        self.wait()?;
        let bytes = target.slice(..).get_mapped_range()?;
        Ok(bytemuck::pod_collect_to_vec(&bytes))
    }
}

/// Bytes for people: KiB, MiB or GiB.
#[allow(dead_code)]
pub fn human(bytes: u64) -> String {
    let bytes = bytes as f64;
    let (unit, size) = [("GiB", 30), ("MiB", 20), ("KiB", 10)]
        .into_iter()
        .find(|(_, shift)| bytes >= f64::from(1u32 << shift))
        .map_or(("B", 1.0), |(unit, shift)| (unit, f64::from(1u32 << shift)));
    if unit == "B" { format!("{bytes} B") } else { format!("{:.2} {unit}", bytes / size) }
}
