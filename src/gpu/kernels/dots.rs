//! Attention of decode steps whose logits are integer dot products.

use super::decode::{self, Source, TileShape};
use super::source::pieces;
use super::{Context, Kernel};
use crate::format::{Axis, Bits, Tensor};

/// Over packed pages: by dot products where workgroup memory holds the queries of a tile's rows, times the
/// scales of each block, in bytes; else in f32.
pub(super) fn packed(c: &Context<'_>, rows: u32) -> Kernel {
    let mut kernel = if fits(c, rows) {
        let shape = TileShape::new(c, rows, Source::PageByDots);
        let keys = pieces!["lib/keys_quantized.wgsl", "lib/keys_dot.wgsl"];
        let mut kernel = decode::with_keys(c, rows, &shape, &keys);
        kernel.workgroup_bytes += query_bytes(c, rows);
        kernel.rounds_queries = true;
        kernel
    } else {
        decode::packed(c, rows)
    };
    // DXC refuses what naga makes of `dot4I8Packed`: `dot4add_i8packed(a, b, 0)`, whose 0 it takes for a
    // 64-bit integer (<https://github.com/microsoft/DirectXShaderCompiler/issues/7400>).
    kernel.needs.not_on = Some(wgpu::Backend::Dx12);
    kernel
}

/// Whether there are kernels for this shape; if not, what they need.
pub(super) fn supports(c: &Context<'_>) -> Result<(), &'static str> {
    let layout = &c.shape.layout;
    if ![Bits::Two, Bits::Three, Bits::Four].contains(&layout.keys.bits) {
        return Err("keys of 2, 3 or 4 bits");
    }
    let axes = [Tensor::Keys, Tensor::Values].map(|tensor| layout.tensor(tensor).axis);
    if axes != [Axis::PerChannel, Axis::PerToken] {
        return Err("keys per channel and values per token");
    }
    if !layout.head_dim.is_multiple_of(16) {
        return Err("a head_dim that is a multiple of 16");
    }
    if !c.tiles.decode_tiles().into_iter().any(|rows| fits(c, rows)) {
        return Err("at most 8 query heads per KV head");
    }
    Ok(())
}

/// Bytes of workgroup memory for tiles of `rows` rows, besides what all attention needs.
fn query_bytes(c: &Context<'_>, rows: u32) -> u32 {
    c.shape.layout.blocks_per_page() * rows * c.shape.layout.head_dim
}

/// Whether tiles of `rows` rows stay within WebGPU's 16 KiB of workgroup memory.
fn fits(c: &Context<'_>, rows: u32) -> bool {
    let shape = TileShape::new(c, rows, Source::PageByDots);
    let bytes = 16 * shape.sh_vecs + query_bytes(c, rows);
    c.shape.layout.keys.bits.is_quantized() && shape.workgroup <= 256 && bytes <= 16384
}
