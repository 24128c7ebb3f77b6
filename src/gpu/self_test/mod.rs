//! What a cache tries out on its device as it is made: that the kernels write the words that the format
//! prescribes, and that they attend.
//!
//! Both run the cache's own pipelines on its own buffers, before there is any sequence, and compare with the
//! oracle.

mod attention;
mod words;

pub(super) use attention::attention;
pub(super) use words::words;

use crate::geometry::Geometry;

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
