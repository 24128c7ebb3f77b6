//! The life of a cache: one prompt shared by several conversations, drafted tokens taken back, a beam
//! search's step, and a conversation that is saved to a file and goes on in another cache. Keys, values and
//! queries are noise; the calls are those of a real engine.

#[path = "support/host.rs"]
mod host;

use host::{Gpu, human};
use kivi_wgpu::{
    CacheConfig, Dtype, Error, KvCache, LayerBinding, LayerIo, SequenceStep, Snapshot, TensorView, wgpu,
};

const LAYERS: u32 = 4;
const QUERY_HEADS: u32 = 8;
const KV_HEADS: u32 = 2;
const HEAD_DIM: u32 = 64;
/// Tokens of the longest step.
const MAX_STEP: u32 = 256;

/// The host's model: here, buffers that hold noise.
struct Model {
    gpu: Gpu,
    tensors: [wgpu::Buffer; 4],
}

impl Model {
    fn bind(&self, cache: &KvCache) -> Result<LayerBinding, Error> {
        let [k, v, q, out] = self.tensors.each_ref().map(|buffer| TensorView::new(buffer, Dtype::F32));
        cache.bind(&LayerIo::new(k, v, q, out))
    }

    /// One step of all layers in one encoder.
    fn step(&self, cache: &mut KvCache, io: &LayerBinding, steps: &[SequenceStep]) -> Result<(), Error> {
        let mut encoder = self.gpu.device.create_command_encoder(&Default::default());
        let mut step = cache.begin_step(&mut encoder, steps)?;
        for layer in 0..LAYERS {
            step.layer(&mut encoder, layer, io)?;
        }
        step.finish()?;
        self.gpu.queue.submit([encoder.finish()]);
        Ok(())
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    env_logger::init();
    let config = CacheConfig::new(LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM)
        .with_sink_tokens(4)
        .with_capacity(1024)
        .with_max_sequences(8)
        .with_max_step(MAX_STEP)
        .with_max_batch_tokens(8 * MAX_STEP);
    println!("predicted for 4000 tokens: {}", human(config.bytes_for(4000)?.total()));
    let gpu = Gpu::open(&KvCache::required_limits(&config)?)?;
    let tensor = |heads: u32| {
        let buffer = gpu.storage("tensor", u64::from(8 * MAX_STEP * heads * HEAD_DIM) * 4);
        let noise: Vec<f32> =
            (0..buffer.size() / 4).map(|i| ((i * 7919) % 1009) as f32 / 504.5 - 1.0).collect();
        gpu.queue.write_buffer(&buffer, 0, bytemuck::cast_slice(&noise));
        buffer
    };
    let tensors = [tensor(KV_HEADS), tensor(KV_HEADS), tensor(QUERY_HEADS), tensor(QUERY_HEADS)];
    let model = Model { gpu, tensors };
    let (device, queue) = (&model.gpu.device, &model.gpu.queue);
    let mut cache = KvCache::new_blocking(device, queue, &config)?;
    let io = model.bind(&cache)?;
    let encoder = || device.create_command_encoder(&Default::default());

    // A prompt, and three conversations that go on from it: they share its full pages.
    let prompt = cache.create_sequence()?;
    for _ in 0..8 {
        model.step(&mut cache, &io, &[SequenceStep::extend(prompt, MAX_STEP)])?;
    }
    let alone = cache.memory().all_layers();
    let mut recorded = encoder();
    let mut beams = vec![prompt];
    for _ in 0..3 {
        beams.push(cache.fork(&mut recorded, prompt)?.0);
    }
    queue.submit([recorded.finish()]);
    let shared = cache.memory().all_layers();
    println!(
        "{} tokens take {}; four sequences of them take {}",
        cache.tokens(prompt)?,
        human(alone.total() - alone.slack),
        human(shared.total() - shared.slack)
    );

    // Speculative decoding: five drafted tokens are checked in one step, of which two were right.
    model.step(&mut cache, &io, &[SequenceStep::extend(prompt, 5)])?;
    let mut recorded = encoder();
    let right = cache.tokens(prompt)? - 3;
    cache.truncate(&mut recorded, prompt, right)?;

    // A step of a beam search: two beams go on from the first, one from the third, one stays.
    cache.reorder(&mut recorded, &beams, &[0, 0, 2, 3])?;
    queue.submit([recorded.finish()]);
    let decode: Vec<SequenceStep> = beams.iter().map(|beam| SequenceStep::decode(*beam)).collect();
    model.step(&mut cache, &io, &decode)?;
    println!(
        "beams of {:?} tokens",
        beams.iter().map(|beam| cache.tokens(*beam)).collect::<Result<Vec<_>, _>>()?
    );

    // Saved, and loaded into another cache, where it goes on; the file is the same for the same state, on any
    // backend.
    let file = std::env::temp_dir().join("kivi-session.safetensors");
    std::fs::write(&file, cache.submit_and_save_blocking(beams[1])?.to_bytes()?)?;
    let mut other = KvCache::new_blocking(device, queue, &config)?;
    let mut recorded = encoder();
    let (loaded, _) = other.load(&mut recorded, &Snapshot::from_bytes(&std::fs::read(&file)?)?)?;
    queue.submit([recorded.finish()]);
    let io = model.bind(&other)?;
    model.step(&mut other, &io, &[SequenceStep::decode(loaded)])?;
    println!(
        "{} tokens loaded from {} ({}) and continued",
        other.tokens(loaded)? - 1,
        file.display(),
        human(std::fs::metadata(&file)?.len())
    );

    // What nobody holds goes back to the device.
    for beam in beams {
        cache.remove_sequence(beam)?;
    }
    let before = cache.memory().total();
    cache.shrink_to_fit();
    println!("{} before everything was dropped, {} after", human(before), human(cache.memory().total()));
    Ok(())
}
