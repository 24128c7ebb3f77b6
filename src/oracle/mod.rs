//! The cache on the CPU: one plain function per shader, in f32 where words are made and in f64 where attention is computed.
//!
//! It carries out the same [`StepPlan`] as the GPU and is what the GPU is tested against. It favours being read
//! over being fast.

pub mod append;
pub mod attend_packed;
pub mod attend_unpacked;
pub mod copy_blocks;
pub mod copy_tokens;
pub mod merge;
pub mod pack;
pub mod unpack;

mod cache;
mod class;
mod operations;
mod partial;

pub use cache::{AttentionOutput, CpuCache, LayerInput};
pub use partial::{Partial, Row};

pub use crate::format::Tensor;
use crate::format::{Dtype, enter, widen};
use crate::geometry::Geometry;
use crate::plan::{Slot, StepPlan, TokenWrite};

/// Rows of unpacked tokens: sink slots and rings, or staging. Words: keys `[slot][kv head][row word]`, then values likewise.
#[derive(Debug, Clone)]
pub struct Unpacked {
    pub(crate) words: Vec<u32>,
    slots: u32,
}

impl Unpacked {
    fn new(g: &Geometry, slots: u32) -> Unpacked {
        Unpacked { words: vec![0; (2 * slots * g.token_words()) as usize], slots }
    }

    /// First word of a token's row.
    fn row(&self, g: &Geometry, tensor: Tensor, slot: u32, head: u32) -> usize {
        let token = slot + if tensor == Tensor::Values { self.slots } else { 0 };
        (token * g.token_words() + head * g.row_words()) as usize
    }
}

/// Lets `x` enter as element `channel` of an unpacked row.
fn put(format: Dtype, row: &mut [u32], channel: usize, x: f32) {
    let bits = enter(x, format);
    if format == Dtype::F32 {
        row[channel] = bits;
    } else {
        let shift = 16 * (channel % 2);
        let word = &mut row[channel / 2];
        *word = (*word & !(0xffff << shift)) | (bits << shift);
    }
}

/// The buffers of one layer that hold unpacked tokens.
#[derive(Debug, Clone, Copy)]
pub struct Tokens<'a> {
    /// Sink slots and rings.
    pub ring: &'a Unpacked,
    /// The staging buffer.
    pub staging: &'a Unpacked,
}

impl Tokens<'_> {
    /// The value of one element of an unpacked token.
    pub fn get(&self, g: &Geometry, tensor: Tensor, slot: Slot, head: u32, channel: u32) -> f32 {
        let buffer = if slot.is_staging() { self.staging } else { self.ring };
        let row = buffer.row(g, tensor, slot.index(), head);
        match g.window_format {
            Dtype::F32 => f32::from_bits(buffer.words[row + channel as usize]),
            format => {
                let word = buffer.words[row + channel as usize / 2];
                widen((word >> (16 * (channel % 2))) & 0xffff, format)
            }
        }
    }
}

/// The block that `group` tokens make, given as `[token][kv head][head_dim]`.
pub fn block_of(g: &Geometry, keys: &[f32], values: &[f32]) -> Vec<u32> {
    let slots: Vec<Slot> = (0..g.layout.group).map(Slot::ring).collect();
    let mut block = vec![0; g.layout.block_words() as usize];
    pack_block(
        g,
        Tokens { ring: &entered(g, keys, values), staging: &Unpacked::new(g, 0) },
        &slots,
        &mut block,
    );
    block
}

/// A group of tokens, given as `[token][kv head][head_dim]`, in its slots: the first ones.
fn entered(g: &Geometry, keys: &[f32], values: &[f32]) -> Unpacked {
    let writes = (0..g.layout.group).map(|row| TokenWrite { row, slot: Slot::ring(row) }).collect();
    let plan = StepPlan { tokens: g.layout.group, writes, ..StepPlan::default() };
    let (mut ring, mut staging) = (Unpacked::new(g, g.layout.group), Unpacked::new(g, 0));
    append::append(g, &plan, Tensor::Keys, keys, &mut ring, &mut staging);
    append::append(g, &plan, Tensor::Values, values, &mut ring, &mut staging);
    ring
}

/// A group of tokens in the first slots, packed in the first block of the pool, and in reverse in the second.
#[cfg(feature = "wgpu")]
pub(crate) struct TwoBlocks(class::LayerMemory);

#[cfg(feature = "wgpu")]
impl TwoBlocks {
    /// Of tokens given as `[token][kv head][head_dim]`.
    pub(crate) fn new(g: &Geometry, keys: &[f32], values: &[f32]) -> TwoBlocks {
        let row = (g.layout.kv_heads * g.layout.head_dim) as usize;
        let backwards = |x: &[f32]| -> Vec<f32> { x.chunks(row).rev().flatten().copied().collect() };
        let page = [block_of(g, keys, values), block_of(g, &backwards(keys), &backwards(values))].concat();
        TwoBlocks(class::LayerMemory { slabs: vec![page], ring: entered(g, keys, values) })
    }

    /// The attention of a plan, which is that of layers of one kind.
    pub(crate) fn attend(&self, g: &Geometry, plan: &StepPlan, q: &[f32]) -> AttentionOutput {
        let input = LayerInput { q, ..LayerInput::default() };
        class::attend(g, plan, 0, &self.0, &Unpacked::new(g, 0), &input)
    }
}

/// Packs the tokens in `slots` into `block`.
fn pack_block(g: &Geometry, tokens: Tokens<'_>, slots: &[Slot], block: &mut [u32]) {
    for (words, head) in block.chunks_mut(g.layout.head_words() as usize).zip(0..) {
        for tensor in [Tensor::Keys, Tensor::Values] {
            pack::pack(g, tensor, tokens, slots, head, words);
        }
    }
}
