//! What the GPU runs: one file per family of kernels.
//!
//! A [`Pass`] says what is done in a layer, a [`Kernel`] how. The file of a family says all that there is to
//! know of its kernels: the WGSL pieces, the constants that it gives them, what they need of a device, their
//! workgroup memory, their bindings, their grid, and the plain Rust that they are tested against. Where
//! several kernels do the same, the [`Variant`] chooses one for decode steps and one for prefill.

mod append;
mod catalog;
mod clusters;
mod constants;
mod copy;
mod decode;
mod lane_order;
mod layouts;
mod merge;
mod needs;
mod pack;
mod prefill;
mod rotate;
mod set;
mod source;
mod store;
mod twins;
mod unpack;
mod variant;

pub use catalog::{CatalogEntry, catalog};
pub use source::ShaderSource;
pub use store::{Kernels, Progress};
pub use variant::Variant;

pub(super) use layouts::{CacheLayouts, Layouts};
pub(super) use set::KernelSet;

use layouts::Bindings;

use crate::error::Error;
use crate::format::Tensor;
use crate::schedule::{TileLimits, Tiles};
use crate::shape::Shape;
use constants::Constants;
use needs::Needs;
use source::Piece;
use variant::{DecodeKernels, PrefillKernels};

/// Workgroups per dimension that every WebGPU device allows.
pub(crate) const MAX_WORKGROUPS: u32 = 65535;

/// What is done in a layer. Attention and merge come by rows of a tile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Pass {
    /// New tokens enter.
    Append,
    /// Keys or values of whole blocks.
    Pack(Tensor),
    /// Keys or values that are about to be packed, rotated first.
    RotateRows(Tensor),
    /// Queries of a layer whose keys are rotated.
    RotateQueries,
    /// Attention of decode steps, with this many rows per workgroup.
    Decode(Reads, u32),
    /// Attention of long chunks over packed pages.
    PrefillPacked,
    /// Attention of long chunks over unpacked tokens.
    PrefillUnpacked,
    /// Partial results of tiles of this many rows.
    Merge(u32),
    /// Unpacked tokens of another sequence.
    CopyTokens,
    /// Blocks within a slab.
    CopyBlocks,
    /// Blocks from one slab to another.
    CopyBlocksAcross,
    /// Packed tokens return to the window.
    Unpack,
    /// The same for keys or values that are rotated.
    UnpackRotated(Tensor),
}

/// What a pass of attention reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reads {
    /// Packed and unpacked tokens.
    Both,
    /// Packed pages.
    Packed,
    /// Unpacked tokens.
    Unpacked,
}

impl Pass {
    /// Every pass that layers of a shape can run by a variant's kernels.
    pub fn all(s: &Shape, variant: Variant) -> Vec<Pass> {
        Pass::of(&Context::new(s, &Tiles::new(s, &TileLimits::WGSL), variant))
    }

    pub(crate) fn of(c: &Context<'_>) -> Vec<Pass> {
        let (s, tiles) = (c.shape, c.tiles);
        let mut passes = vec![Pass::Append];
        let tensors = [Tensor::Keys, Tensor::Values].map(|tensor| s.layout.tensor(tensor));
        for t in tensors {
            passes.extend(t.rotates_apart().then_some(Pass::RotateRows(t.tensor)));
            passes.push(Pass::Pack(t.tensor));
        }
        passes.extend([Pass::CopyTokens, Pass::CopyBlocks, Pass::CopyBlocksAcross]);
        if tensors.iter().any(|t| !t.format.rotated) {
            passes.push(Pass::Unpack);
        }
        for t in tensors.into_iter().filter(|t| t.format.rotated) {
            passes.push(Pass::UnpackRotated(t.tensor));
        }
        if s.layout.keys.rotated {
            passes.push(Pass::RotateQueries);
        }
        for rows in tiles.decode_tiles() {
            passes.extend(c.variant.decode_reads().iter().map(|reads| Pass::Decode(*reads, rows)));
            passes.push(Pass::Merge(rows));
        }
        if tiles.may_prefill() {
            passes.extend([Pass::PrefillPacked, Pass::PrefillUnpacked, Pass::Merge(tiles.prefill_tile())]);
        }
        passes
    }

