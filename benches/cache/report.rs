//! What the measurements mean: bytes per second, against a copy and against another format.

use crate::device::Device;
use crate::workload::{Operation, Scheme, Shape, Workload, noise};
use kivi_wgpu::{CacheConfig, Dtype, KvCache, LayerIo, SequenceStep, TensorView, Variant, wgpu};
use std::time::{Duration, Instant};

pub struct Measurement {
    operation: Operation,
    shape: Shape,
    scheme: Scheme,
    variant: Variant,
    median: Duration,
    reference: Duration,
    packed: u64,
}

impl Measurement {
    /// `times` are pairs of this format's time and that of the one that it is measured against.
    pub fn new(
        operation: Operation,
        shape: Shape,
        scheme: Scheme,
        workload: &Workload,
        times: Vec<(Duration, Duration)>,
    ) -> Measurement {
        // The first run builds pipelines.
        let (own, reference): (Vec<_>, Vec<_>) = times.into_iter().skip(1).unzip();
        Measurement {
            operation,
            shape,
            scheme,
            variant: workload.variant(),
            median: median(own),
            reference: median(reference),
            packed: workload.packed_bytes(operation),
        }
    }

    fn ratio(&self) -> f64 {
        self.reference.as_secs_f64() / self.median.as_secs_f64()
    }
}

pub struct Report {
    copy: f64,
    rows: Vec<Measurement>,
}

impl Report {
    /// Prints what is being measured on.
    pub fn new(device: &Device) -> Report {
        let info = &device.info;
        let copy = device.copy_bandwidth();
        println!("adapter: {} ({:?}, {} {})", info.name, info.backend, info.driver, info.driver_info);
        println!("clock: {}", device.clock());
        println!("copy: {:.2} GB/s, bytes read plus bytes written", copy / 1e9);
        if info.device_type == wgpu::DeviceType::Cpu {
            println!("This is a software adapter: its times say nothing about a GPU.");
        }
        Report { copy, rows: Vec::new() }
    }

    pub fn add(&mut self, row: Measurement) {
        self.rows.push(row);
    }

    /// Prints the table, the crossover and the host's time.
    pub fn finish(&self, device: &Device) {
        if !self.rows.is_empty() {
            println!();
            println!(
                "| operation | shape | format | kernels | median, ms | packed, GB/s | of copy | × faster | than |"
            );
            println!("|---|---|---|---|---|---|---|---|---|");
        }
        for m in &self.rows {
            let rate = m.packed as f64 / m.median.as_secs_f64();
            println!(
                "| {} | {} | {} | {:?} | {:.3} | {:.2} | {:.1} % | {:.2} | {} |",
                format!("{:?}", m.operation).to_lowercase(),
                m.shape.id(),
                m.scheme.name,
                m.variant,
                m.median.as_secs_f64() * 1e3,
                rate / 1e9,
                100.0 * rate / self.copy,
                m.ratio(),
                m.scheme.against,
            );
        }
        self.crossover();
        println!();
        println!("host time per layer (Step::layer of a decode step, warm): {:.2} µs", host_time(device));
    }

    /// From which measured context on a decode step in 2 bits is faster than in 16, per shape.
    fn crossover(&self) {
        let of = |shape: Shape| {
            let mut contexts: Vec<_> = self
                .rows
                .iter()
                .filter(|m| m.operation == Operation::Decode && m.scheme.name == "2bit")
                .filter(|m| Shape { context: 0, ..m.shape } == shape)
                .map(|m| (m.shape.context, m.ratio()))
                .collect();
            contexts.sort_by_key(|(context, _)| *context);
            let slower = contexts.iter().rposition(|(_, ratio)| *ratio <= 1.0);
            let from = slower.map_or(0, |at| at + 1);
            (contexts.get(from).map(|(context, _)| *context), contexts)
        };
        let mut shapes: Vec<Shape> = Vec::new();
        for m in self.rows.iter().filter(|m| m.operation == Operation::Decode && m.scheme.name == "2bit") {
            let shape = Shape { context: 0, ..m.shape };
            if !shapes.contains(&shape) {
                shapes.push(shape);
            }
        }
        for shape in shapes {
            let (from, contexts) = of(shape);
            let measured: Vec<_> = contexts.iter().map(|(context, _)| context.to_string()).collect();
            let name = shape.id();
            let name = name.trim_end_matches("/0");
            match from {
                Some(from) => println!(
                    "decode/{name}: 2 bits beat 16 bits from {from} tokens on (measured: {})",
                    measured.join(", ")
                ),
                None => {
                    println!("decode/{name}: 2 bits do not beat 16 bits at {} tokens", measured.join(", "))
                }
            }
        }
    }
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

/// Microseconds of `Step::layer` alone: median of 1000 layers of decode steps at 4096 tokens, each in a
/// compute pass of its own, bindings made beforehand.
fn host_time(device: &Device) -> f64 {
    let layers = 20;
    let config = CacheConfig::new(layers, 32, 8, 128).with_capacity(4096 + 512);
    let mut cache = KvCache::new_blocking(&device.device, &device.queue, &config).expect("a cache");
    let tensor = |heads: u32| {
        let data = noise((512 * heads * 128) as usize, 5);
        let buffer = device.buffer(data.len() as u64 * 4);
        device.queue.write_buffer(&buffer, 0, bytemuck::cast_slice(&data));
        buffer
    };
    let (k, v, q, out) = (tensor(8), tensor(8), tensor(32), tensor(32));
    let view = |buffer| TensorView::new(buffer, Dtype::F32);
    let io = cache.bind(&LayerIo::new(view(&k), view(&v), view(&q), view(&out))).expect("a binding");
    let sequence = cache.create_sequence().expect("room");
    let mut times = Vec::new();
    for step_index in 0..58 {
        let mut encoder = device.device.create_command_encoder(&Default::default());
        let filling = step_index < 8;
        let step = if filling { SequenceStep::append(sequence, 512) } else { SequenceStep::decode(sequence) };
        let mut step = cache.begin_step(&mut encoder, &[step]).expect("a step");
        for layer in 0..layers {
            let start = Instant::now();
            step.layer(&mut encoder, layer, &io).expect("a layer");
            if !filling {
                times.push(start.elapsed());
            }
        }
        // Nothing needs to run: only recording is measured.
        step.finish().expect("a whole step");
    }
    median(times).as_secs_f64() * 1e6
}
