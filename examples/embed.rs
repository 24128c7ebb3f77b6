//! The shortest honest embedding: a host that owns a device and a kernel of its own which writes queries,
//! keys and values, and that records one encoder per token. The "model" is a toy; everything around the cache
//! is what a real engine does.

#[path = "support/host.rs"]
mod host;

use host::Gpu;
use kivi_wgpu::{CacheConfig, Dtype, KvCache, LayerIo, SequenceStep, TensorView, wgpu};

const LAYERS: u32 = 4;
const QUERY_HEADS: u32 = 8;
const KV_HEADS: u32 = 2;
const HEAD_DIM: u32 = 64;

/// The host's projection: one token's `[q heads, k heads, v heads][head_dim]`, fused in one buffer.
const PROJECT: &str = "
@group(0) @binding(0) var<storage, read> token: array<u32>; // position
@group(0) @binding(1) var<storage, read_write> qkv: array<f32>;

@compute @workgroup_size(64)
fn project(@builtin(global_invocation_id) id: vec3<u32>) {
    if (id.x < arrayLength(&qkv)) {
        let x = f32(id.x) * 0.37 + f32(token[0]) * 0.11;
        qkv[id.x] = sin(x) + 0.5 * cos(3.1 * x);
    }
}";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    env_logger::init();
    let config = CacheConfig::new(LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM).with_capacity(2048);

    // What the host has anyway.
    let gpu = Gpu::open(&KvCache::required_limits(&config)?)?;
    let (device, queue) = (&gpu.device, &gpu.queue);
    let heads = u64::from(QUERY_HEADS + 2 * KV_HEADS);
    let row_bytes = u64::from(HEAD_DIM) * 4;
    let qkv = gpu.storage("qkv", heads * row_bytes);
    let out = gpu.storage("attention output", u64::from(QUERY_HEADS) * row_bytes);
    let token = gpu.storage("token", 4);
    let module = device.create_shader_module(wgpu::ShaderModuleDescriptor {
        label: Some("project"),
        source: wgpu::ShaderSource::Wgsl(PROJECT.into()),
    });
    let project = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
        label: Some("project"),
        layout: None,
        module: &module,
        entry_point: Some("project"),
        compilation_options: Default::default(),
        cache: None,
    });
    let group = device.create_bind_group(&wgpu::BindGroupDescriptor {
        label: Some("project"),
        layout: &project.get_bind_group_layout(0),
        entries: &[
            wgpu::BindGroupEntry { binding: 0, resource: token.as_entire_binding() },
            wgpu::BindGroupEntry { binding: 1, resource: qkv.as_entire_binding() },
        ],
    });

    // The cache: three views of the fused buffer, bound once for all layers and steps.
    let mut cache = KvCache::new_blocking(device, queue, &config)?;
    let sequence = cache.create_sequence()?;
    let part = |first_head: u32| {
        TensorView::new(&qkv, Dtype::F32)
            .with_offset(u64::from(first_head) * row_bytes)
            .with_strides(heads as u32 * HEAD_DIM, HEAD_DIM)
    };
    let (q, k, v) = (part(0), part(QUERY_HEADS), part(QUERY_HEADS + KV_HEADS));
    let io = cache.bind(&LayerIo::new(k, v, q, TensorView::new(&out, Dtype::F32)))?;

    for position in 0..500u32 {
        queue.write_buffer(&token, 0, &position.to_le_bytes());
        let mut encoder = device.create_command_encoder(&Default::default());
        let mut step = cache.begin_step(&mut encoder, &[SequenceStep::decode(sequence)])?;
        let mut pass = encoder.begin_compute_pass(&Default::default());
        for layer in 0..LAYERS {
            pass.set_pipeline(&project);
            pass.set_bind_group(0, &group, &[]);
            pass.dispatch_workgroups((heads as u32 * HEAD_DIM).div_ceil(64), 1, 1);
            step.layer(&mut pass, layer, &io)?;
            // A real model goes on here: output projection, feed-forward, the next layer's norm.
        }
        drop(pass);
        step.finish()?;
        queue.submit([encoder.finish()]);
    }
    let output = gpu.read(&out, (QUERY_HEADS * HEAD_DIM) as usize)?;
    println!("{} tokens in {}", cache.tokens(sequence)?, host::human(cache.memory().total()));
    println!("attention of the last token, head 0: {:?} ...", &output[..4]);
    Ok(())
}
