//! One shape of cache in one format, filled to a length, and the operations that are measured on it.

use crate::device::Device;
use kivi_wgpu::{
    Bits, CacheConfig, Dtype, Error, KvCache, KvCacheOptions, LayerBinding, LayerFormat, LayerIo, Preset,
    SequenceId, SequenceStep, TensorView, Variant, wgpu,
};
use std::time::Duration;

pub const KV_HEADS: u32 = 8;
/// New tokens of a prefill step.
pub const CHUNK: u32 = 512;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Operation {
    /// One new token per sequence enters; nothing is packed.
    Append,
    /// 512 new tokens of one sequence enter and as many are packed.
    Pack,
    /// One new token per sequence enters and attends.
    Decode,
    /// 512 new tokens of one sequence enter, attend, and as many are packed.
    Prefill,
}

#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Shape {
    pub head_dim: u32,
    /// Query heads per KV head.
    pub ratio: u32,
    pub batch: u32,
    /// Tokens of each sequence.
    pub context: u32,
}

impl Shape {
    pub fn id(&self) -> String {
        let Shape { head_dim, ratio, batch, context } = self;
        format!("d{head_dim}/gqa{ratio}/b{batch}/{context}")
    }
}

/// A format, and the one that it is measured against.
#[derive(Clone, PartialEq, Debug)]
pub struct Scheme {
    pub name: String,
    pub format: LayerFormat,
    pub against: String,
    pub reference: LayerFormat,
}

impl Scheme {
    /// KIVI's format in these widths.
    fn plain(keys: Bits, values: Bits) -> LayerFormat {
        CacheConfig::new(1, 1, 1, 64).with_bits(keys, values).format_of(0)
    }

    /// Each width against 16 bits, and each preset that is not KIVI's against KIVI's format in the same
    /// widths.
    pub fn all() -> Vec<Scheme> {
        let widths = [Bits::Two, Bits::Four, Bits::Eight, Bits::Sixteen].map(|bits| Scheme {
            name: format!("{}bit", bits.get()),
            format: Scheme::plain(bits, bits),
            against: "16 bits".into(),
            reference: Scheme::plain(Bits::Sixteen, Bits::Sixteen),
        });
        let others = Preset::ALL.iter().copied().filter(|p| ![Preset::Kivi2, Preset::Kivi4].contains(p));
        let presets = others.map(|preset| {
            let format = preset.format();
            let (keys, values) = (format.keys.bits, format.values.bits);
            Scheme {
                name: format!("{preset:?}").to_lowercase(),
                format,
                against: format!("KIVI, keys {} and values {} bits", keys.get(), values.get()),
                reference: Scheme::plain(keys, values),
            }
        });
        widths.into_iter().chain(presets).collect()
    }

    /// Whether it is a width of the plain format.
    pub fn is_plain(&self) -> bool {
        self.against == "16 bits"
    }
}

pub struct Workload {
    cache: KvCache,
    sequences: Vec<SequenceId>,
    whole: LayerBinding,
}

/// The variant of the kernels that `KIVI_VARIANT` names, if it does.
fn forced_variant() -> Option<Variant> {
    let wanted = std::env::var("KIVI_VARIANT").ok()?.to_lowercase();
    let named = Variant::ALL.iter().copied().find(|v| format!("{v:?}").to_lowercase() == wanted);
    Some(named.unwrap_or_else(|| panic!("KIVI_VARIANT is none of {:?}", Variant::ALL)))
}

impl Workload {
    /// With the variant of the kernels that the library chooses.
    pub fn new(device: &Device, shape: &Shape, format: LayerFormat) -> Workload {
        Workload::with_options(device, shape, format, &KvCacheOptions::default()).expect("a cache")
    }

    /// With the variant that `KIVI_VARIANT` names, where it can run.
    pub fn forced(device: &Device, shape: &Shape, format: LayerFormat) -> Workload {
        let Some(variant) = forced_variant() else { return Workload::new(device, shape, format) };
        let options = KvCacheOptions::default().with_variant(variant);
        match Workload::with_options(device, shape, format, &options) {
            Err(Error::VariantUnavailable { .. }) => Workload::new(device, shape, format),
            workload => workload.expect("a cache"),
        }
    }

