//! Whether the adapter's arithmetic gives the words that the format prescribes: one block of adversarial
//! values goes through append and pack.

use super::{Noise, block_elements, content, upload, view};
use crate::error::Error;
use crate::gpu::binding::LayerBinding;
use crate::gpu::device::scoped;
use crate::gpu::executor::{Gpu, Part};
use crate::gpu::io::LayerIo;
use crate::ids::CacheId;
use crate::oracle::block_of;
use crate::shape::Shape;

/// Checks the device with the kernels of a class of layers that has a page.
pub(super) async fn words(gpu: &mut Gpu, cache: CacheId, class: usize) -> Result<(), Error> {
    let (device, queue) = (gpu.device().clone(), gpu.queue.clone());
    let s = gpu.classes[class].shape().clone();
    let (keys, values) = (adversarial(&s, 1), adversarial(&s, 2));
    let (k, v) = (upload(&device, &keys)?, upload(&device, &values)?);
    let binding = LayerBinding::new(gpu, cache, &LayerIo::append(view(&k), view(&v)))?;
    let class = &mut gpu.classes[class];
    let [plan, _] = content(&s);
    let work = class.work(&plan);
    let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
    class.prepare(&mut encoder, &work)?;
    scoped(&device, || {
        {
            let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
            class.dispatch_layer(&mut pass, &work, 0, binding.groups(), Part::Whole);
        }
        queue.submit([encoder.finish()]);
    })?;
    let got = class.submit_and_read_slab(&queue, s.layout.block_words()).await?;
    let expected = block_of(&s, &keys, &values);
    match got.iter().zip(&expected).position(|(a, b)| a != b) {
        None => Ok(()),
        Some(at) => Err(Error::Arithmetic {
            adapter: gpu.adapter(),
            detail: format!("word {at} of the test block is {:#010x}, not {:#010x}", got[at], expected[at]),
        }),
    }
}

/// Keys or values of one block, `[token][kv head][head_dim]`: per channel another difficulty, with noise that
/// puts values near thresholds.
fn adversarial(s: &Shape, seed: u32) -> Vec<f32> {
    let mut noise = Noise(seed);
    block_elements(s, |token, head, channel| {
        let noise = 0.5 * noise.next();
        // A row of nothing but the smallest numbers: rotated, its sums must not be flushed.
        if seed == 2 && token % 8 == 7 {
            return f32::MIN_POSITIVE * (1.5 + noise);
        }
        match (channel + head) % 12 {
            // Multiples of half a level: ties between codes.
            0 => (token % 7) as f32 * 0.5 - 1.0,
            1 => noise,
            2 => 1000.0 + 0.02 * noise,
            3 => 131_008.0 * noise,
            4 => -37.25,
            5 => 1e-4 * noise,
            6 => 1e-30 * noise,
            7 => 1e20 * noise,
            8 if token % 5 == 0 => f32::NAN,
            8 => f32::from_bits(token + 1),
            9 => -60_000.0 + 100.0 * noise,
            10 => noise * noise * noise * 8.0,
            _ => (noise * 64.0).round() / 64.0 + 3.0,
        }
    })
}
