//! The device under test: how its time is measured, and how fast it copies.

use kivi_wgpu::{KvCache, wgpu};
use std::time::{Duration, Instant};

/// Bytes of each of the two buffers that the copy bandwidth is measured with.
const COPY_BYTES: u64 = 128 << 20;

pub struct Device {
    pub device: wgpu::Device,
    pub queue: wgpu::Queue,
    pub info: wgpu::AdapterInfo,
    timestamps: Option<Timestamps>,
}

struct Timestamps {
    set: wgpu::QuerySet,
    resolved: wgpu::Buffer,
    readable: wgpu::Buffer,
    /// Nanoseconds per tick.
    period: f64,
}

impl Device {
    /// The default adapter, or the first whose name contains `KIVI_ADAPTER`, with all features that the library can use.
    pub fn open() -> Device {
        let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle_from_env());
        pollster::block_on(async {
            let wanted = std::env::var("KIVI_ADAPTER").unwrap_or_default().to_lowercase();
            let all = instance.enumerate_adapters(wgpu::Backends::all()).await;
            let adapter = if wanted.is_empty() {
                instance.request_adapter(&Default::default()).await.expect("an adapter")
            } else {
                let mut all = all.into_iter();
                let named = all.find(|a| a.get_info().name.to_lowercase().contains(&wanted));
                named.unwrap_or_else(|| panic!("no adapter is named like {wanted:?}"))
            };
            let features = KvCache::optional_features() | wgpu::Features::TIMESTAMP_QUERY;
            let descriptor = wgpu::DeviceDescriptor {
                required_features: adapter.features() & features,
                // Long contexts in few slabs.
                required_limits: adapter.limits(),
                ..Default::default()
            };
            let (device, queue) = adapter.request_device(&descriptor).await.expect("a device");
            let timestamps = device.features().contains(wgpu::Features::TIMESTAMP_QUERY).then(|| {
                let buffer = |usage| {
                    device.create_buffer(&wgpu::BufferDescriptor {
                        label: None,
                        size: 16,
                        usage,
                        mapped_at_creation: false,
                    })
                };
                Timestamps {
                    set: device.create_query_set(&wgpu::QuerySetDescriptor {
                        label: None,
                        ty: wgpu::QueryType::Timestamp,
                        count: 2,
                    }),
                    resolved: buffer(wgpu::BufferUsages::QUERY_RESOLVE | wgpu::BufferUsages::COPY_SRC),
                    readable: buffer(wgpu::BufferUsages::COPY_DST | wgpu::BufferUsages::MAP_READ),
                    period: f64::from(queue.get_timestamp_period()),
                }
            });
            Device { device, queue, info: adapter.get_info(), timestamps }
        })
    }

    /// How times are measured.
    pub fn clock(&self) -> &'static str {
        if self.timestamps.is_some() { "GPU timestamps" } else { "wall time" }
    }

    pub fn buffer(&self, bytes: u64) -> wgpu::Buffer {
        self.device.create_buffer(&wgpu::BufferDescriptor {
            label: None,
            size: bytes,
            usage: wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST,
            mapped_at_creation: false,
        })
    }

    /// The time that a compute pass takes: `record` records it into the encoder, with these timestamps.
    pub fn time(
        &self,
        record: impl FnOnce(&mut wgpu::CommandEncoder, Option<wgpu::ComputePassTimestampWrites<'_>>),
    ) -> Duration {
        let writes = self.timestamps.as_ref().map(|t| wgpu::ComputePassTimestampWrites {
            query_set: &t.set,
            beginning_of_pass_write_index: Some(0),
            end_of_pass_write_index: Some(1),
        });
        let mut encoder = self.device.create_command_encoder(&Default::default());
        record(&mut encoder, writes);
        self.finish(encoder)
    }

    /// Bytes read and written per second by a copy between two buffers, best of a few.
    pub fn copy_bandwidth(&self) -> f64 {
        let (from, to) = (self.buffer(COPY_BYTES), self.buffer(COPY_BYTES));
        let mut best = Duration::MAX;
        for _ in 0..7 {
            let mut encoder = self.device.create_command_encoder(&Default::default());
            // Timestamps are written at the boundaries of compute passes: empty ones before and after.
            let mark = |encoder: &mut wgpu::CommandEncoder, begin, end| {
                let writes = self.timestamps.as_ref().map(|t| wgpu::ComputePassTimestampWrites {
                    query_set: &t.set,
                    beginning_of_pass_write_index: begin,
                    end_of_pass_write_index: end,
                });
                let descriptor = wgpu::ComputePassDescriptor { label: None, timestamp_writes: writes };
                drop(encoder.begin_compute_pass(&descriptor));
            };
            mark(&mut encoder, None, Some(0));
            encoder.copy_buffer_to_buffer(&from, 0, &to, 0, COPY_BYTES);
            mark(&mut encoder, Some(1), None);
            best = best.min(self.finish(encoder));
        }
        2.0 * COPY_BYTES as f64 / best.as_secs_f64()
    }

    /// Submits, waits, and returns the time between the two timestamps, or else of all of it.
    fn finish(&self, mut encoder: wgpu::CommandEncoder) -> Duration {
        if let Some(t) = &self.timestamps {
            encoder.resolve_query_set(&t.set, 0..2, &t.resolved, 0);
            encoder.copy_buffer_to_buffer(&t.resolved, 0, &t.readable, 0, 16);
            encoder.map_buffer_on_submit(&t.readable, wgpu::MapMode::Read, .., |_| {});
        }
        let commands = encoder.finish();
        let start = Instant::now();
        self.queue.submit([commands]);
        self.device.poll(wgpu::PollType::wait_indefinitely()).expect("the device works");
        let wall = start.elapsed();
        let Some(t) = &self.timestamps else { return wall };
        let ticks: Vec<u64> = {
            let bytes = t.readable.slice(..).get_mapped_range().expect("mapped on submit");
            bytemuck::pod_collect_to_vec(&bytes)
        };
        t.readable.unmap();
        Duration::from_nanos((ticks[1].saturating_sub(ticks[0]) as f64 * t.period) as u64)
    }
}