    /// The kernel that does it in layers of this shape.
    pub(crate) fn kernel(self, c: &Context<'_>) -> Kernel {
        match self {
            Pass::Append => append::append(c),
            Pass::Pack(tensor) => pack::pack(c, tensor),
            Pass::RotateRows(tensor) => rotate::rows(c, tensor),
            Pass::RotateQueries => rotate::queries(c),
            Pass::Decode(reads, rows) => match c.variant.decode() {
                DecodeKernels::Portable => decode::decode(c, rows),
                DecodeKernels::Clusters => clusters::decode(c, reads, rows),
            },
            Pass::PrefillPacked => match c.variant.prefill() {
                PrefillKernels::Portable => prefill::packed(c),
                PrefillKernels::Clusters => clusters::prefill_packed(c),
            },
            Pass::PrefillUnpacked => match c.variant.prefill() {
                PrefillKernels::Portable => prefill::unpacked(c),
                PrefillKernels::Clusters => clusters::prefill_unpacked(c),
            },
            Pass::Merge(rows) => merge::merge(c, rows),
            Pass::CopyTokens => copy::tokens(c),
            Pass::CopyBlocks => copy::blocks(c),
            Pass::CopyBlocksAcross => copy::blocks_across(c),
            Pass::Unpack => unpack::plain(c),
            Pass::UnpackRotated(tensor) => unpack::rotated(c, tensor),
        }
    }

    /// Name of the entry point, and stem of the file but for `_clusters`.
    pub fn entry_point(self) -> &'static str {
        match self {
            Pass::Append => "append",
            Pass::Pack(_) => "pack",
            Pass::RotateRows(_) => "rotate_rows",
            Pass::RotateQueries => "rotate_queries",
            Pass::Decode(..) => "decode",
            Pass::PrefillPacked => "prefill_packed",
            Pass::PrefillUnpacked => "prefill_unpacked",
            Pass::Merge(_) => "merge",
            Pass::CopyTokens => "copy_tokens",
            Pass::CopyBlocks => "copy_blocks",
            Pass::CopyBlocksAcross => "copy_blocks_across",
            Pass::Unpack => "unpack",
            Pass::UnpackRotated(_) => "unpack_rotated",
        }
    }

    /// The shader for layers of a shape that run this variant.
    pub fn source(self, s: &Shape, variant: Variant) -> ShaderSource {
        self.in_layers(s, variant).source()
    }

    /// Bytes of workgroup memory that it declares.
    pub fn workgroup_bytes(self, s: &Shape, variant: Variant) -> u32 {
        self.in_layers(s, variant).workgroup_bytes
    }

    /// The Rust that computes the same: a file below the crate's root.
    pub fn twin(self, s: &Shape, variant: Variant) -> &'static str {
        self.in_layers(s, variant).twin
    }

    fn in_layers(self, s: &Shape, variant: Variant) -> Kernel {
        self.kernel(&Context::new(s, &Tiles::new(s, &TileLimits::WGSL), variant))
    }
}

/// What kernels are made for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Context<'a> {
    pub(crate) shape: &'a Shape,
    pub(crate) tiles: &'a Tiles,
    pub(crate) variant: Variant,
}

impl<'a> Context<'a> {
    pub(crate) fn new(shape: &'a Shape, tiles: &'a Tiles, variant: Variant) -> Context<'a> {
        Context { shape, tiles, variant }
    }

    /// Bytes of workgroup memory that the largest kernel needs.
    pub(crate) fn workgroup_bytes(&self) -> u32 {
        let passes = Pass::of(self).into_iter();
        passes.map(|pass| pass.kernel(self).workgroup_bytes).max().unwrap_or(0)
    }

    /// Whether a device has what every kernel needs; if not, what is missing.
    pub(crate) fn check(&self, device: &wgpu::Device) -> Result<(), &'static str> {
        Pass::of(self).into_iter().try_for_each(|pass| {
            let kernel = pass.kernel(self);
            kernel.needs.check(device, kernel.workgroup_bytes)
        })
    }

    /// Whether some kernel needs a workgroup's invocations to be numbered subgroup by subgroup.
    pub(crate) fn needs_linear_lanes(&self) -> bool {
        Pass::of(self).into_iter().any(|pass| pass.kernel(self).needs.linear_lanes)
    }
}

/// One kernel: all that there is to know of it.
#[derive(Debug, Clone)]
pub(crate) struct Kernel {
    pub(crate) entry_point: &'static str,
    /// The Rust that computes the same.
    pub(crate) twin: &'static str,
    /// The files of the shader, in order.
    pieces: Vec<Piece>,
    /// What the pieces may read.
    constants: Constants,
    pub(crate) bindings: Bindings,
    /// What it declares.
    pub(crate) workgroup_bytes: u32,
    needs: Needs,
    pub(crate) grid: Grid,
}

