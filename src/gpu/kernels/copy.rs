//! Tokens and blocks are copied.

use super::source::pieces;
use super::{Bindings, Context, Grid, GridY, Kernel};

/// Words of a block that one workgroup copies.
const COPY_WORDS: u32 = 4096;

/// Unpacked tokens, within the sink slots and rings. An invocation copies one word.
pub(super) fn tokens(c: &Context<'_>) -> Kernel {
    let y = GridY::Fixed((2 * c.shape.token_words()).div_ceil(64));
    let twin = "src/oracle/copy_tokens.rs";
    let kernel = Kernel::new(c, "copy_tokens", twin, Bindings::InPlace, pieces!["copy_tokens.wgsl"]);
    Kernel { grid: Grid { y, ..Grid::default() }, ..kernel }
}

/// Blocks within a slab.
pub(super) fn blocks(c: &Context<'_>) -> Kernel {
    let twin = "src/oracle/copy_blocks.rs";
    of_blocks(c, Kernel::new(c, "copy_blocks", twin, Bindings::InPlace, pieces!["copy_blocks.wgsl"]))
}

/// Blocks from one slab to another.
pub(super) fn blocks_across(c: &Context<'_>) -> Kernel {
    let (twin, pieces) = ("src/oracle/copy_blocks.rs", pieces!["copy_blocks_across.wgsl"]);
    of_blocks(c, Kernel::new(c, "copy_blocks_across", twin, Bindings::Across, pieces))
}

fn of_blocks(c: &Context<'_>, mut kernel: Kernel) -> Kernel {
    kernel.constants.u32("COPY_WORDS", COPY_WORDS);
    kernel.grid.y = GridY::Fixed(c.shape.layout.block_words().div_ceil(COPY_WORDS));
    kernel
}
