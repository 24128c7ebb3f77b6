//! What a cache tries out on its device as it is made: that the kernels write the words that the format
//! prescribes, and that they attend.
//!
//! Both run the cache's own pipelines on its own buffers, before there is any sequence, and compare with the
//! oracle.

mod attention;
mod words;

use super::device::filled_buffer;
use super::executor::Gpu;
use super::io::TensorView;
use super::kernels::Variant;
use super::memory::{Allowance, ClassMemory};
use super::options::{KvCacheOptions, SelfTest};
use crate::error::Error;
use crate::format::Dtype;
use crate::ids::CacheId;
use crate::plan::{PackBlock, Plan, SlabRange, Slot, TokenWrite};
use crate::shape::{CacheShape, Shape};
use std::sync::Arc;

/// Tests the kernels of a class of layers, and replaces those that attend wrongly or cannot be built if the
/// host has not chosen them.
pub(super) async fn try_out(
    gpu: &mut Gpu,
    cache: CacheId,
    class: usize,
    options: &KvCacheOptions<'_>,
) -> Result<(), Error> {
    if gpu.classes[class].sizes.pool.pages > 0 {
        return try_out_filled(gpu, cache, class, options).await;
    }
    // A pool that begins empty: another cache of the kind stands in.
    let mut filled = with_one_page(gpu, class).await?;
    try_out_filled(&mut filled, cache, 0, options).await?;
    gpu.classes[class].run_variant(filled.classes[0].kernels.variant());
    Ok(())
}

/// A cache with one layer of a class, and one page.
async fn with_one_page(gpu: &Gpu, class: usize) -> Result<Gpu, Error> {
    let (own, variant) = (&gpu.classes[class], gpu.classes[class].kernels.variant());
    let mut s = own.shape().clone();
    s.layers = vec![0];
    s.layer_attention.truncate(1);
    let sizes = own.sizes.smallest(&s)?;
    let shape = CacheShape { classes: vec![s], places: vec![(0, 0)], max_undo: gpu.shape.max_undo };
    let (shape, kernels, queue) = (Arc::new(shape), gpu.kernels.clone(), gpu.queue.clone());
    let unlimited = &mut Allowance(None);
    let memory = ClassMemory::allocate(&kernels, shape.clone(), 0, sizes, variant, unlimited).await?;
    Ok(Gpu { queue, kernels, shape, classes: vec![memory], memory_limit: None })
}

async fn try_out_filled(
    gpu: &mut Gpu,
    cache: CacheId,
    class: usize,
    options: &KvCacheOptions<'_>,
) -> Result<(), Error> {
    words::words(gpu, cache, class).await?;
    if options.self_test == SelfTest::Words {
        return Ok(());
    }
    loop {
        let variant = gpu.classes[class].kernels.variant();
        let replaceable = variant != Variant::Portable && options.variant.is_none();
        let Wrong { kernel, detail } = match attention::attention(gpu, cache, class).await {
            Ok(None) => return Ok(()),
            Ok(Some(wrong)) => wrong,
            Err(Error::Device(detail)) if replaceable => {
                Wrong { kernel: format!("those of {variant:?}"), detail }
            }
            Err(error) => return Err(error),
        };
        let adapter = gpu.adapter();
        if !replaceable {
            return Err(Error::WrongAttention { adapter, kernel, detail });
        }
        log::warn!("{adapter}: portable kernels replace {kernel}, which attends wrongly: {detail}");
        gpu.classes[class].run_variant(Variant::Portable);
    }
}

/// A kernel that computes something else than the oracle.
#[derive(Debug)]
struct Wrong {
    /// Its pass, rows per workgroup and variant.
    kernel: String,
    detail: String,
}

/// Reproducible noise between −1 and 1.
struct Noise(u32);

impl Noise {
    fn next(&mut self) -> f32 {
        // Numerical Recipes' linear congruential generator: enough for noise.
        self.0 = self.0.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (self.0 >> 8) as f32 / 8_388_608.0 - 1.0
    }
}

/// Elements of a block's keys or values of all heads, `[token][kv head][head_dim]`, from (token, head,
/// channel).
fn block_elements(s: &Shape, mut element: impl FnMut(u32, u32, u32) -> f32) -> Vec<f32> {
    let (heads, head_dim) = (s.layout.kv_heads, s.layout.head_dim);
    let mut out = Vec::with_capacity((s.layout.group * heads * head_dim) as usize);
    for token in 0..s.layout.group {
        for head in 0..heads {
            out.extend((0..head_dim).map(|channel| element(token, head, channel)));
        }
    }
    out
}

/// Plans that write a group of tokens to the first slots, and pack them into the first two blocks, the second
/// time in reverse. Each packs one block, which is what every cache has room for.
fn content(s: &Shape) -> [Plan; 2] {
    let group = s.layout.group;
    let pack = |block, slots: Vec<Slot>| Plan {
        slots,
        packs: vec![PackBlock { first_slot: 0, block }],
        pack_slabs: vec![SlabRange { slab: 0, items: 0..1 }],
        ..Plan::default()
    };
    let slots: Vec<Slot> = (0..group).map(Slot::ring).collect();
    let writes = slots.iter().zip(0..).map(|(&slot, row)| TokenWrite { row, slot }).collect();
    let backwards = slots.iter().rev().copied().collect();
    [Plan { tokens: group, writes, ..pack(0, slots) }, pack(1, backwards)]
}

/// A tensor that kernels read.
fn upload(device: &wgpu::Device, contents: &[f32]) -> Result<wgpu::Buffer, Error> {
    filled_buffer(device, "kivi self-test", bytemuck::cast_slice(contents), wgpu::BufferUsages::STORAGE)
}

fn view(buffer: &wgpu::Buffer) -> TensorView<'_> {
    TensorView::new(buffer, Dtype::F32)
}
