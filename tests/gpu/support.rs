//! Devices that tests share, and what they put into buffers and read from them.

#[path = "../../examples/support/adapters.rs"]
mod adapters;

use half::{bf16, f16};
use kivi_wgpu::{CacheConfig, Dtype, Error, Kernels, KvCache, KvCacheOptions, SelfTest, Variant, wgpu};
use std::cell::Cell;
use std::io::Write;
use std::sync::{Mutex, OnceLock, PoisonError};

pub use crate::pair::{Pair, Tensors};

/// A cache of which only the words are tried out: the tests try out attention, and building all kernels takes
/// a software adapter long.
pub fn new_cache(device: &wgpu::Device, queue: &wgpu::Queue, config: &CacheConfig) -> Result<KvCache, Error> {
    KvCache::with_options_blocking(device, queue, config, &options_on(device))
}

/// The kernels of this test's device.
pub fn kernels() -> &'static Kernels {
    &shared(OWN.with(|own| own.0)).kernels
}

/// Only the words are tried out; caches on this test's device share its kernels.
pub fn options_on(device: &wgpu::Device) -> KvCacheOptions<'static> {
    let options = KvCacheOptions::default().with_self_test(SelfTest::Words);
    // wgpu takes the first devices of two instances for equal.
    if std::ptr::eq(device, &self::device().0) { options.with_kernels(kernels()) } else { options }
}

/// The same with the kernels of a variant.
pub fn new_cache_of(config: &CacheConfig, variant: Variant) -> Result<KvCache, Error> {
    let (device, queue) = device();
    let options = options_on(device).with_variant(variant);
    KvCache::with_options_blocking(device, queue, config, &options)
}

/// Bytes of the upload buffers of a cache that has no step on its way: three for each plan buffer.
pub fn upload_bytes(cache: &KvCache) -> u64 {
    let plans = cache.buffers().into_iter().filter(|b| b.usage().contains(wgpu::BufferUsages::UNIFORM));
    plans.map(|plan| 3 * plan.size()).sum()
}

/// A word that is NaN as f32, as two f16 and as two bf16.
pub const POISON: u32 = 0x7fff_7fff;

/// A device that tests share, and its kernels.
struct Shared {
    device: (wgpu::Device, wgpu::Queue),
    kernels: Kernels,
}

/// Threads that use each device now.
static BUSY: Mutex<[usize; 2]> = Mutex::new([0; 2]);

/// Which of the devices a thread uses: the one with the fewest tests. A software adapter compiles kernels on
/// the thread of a device's only queue: of two tests on one device, one would wait.
struct Own(usize);

thread_local! {
    static OWN: Own = Own::new();
    /// Another thread's device, to be this one's.
    static ADOPTED: Cell<Option<usize>> = const { Cell::new(None) };
}

impl Own {
    fn new() -> Own {
        let mut busy = BUSY.lock().unwrap_or_else(PoisonError::into_inner);
        let idlest = || usize::from(busy[1] < busy[0]);
        let index = ADOPTED.take().unwrap_or_else(idlest);
        busy[index] += 1;
        Own(index)
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        BUSY.lock().unwrap_or_else(PoisonError::into_inner)[self.0] -= 1;
    }
}

/// For threads of a test: a function that makes the thread that calls it use the device of this one.
pub fn same_device() -> impl Fn() + Copy + Send {
    let own = OWN.with(|own| own.0);
    move || ADOPTED.set(Some(own))
}

fn shared(index: usize) -> &'static Shared {
    static ALL: [OnceLock<Shared>; 2] = [const { OnceLock::new() }; 2];
    ALL[index].get_or_init(|| {
        let _ = env_logger::builder().is_test(true).try_init();
        let device = new_device(wgpu::Limits::default());
        let kernels = Kernels::new(&device.0);
        Shared { device, kernels }
    })
}

/// The device of this test: WebGPU's default limits, and the adapter's share of the features that variants of
/// the kernels use.
pub fn device() -> &'static (wgpu::Device, wgpu::Queue) {
    &shared(OWN.with(|own| own.0)).device
}

/// A device of its own, with the adapter's share of the features that variants of the kernels use.
pub fn new_device(limits: wgpu::Limits) -> (wgpu::Device, wgpu::Queue) {
    device_with(KvCache::optional_features(), limits)
}

/// A device of its own, with the adapter's share of `features`.
pub fn device_with(features: wgpu::Features, limits: wgpu::Limits) -> (wgpu::Device, wgpu::Queue) {
    pollster::block_on(async {
        let adapter = adapter().await;
        eprintln!("adapter: {}", adapter.get_info().name);
        // `KIVI_OPTIONAL_FEATURES=0`: WebGPU's defaults only.
        let optional = std::env::var("KIVI_OPTIONAL_FEATURES").map_or(true, |v| v != "0");
        let features = if optional { features } else { wgpu::Features::empty() };
        let descriptor = wgpu::DeviceDescriptor {
            required_features: adapter.features() & features,
            required_limits: limits,
            ..Default::default()
        };
        adapter.request_device(&descriptor).await.expect("a device with WebGPU's default limits")
    })
}

