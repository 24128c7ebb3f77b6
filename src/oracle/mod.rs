//! The cache on the CPU: one plain function per shader, in f32 where words are made and in f64 where
//! attention is computed.
//!
//! It carries out the same [`Plan`] as the GPU and is what the GPU is tested against. It favours being read
//! over being fast.

mod append;
mod attend;
mod attend_packed;
mod attend_unpacked;
mod copy_blocks;
mod copy_tokens;
mod merge;
mod pack;
mod unpack;

mod cache;
mod executor;
mod layer;
mod partial;

pub use cache::CpuCache;
pub use layer::{AttentionOutput, LayerInput};
use partial::{Partial, Row};

use crate::format::{Dtype, Tensor, enter, widen};
use crate::plan::{Plan, Slot, TokenWrite};
use crate::shape::Shape;

/// Rows of unpacked tokens: sink slots and rings, or staging. Words: keys `[slot][kv head][row word]`, then
/// values likewise.
#[derive(Debug, Clone)]
struct Unpacked {
    words: Vec<u32>,
    slots: u32,
}

impl Unpacked {
    fn new(s: &Shape, slots: u32) -> Unpacked {
        Unpacked { words: vec![0; (2 * slots * s.token_words()) as usize], slots }
    }

    /// First word of a token's row.
    fn row(&self, s: &Shape, tensor: Tensor, slot: u32, head: u32) -> usize {
        let token = slot + if tensor == Tensor::Values { self.slots } else { 0 };
        (token * s.token_words() + head * s.row_words()) as usize
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
struct Tokens<'a> {
    /// Sink slots and rings.
    ring: &'a Unpacked,
    /// The staging buffer.
    staging: &'a Unpacked,
}

impl Tokens<'_> {
    /// The value of one element of an unpacked token.
    fn get(&self, s: &Shape, tensor: Tensor, slot: Slot, head: u32, channel: u32) -> f32 {
        let buffer = if slot.is_staging() { self.staging } else { self.ring };
        let row = buffer.row(s, tensor, slot.index(), head);
        match s.window_format {
            Dtype::F32 => f32::from_bits(buffer.words[row + channel as usize]),
            format => {
                let word = buffer.words[row + channel as usize / 2];
                widen((word >> (16 * (channel % 2))) & 0xffff, format)
            }
        }
    }
}

/// The block that `group` tokens make, given as `[token][kv head][head_dim]`.
pub fn block_of(s: &Shape, keys: &[f32], values: &[f32]) -> Vec<u32> {
    let slots: Vec<Slot> = (0..s.layout.group).map(Slot::ring).collect();
    let mut block = vec![0; s.layout.block_words() as usize];
    pack_block(
        s,
        Tokens { ring: &entered(s, keys, values), staging: &Unpacked::new(s, 0) },
        &slots,
        &mut block,
    );
    block
}

/// A group of tokens, given as `[token][kv head][head_dim]`, in its slots: the first ones.
fn entered(s: &Shape, keys: &[f32], values: &[f32]) -> Unpacked {
    let writes = (0..s.layout.group).map(|row| TokenWrite { row, slot: Slot::ring(row) }).collect();
    let plan = Plan { tokens: s.layout.group, writes, ..Plan::default() };
    let (mut ring, mut staging) = (Unpacked::new(s, s.layout.group), Unpacked::new(s, 0));
    append::append(s, &plan, Tensor::Keys, keys, &mut ring, &mut staging);
    append::append(s, &plan, Tensor::Values, values, &mut ring, &mut staging);
    ring
}

/// A group of tokens in the first slots, packed in the first block of the pool, and in reverse in the second.
#[cfg(feature = "wgpu")]
pub(crate) struct TwoBlocks(layer::LayerMemory);

#[cfg(feature = "wgpu")]
impl TwoBlocks {
    /// Of tokens given as `[token][kv head][head_dim]`.
    pub(crate) fn new(s: &Shape, keys: &[f32], values: &[f32]) -> TwoBlocks {
        let row = (s.layout.kv_heads * s.layout.head_dim) as usize;
        let backwards = |x: &[f32]| -> Vec<f32> { x.chunks(row).rev().flatten().copied().collect() };
        let page = [block_of(s, keys, values), block_of(s, &backwards(keys), &backwards(values))].concat();
        TwoBlocks(layer::LayerMemory { slabs: vec![page], ring: entered(s, keys, values) })
    }

    /// The attention of a plan, which is that of layers of one kind.
    pub(crate) fn attend(&self, s: &Shape, plan: &Plan, q: &[f32]) -> AttentionOutput {
        let input = LayerInput { q, ..LayerInput::default() };
        attend::attend(s, plan, 0, &self.0, &Unpacked::new(s, 0), &input)
    }
}

/// Packs the tokens in `slots` into `block`.
fn pack_block(s: &Shape, tokens: Tokens<'_>, slots: &[Slot], block: &mut [u32]) {
    for (words, head) in block.chunks_mut(s.layout.head_words() as usize).zip(0..) {
        for tensor in [Tensor::Keys, Tensor::Values] {
            pack::pack(s, tensor, tokens, slots, head, words);
        }
    }
}
