//! New tokens enter the cache.

use super::source::pieces;
use super::{Bindings, Context, Grid, GridY, Kernel};

/// An invocation writes one word of a token's keys and values.
pub(super) fn append(c: &Context<'_>) -> Kernel {
    let y = GridY::Fixed((2 * c.shape.token_words()).div_ceil(64));
    let kernel = Kernel::new(c, "append", "src/oracle/append.rs", Bindings::Append, pieces!["append.wgsl"]);
    Kernel { grid: Grid { y, ..Grid::default() }, ..kernel }
}