    fn with_options(
        device: &Device,
        shape: &Shape,
        format: LayerFormat,
        options: &KvCacheOptions<'_>,
    ) -> Result<Workload, Error> {
        let Shape { head_dim, ratio, batch, context } = *shape;
        let config = CacheConfig::new(1, KV_HEADS * ratio, KV_HEADS, head_dim)
            .with_format(format)
            .with_capacity(batch * (context + CHUNK + 256))
            .with_max_sequences(batch);
        let mut cache = KvCache::with_options_blocking(&device.device, &device.queue, &config, options)?;
        let rows = CHUNK.max(batch);
        let tensor = |heads: u32, seed: u32| {
            let buffer = device.buffer(u64::from(rows * heads * head_dim) * 4);
            let data = noise((rows * heads * head_dim) as usize, seed);
            device.queue.write_buffer(&buffer, 0, bytemuck::cast_slice(&data));
            buffer
        };
        let (k, v) = (tensor(KV_HEADS, 1), tensor(KV_HEADS, 2));
        let (q, out) = (tensor(KV_HEADS * ratio, 3), tensor(KV_HEADS * ratio, 4));
        let view = |buffer| TensorView::new(buffer, Dtype::F32);
        let io = LayerIo::new(view(&k), view(&v), view(&q), view(&out));
        let whole = cache.bind(&io).expect("a binding");
        let sequences: Vec<_> =
            (0..batch).map(|_| cache.create_sequence().expect("room for a sequence")).collect();
        for &sequence in &sequences {
            // One token past a multiple of the group, so that the next one packs nothing.
            let mut left = context + 1;
            while left > 0 {
                let n = left.min(CHUNK);
                let mut encoder = device.device.create_command_encoder(&Default::default());
                let mut step =
                    cache.begin_step(&mut encoder, &[SequenceStep::append(sequence, n)]).expect("a step");
                step.layer(&mut encoder, 0, &whole).expect("a layer");
                step.finish().expect("a whole step");
                device.queue.submit([encoder.finish()]);
                device.device.poll(wgpu::PollType::wait_indefinitely()).expect("the device works");
                left -= n;
            }
        }
        Ok(Workload { cache, sequences, whole })
    }

    pub fn variant(&self) -> Variant {
        self.cache.variant()
    }

    /// Bytes of packed pages that one operation reads or writes.
    pub fn packed_bytes(&self, operation: Operation) -> u64 {
        let g = self.cache.shape().first();
        let block = u64::from(g.layout.block_words()) * 4;
        let history = |s| self.cache.tokens(s).unwrap_or(0).saturating_sub(g.sinks + g.window);
        let held = |s| u64::from(history(s) / g.layout.group);
        match operation {
            Operation::Append => 0,
            Operation::Pack => u64::from(CHUNK / g.layout.group) * block,
            Operation::Decode => self.sequences.iter().map(|&s| held(s) * block).sum(),
            Operation::Prefill => held(self.sequences[0]) * block,
        }
    }

    /// Runs an operation once and leaves the cache as it was: the step is dropped, not finished.
    pub fn run(&mut self, device: &Device, operation: Operation) -> Duration {
        let all = |step: fn(SequenceId) -> SequenceStep| self.sequences.iter().map(|&s| step(s)).collect();
        let first = self.sequences[0];
        let steps: Vec<SequenceStep> = match operation {
            Operation::Append => all(|s| SequenceStep::append(s, 1)),
            Operation::Decode => all(SequenceStep::decode),
            Operation::Pack => vec![SequenceStep::append(first, CHUNK)],
            Operation::Prefill => vec![SequenceStep::extend(first, CHUNK)],
        };
        device.time(|encoder, timestamp_writes| {
            let mut step = self.cache.begin_step(encoder, &steps).expect("a step");
            let descriptor = wgpu::ComputePassDescriptor { label: None, timestamp_writes };
            let mut pass = encoder.begin_compute_pass(&descriptor);
            step.layer(&mut pass, 0, &self.whole).expect("a layer");
        })
    }
}

/// Reproducible noise in (-2, 2), with a larger channel now and then.
pub fn noise(n: usize, seed: u32) -> Vec<f32> {
    let mut state = seed;
    (0..n)
        .map(|i| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let x = (state >> 8) as f32 / 16_777_216.0 - 0.5;
            if i % 37 == 11 { 16.0 * x } else { 4.0 * x }
        })
        .collect()
}
