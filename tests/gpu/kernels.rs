//! Compiled kernels are a device's: caches share them.

use crate::support::{adapter, device};
use kivi_wgpu::{
    Bits, CacheConfig, Dtype, Error, Kernels, KvCache, KvCacheOptions, LayerIo, Progress, SelfTest,
    SequenceStep, TensorView, Variant, wgpu,
};
use std::sync::Mutex;

/// Words only: then attention is built by the step that needs it.
fn options(kernels: &Kernels) -> KvCacheOptions<'_> {
    let options = KvCacheOptions::default().with_variant(Variant::Portable);
    options.with_self_test(SelfTest::Words).with_kernels(kernels)
}

fn cache(config: &CacheConfig, kernels: &Kernels) -> KvCache {
    let (device, queue) = device();
    KvCache::with_options_blocking(device, queue, config, &options(kernels)).unwrap()
}

/// A decode step of one token through all layers.
fn decode(cache: &mut KvCache) {
    let (device, queue) = device();
    let tensor = |elements: u64| {
        let usage = wgpu::BufferUsages::STORAGE;
        device.create_buffer(&wgpu::BufferDescriptor {
            label: None,
            size: 4 * elements,
            usage,
            mapped_at_creation: false,
        })
    };
    let [k, v, q, out] = [16, 16, 32, 32].map(tensor);
    let [k, v, q, out] = [&k, &v, &q, &out].map(|buffer| TensorView::new(buffer, Dtype::F32));
    let sequence = cache.create_sequence().unwrap();
    let binding = cache.bind(&LayerIo::new(k, v, q, out)).unwrap();
    let mut encoder = device.create_command_encoder(&Default::default());
    let layers = cache.layers();
    let mut step = cache.begin_step(&mut encoder, &[SequenceStep::decode(sequence)]).unwrap();
    (0..layers).for_each(|layer| step.layer(&mut encoder, layer, &binding).unwrap());
    step.finish().unwrap();
    queue.submit([encoder.finish()]);
}

fn small() -> CacheConfig {
    CacheConfig::new(2, 2, 1, 16).with_capacity(300).with_max_step(32)
}

/// A first step builds what it runs; a second cache, and classes whose kernels are the same, build nothing.
#[test]
fn kernels_are_built_once() {
    let kernels = Kernels::new(&device().0);
    let mut one = cache(&small(), &kernels);
    // Append, and a pack each for keys and values.
    assert_eq!(kernels.count(), 3);
    decode(&mut one);
    // Attention by two rows, and what joins it.
    assert_eq!(kernels.count(), 5);
    let mut other = cache(&small().with_capacity(900), &kernels);
    decode(&mut other);
    assert_eq!(kernels.count(), 5, "nothing is new");

    // Formats that differ in their widths append and merge alike.
    let wide = small().with_bits(Bits::Four, Bits::Two).format;
    let mixed = small().with_layer_format([1], wide);
    let mut mixed = cache(&mixed, &kernels);
    decode(&mut mixed);
    assert_eq!(kernels.count(), 8, "packs are new, values lie elsewhere in a larger block, and attention");
}

#[test]
fn warming_up_builds_everything_and_says_so() {
    let kernels = Kernels::new(&device().0);
    let mut one = cache(&small(), &kernels);
    let seen = Mutex::new(Vec::new());
    one.warm_up(|progress| seen.lock().unwrap().push(progress)).unwrap();
    let seen = seen.into_inner().unwrap();
    let all = seen.last().unwrap().all;
    assert!(all > 5);
    assert!(
        seen.iter().enumerate().all(|(at, Progress { ready, all: of, .. })| (*ready, *of) == (at + 1, all))
    );
    let built = kernels.count();
    decode(&mut one);
    assert_eq!(kernels.count(), built, "a step finds everything");
    // Whoever comes next has nothing left to build, but is told that all is ready.
    let mut other = cache(&small(), &kernels);
    other.warm_up(|_| ()).unwrap();
    assert_eq!(kernels.count(), built);
}

#[test]
fn kernels_of_another_device_are_refused() {
    let own = pollster::block_on(async {
        let adapter = adapter().await;
        let descriptor = wgpu::DeviceDescriptor::default();
        let first = adapter.request_device(&descriptor).await.unwrap();
        (first, adapter.request_device(&descriptor).await.unwrap())
    });
    let ((device, queue), (other, _)) = own;
    let kernels = Kernels::new(&other);
    let refused = KvCache::with_options_blocking(&device, &queue, &small(), &options(&kernels));
    assert_eq!(refused.map(drop).unwrap_err(), Error::ForeignKernels);
}
