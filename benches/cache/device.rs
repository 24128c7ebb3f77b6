//! The device under test: how its time is measured, and how fast it copies.

#[path = "../../examples/support/adapters.rs"]
mod adapters;

use kivi_wgpu::{KvCache, wgpu};
use std::time::{Duration, Instant};

/// Bytes of each of the two buffers that the copy bandwidth is measured with: on GPUs several times their
/// caches.
const COPY_BYTES: u64 = 128 << 20;
/// How long a GPU is kept busy before it is measured, so that its clocks are up.
const WARM_UP: Duration = Duration::from_millis(200);
/// A copy by all invocations, 16 bytes each.
const COPY_SHADER: &str = "
@group(0) @binding(0) var<storage, read> source: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read_write> target_: array<vec4<u32>>;
@compute @workgroup_size(256)
fn copy(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let at = group.x * 1024u + local;
    let a = source[at];
    let b = source[at + 256u];
    let c = source[at + 512u];
    let d = source[at + 768u];
    target_[at] = a;
    target_[at + 256u] = b;
    target_[at + 512u] = c;
    target_[at + 768u] = d;
}
";

pub struct Device {
    pub device: wgpu::Device,
    pub queue: wgpu::Queue,
    pub info: wgpu::AdapterInfo,
    timestamps: Option<Timestamps>,
    copy: Copy,
}

/// A compute pass that copies one buffer to another.
struct Copy {
    pipeline: wgpu::ComputePipeline,
    buffers: wgpu::BindGroup,
    from: wgpu::Buffer,
    to: wgpu::Buffer,
}

struct Timestamps {
    set: wgpu::QuerySet,
    resolved: wgpu::Buffer,
    readable: wgpu::Buffer,
    /// Nanoseconds per tick.
    period: f64,
}

impl Device {
    /// The adapter that `KIVI_ADAPTER` names or wgpu prefers, with all features that the library can use.
    pub fn open() -> Device {
        let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle_from_env());
        pollster::block_on(async {
            let adapter = adapters::choose(&instance, None).await.unwrap_or_else(|error| panic!("{error}"));
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
            let copy = Copy::new(&device);
            Device { device, queue, info: adapter.get_info(), timestamps, copy }
        })
    }

    /// How times are measured.
    pub fn clock(&self) -> &'static str {
        if self.timestamps.is_some() { "GPU timestamps" } else { "wall time" }
    }

    pub fn buffer(&self, bytes: u64) -> wgpu::Buffer {
        buffer(&self.device, bytes)
    }

    fn is_gpu(&self) -> bool {
        self.info.device_type != wgpu::DeviceType::Cpu
    }

    /// Keeps a GPU busy until its clocks are up.
    pub fn warm_up(&self) {
        let start = Instant::now();
        while self.is_gpu() && start.elapsed() < WARM_UP {
            let mut encoder = self.device.create_command_encoder(&Default::default());
            for _ in 0..8 {
                self.copy.record(&mut encoder, None);
            }
            self.queue.submit([encoder.finish()]);
            self.device.poll(wgpu::PollType::wait_indefinitely()).expect("the device works");
        }
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
        // As between two layers of a model, nothing of the cache is left in a GPU's own caches.
        if self.is_gpu() && self.timestamps.is_some() {
            self.copy.record(&mut encoder, None);
        }
        record(&mut encoder, writes);
        self.finish(encoder)
    }

    /// Bytes read and written per second by a copy: best of a few, in a compute pass and by the copy command.
    pub fn copy_bandwidth(&self) -> f64 {
        self.warm_up();
        let mut best = Duration::MAX;
        for _ in 0..7 {
            best = best.min(self.time(|encoder, writes| self.copy.record(encoder, writes)));
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
            encoder.copy_buffer_to_buffer(&self.copy.from, 0, &self.copy.to, 0, COPY_BYTES);
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

impl Copy {
    fn new(device: &wgpu::Device) -> Copy {
        let module = device.create_shader_module(wgpu::ShaderModuleDescriptor {
            label: None,
            source: wgpu::ShaderSource::Wgsl(COPY_SHADER.into()),
        });
        let pipeline = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: None,
            layout: None,
            module: &module,
            entry_point: None,
            compilation_options: Default::default(),
            cache: None,
        });
        let (from, to) = (buffer(device, COPY_BYTES), buffer(device, COPY_BYTES));
        let buffers = device.create_bind_group(&wgpu::BindGroupDescriptor {
            label: None,
            layout: &pipeline.get_bind_group_layout(0),
            entries: &[
                wgpu::BindGroupEntry { binding: 0, resource: from.as_entire_binding() },
                wgpu::BindGroupEntry { binding: 1, resource: to.as_entire_binding() },
            ],
        });
        Copy { pipeline, buffers, from, to }
    }

    fn record(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        timestamp_writes: Option<wgpu::ComputePassTimestampWrites<'_>>,
    ) {
        let descriptor = wgpu::ComputePassDescriptor { label: None, timestamp_writes };
        let mut pass = encoder.begin_compute_pass(&descriptor);
        pass.set_pipeline(&self.pipeline);
        pass.set_bind_group(0, &self.buffers, &[]);
        // 1024 vectors of 16 bytes per workgroup.
        pass.dispatch_workgroups((COPY_BYTES / (16 * 1024)) as u32, 1, 1);
    }
}

fn buffer(device: &wgpu::Device, bytes: u64) -> wgpu::Buffer {
    device.create_buffer(&wgpu::BufferDescriptor {
        label: None,
        size: bytes,
        usage: wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST,
        mapped_at_creation: false,
    })
}
