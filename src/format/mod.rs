//! The block format: how codes, parameters and unpacked tokens are laid out in `u32` words, and the
//! quantizer that gives the same words on every backend.

mod bits;
mod clipping;
mod compact;
mod entry;
mod layout;
mod param;
mod quantizer;
mod read;
mod rotation;
mod tensor;

pub use bits::{Bits, CodePart};
pub use clipping::{CLIP_LEAST_EXPONENT, CLIP_STEP, CLIP_STEPS};
pub use entry::{Dtype, bf16_to_f32, enter, f16_to_f32, floor_to_f16, round_to, widen};
pub use layout::{BlockLayout, TensorLayout};
pub use param::Param;
pub use quantizer::{ZeroPoint, code, dequantize, order_key, param};
pub use rotation::{
    inverse_rotation_scale, rotate, rotation_scale, rotation_size, unrotate, unrotate_exactly,
};
pub use tensor::{Axis, Tensor, TensorFormat};

/// Tokens per page: the unit of allocation, of sharing and of attention splits.
pub const PAGE_TOKENS: u32 = 256;