impl Kernel {
    /// A kernel that needs nothing beyond WebGPU's defaults, and has one workgroup per item of work.
    fn new(
        c: &Context<'_>,
        entry_point: &'static str,
        twin: &'static str,
        bindings: Bindings,
        pieces: impl IntoIterator<Item = Piece>,
    ) -> Kernel {
        let mut all = source::pieces!["lib/step.wgsl", "lib/element.wgsl"].to_vec();
        all.extend(pieces);
        Kernel {
            entry_point,
            twin,
            pieces: all,
            constants: Constants::of_cache(c),
            bindings,
            workgroup_bytes: 0,
            needs: Needs::default(),
            grid: Grid::default(),
        }
    }

    /// Its shader.
    pub(crate) fn source(&self) -> ShaderSource {
        let subgroups = self.needs.features.contains(wgpu::Features::SUBGROUP);
        ShaderSource::new(&self.pieces, &self.constants, subgroups)
    }

    /// Its shader, with constants and pieces of one family more.
    fn with(mut self, pieces: impl IntoIterator<Item = Piece>) -> Kernel {
        self.pieces.extend(pieces);
        self
    }
}

/// How the items of a pass become workgroups.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Grid {
    /// Items of work for one record of the plan.
    pub(crate) per_record: u32,
    /// Items that one workgroup takes at most, one after the other: few are divided among more workgroups. It
    /// does not change a bit.
    pub(crate) items_at_most: u32,
    /// Workgroups that share an item.
    pub(crate) sharing: u32,
    pub(crate) y: GridY,
}

/// Workgroups in y.
#[derive(Debug, Clone, Copy)]
pub(crate) enum GridY {
    Fixed(u32),
    /// So many units for each KV head, of which a workgroup takes so many.
    Heads {
        units: u32,
        per_workgroup: u32,
    },
}

impl Default for Grid {
    /// A workgroup per item and KV head.
    fn default() -> Grid {
        let y = GridY::Heads { units: 1, per_workgroup: 1 };
        Grid { per_record: 1, items_at_most: 1, sharing: 1, y }
    }
}

impl Grid {
    /// Workgroups for `count` items and `heads` KV heads.
    pub(crate) fn workgroups(self, count: u32, heads: u32) -> [u32; 3] {
        let each = (count / 16).clamp(1, self.items_at_most);
        let x = count.div_ceil(each) * self.sharing;
        let y = match self.y {
            GridY::Fixed(y) => y,
            GridY::Heads { units, per_workgroup } => (heads * units).div_ceil(per_workgroup),
        };
        [x.min(MAX_WORKGROUPS), y, x.div_ceil(MAX_WORKGROUPS)]
    }
}

fn previous_power_of_two(n: u32) -> u32 {
    1 << n.max(1).ilog2()
}

/// Whether a device can run the portable kernels, which need the most that WebGPU's defaults have, with plans
/// of so many bytes.
///
/// # Errors
/// [`Error::LimitTooLow`].
pub(super) fn check_limits(
    s: &Shape,
    tiles: &Tiles,
    plan_bytes: u64,
    limits: &wgpu::Limits,
) -> Result<(), Error> {
    let need = |limit, available: u64, needed: u64, what, instead| {
        if available >= needed {
            Ok(())
        } else {
            Err(Error::LimitTooLow { limit, available, needed, what, instead })
        }
    };
    let other = "use another device";
    let what = "the attention kernels";
    let buffers = u64::from(limits.max_storage_buffers_per_shader_stage);
    need("max_storage_buffers_per_shader_stage", buffers, 8, what, other)?;
    let memory = u64::from(limits.max_compute_workgroup_storage_size);
    let least = u64::from(Context::new(s, tiles, Variant::Portable).workgroup_bytes());
    let smaller = "use a smaller head_dim or larger groups";
    need("max_compute_workgroup_storage_size", memory, least, what, smaller)?;
    let invocations = u64::from(limits.max_compute_invocations_per_workgroup);
    need("max_compute_invocations_per_workgroup", invocations, 256, what, other)?;
    let width = u64::from(limits.max_compute_workgroup_size_x);
    need("max_compute_workgroup_size_x", width, 256, what, other)?;
    let groups = u64::from(limits.max_compute_workgroups_per_dimension);
    need("max_compute_workgroups_per_dimension", groups, MAX_WORKGROUPS.into(), "long work lists", other)?;
    let binding = limits.max_storage_buffer_binding_size;
    let instead = "lower max_sequences, max_batch_tokens or capacity";
    need("max_storage_buffer_binding_size", binding, plan_bytes, "a step's plan", instead)
}