pub async fn adapter() -> wgpu::Adapter {
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle_from_env());
    adapters::choose(&instance, None).await.unwrap_or_else(|error| panic!("{error}"))
}

/// Says on stderr what the adapter cannot run, past the test harness, which would hide it.
pub fn skipped(variant: Variant, needed: &str) {
    let test = std::thread::current().name().unwrap_or_default().to_string();
    let _ = writeln!(std::io::stderr(), "skipped in {test}: {variant:?} kernels need {needed}");
}

/// Whether a device may lack this variant: portable kernels run on all, and what the others miss depends on
/// the adapter.
pub fn may_be_missing(variant: Variant) -> bool {
    variant == Variant::Subgroups
}

/// Whether to run full products of choices instead of pairs that cover them (`KIVI_FULL=1`).
pub fn full() -> bool {
    std::env::var("KIVI_FULL").is_ok_and(|v| v != "0")
}

/// A small generator of reproducible noise (SplitMix64).
pub struct Random(pub u64);

impl Random {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: u32) -> u32 {
        (self.bits() % u64::from(n)) as u32
    }

    /// Uniform in (0, 1].
    fn unit(&mut self) -> f64 {
        ((self.bits() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }

    /// Standard normal (Box–Muller).
    pub fn normal(&mut self) -> f32 {
        let (a, b) = (self.unit(), self.unit());
        ((-2.0 * a.ln()).sqrt() * (std::f64::consts::TAU * b).cos()) as f32
    }

    pub fn normals(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.normal()).collect()
    }
}

/// Bytes of `data` as `dtype`, and the f32 values that they stand for.
pub fn encode(data: &[f32], dtype: Dtype) -> (Vec<u8>, Vec<f32>) {
    let mut bytes = Vec::new();
    let values = data
        .iter()
        .map(|&x| match dtype {
            Dtype::F32 => {
                bytes.extend(x.to_le_bytes());
                x
            }
            Dtype::F16 => {
                bytes.extend(f16::from_f32(x).to_le_bytes());
                f16::from_f32(x).to_f32()
            }
            Dtype::Bf16 => {
                bytes.extend(bf16::from_f32(x).to_le_bytes());
                bf16::from_f32(x).to_f32()
            }
        })
        .collect();
    (bytes, values)
}

pub fn decode(bytes: &[u8], dtype: Dtype) -> Vec<f32> {
    match dtype {
        Dtype::F32 => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
        Dtype::F16 => bytes.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
        Dtype::Bf16 => bytes.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
    }
}

pub fn storage_buffer(bytes: &[u8]) -> wgpu::Buffer {
    use wgpu::util::DeviceExt;
    let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST;
    let padding = [0; 16];
    let contents = if bytes.is_empty() { &padding } else { bytes };
    device().0.create_buffer_init(&wgpu::util::BufferInitDescriptor { label: None, contents, usage })
}

pub fn poisoned_buffer(bytes: usize) -> wgpu::Buffer {
    storage_buffer(&POISON.to_le_bytes().repeat(bytes.div_ceil(4).max(4)))
}

pub fn read_buffer(buffer: &wgpu::Buffer) -> Vec<u8> {
    let (device, queue) = device();
    let target = device.create_buffer(&wgpu::BufferDescriptor {
        label: None,
        size: buffer.size(),
        usage: wgpu::BufferUsages::COPY_DST | wgpu::BufferUsages::MAP_READ,
        mapped_at_creation: false,
    });
    let mut encoder = device.create_command_encoder(&Default::default());
    encoder.copy_buffer_to_buffer(buffer, 0, &target, 0, buffer.size());
    encoder.map_buffer_on_submit(&target, wgpu::MapMode::Read, .., |r| r.unwrap());
    queue.submit([encoder.finish()]);
    device.poll(wgpu::PollType::wait_indefinitely()).unwrap();
    target.slice(..).get_mapped_range().unwrap().to_vec()
}

/// Fills every buffer of a cache with NaN.
pub fn poison(gpu: &KvCache) {
    for buffer in gpu.buffers() {
        device().1.write_buffer(buffer, 0, &POISON.to_le_bytes().repeat(buffer.size() as usize / 4));
    }
}

#[test]
fn adapters_of_one_name_have_indices_of_their_own() {
    let names = ["Radeon 780M", "llvmpipe", "Radeon RX", "Radeon 780M"].map(String::from);
    for (wanted, expected) in [
        ("0", Some(0)),
        ("3", Some(3)),
        ("4", None),
        ("780", Some(0)),
        ("radeon", Some(0)),
        ("RX", Some(2)),
        ("Arc", None),
    ] {
        assert_eq!(adapters::index_of(&names, wanted), expected, "{wanted}");
    }
}
