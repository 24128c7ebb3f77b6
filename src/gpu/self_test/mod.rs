//! What a cache tries out on its device as it is made: that the kernels write the words that the format
//! prescribes, and that they attend.
//!
//! Both run the cache's own pipelines on its own buffers, before there is any sequence, and compare with the
//! oracle.

mod attention;
mod words;

pub(super) use attention::attention;
pub(super) use words::words;

use super::buffers::filled_buffer;
use super::io::TensorView;
use crate::error::Error;
use crate::format::Dtype;
use crate::geometry::Geometry;
use crate::plan::{PackBlock, SlabRange, Slot, StepPlan, TokenWrite};

/// How much of its kernels a cache tries out as it is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum SelfTest {
    /// The words of a block, and attention through every kernel that the configuration can run. It builds all
    /// attention kernels.
    #[default]
    Full,
    /// The words of a block: kernels that attend are built by the first step that needs them, and trusted.
    /// For a device and a configuration on which the full test has passed, and for many caches on one device.
    Words,
}

/// A kernel that computes something else than the oracle.
#[derive(Debug)]
pub(super) struct Wrong {
    /// Its pass, rows per workgroup and variant.
    pub(super) kernel: String,
    pub(super) detail: String,
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
fn block_elements(g: &Geometry, mut element: impl FnMut(u32, u32, u32) -> f32) -> Vec<f32> {
    let (heads, head_dim) = (g.layout.kv_heads, g.layout.head_dim);
    let mut out = Vec::with_capacity((g.layout.group * heads * head_dim) as usize);
    for token in 0..g.layout.group {
        for head in 0..heads {
            out.extend((0..head_dim).map(|channel| element(token, head, channel)));
        }
    }
    out
}

/// Plans that write a group of tokens to the first slots, and pack them into the first two blocks, the second
/// time in reverse. Each packs one block, which is what every cache has room for.
fn content(g: &Geometry) -> [StepPlan; 2] {
    let group = g.layout.group;
    let pack = |block, slots: Vec<Slot>| StepPlan {
        slots,
        packs: vec![PackBlock { first_slot: 0, block }],
        pack_slabs: vec![SlabRange { slab: 0, items: 0..1 }],
        ..StepPlan::default()
    };
    let slots: Vec<Slot> = (0..group).map(Slot::ring).collect();
    let writes = slots.iter().zip(0..).map(|(&slot, row)| TokenWrite { row, slot }).collect();
    let backwards = slots.iter().rev().copied().collect();
    [StepPlan { tokens: group, writes, ..pack(0, slots) }, pack(1, backwards)]
}

/// A tensor that kernels read.
fn upload(device: &wgpu::Device, contents: &[f32]) -> Result<wgpu::Buffer, Error> {
    filled_buffer(device, "kivi self-test", bytemuck::cast_slice(contents), wgpu::BufferUsages::STORAGE)
}

fn view(buffer: &wgpu::Buffer) -> TensorView<'_> {
    TensorView::new(buffer, Dtype::F32)
}
