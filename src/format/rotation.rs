//! The rotation of rows: a Hadamard transform along a head's channels, which spreads a token's outliers over
//! its groups.
//!
//! Walsh–Hadamard by butterflies in f32, in a fixed order, additions and subtractions only: every backend
//! gives the same bits. Head dimensions that are no power of two are transformed in pieces of their largest
//! power-of-two factor. As in QuaRot (Ashkboos et al., 2024).

use super::{Dtype, enter};

/// Channels that are transformed together.
pub fn rotation_size(head_dim: u32) -> u32 {
    1 << head_dim.trailing_zeros()
}

/// Factor after the butterflies of [`rotate`]: a power of two near 1/√size.
pub fn rotation_scale(head_dim: u32) -> f32 {
    let log = head_dim.trailing_zeros();
    2f32.powi(-(log.div_ceil(2) as i32))
}

/// Factor after the butterflies that undo a rotation, so that both together are the identity but for
/// rounding.
pub fn inverse_rotation_scale(head_dim: u32) -> f32 {
    let log = head_dim.trailing_zeros();
    2f32.powi(log.div_ceil(2) as i32 - log as i32)
}

/// Adds and subtracts pairs at distances 1, 2, 4 …
fn butterflies<T: Copy + std::ops::Add<Output = T> + std::ops::Sub<Output = T>>(row: &mut [T], size: usize) {
    let mut stride = 1;
    while stride < size {
        for i in (0..row.len()).filter(|i| i & stride == 0) {
            let (a, b) = (row[i], row[i + stride]);
            (row[i], row[i + stride]) = (a + b, a - b);
        }
        stride *= 2;
    }
}

/// Smaller values are taken for zero, so that no sum of others is subnormal, which GPUs may flush.
const LEAST: f32 = f32::from_bits(30 << 23);

/// Rotates a row of entered values; the results enter as f32 do, so they are clamped: a row whose values are
/// all alike and beyond 65504 times [`rotation_scale`] is damaged. Values below 2⁻⁹⁷ count as zero.
pub fn rotate(row: &mut [f32]) {
    let head_dim = row.len() as u32;
    row.iter_mut().filter(|x| x.abs() < LEAST).for_each(|x| *x = 0.0);
    butterflies(row, rotation_size(head_dim) as usize);
    for x in row {
        *x = f32::from_bits(enter(*x * rotation_scale(head_dim), Dtype::F32));
    }
}

/// Undoes a rotation of values in f32.
pub fn unrotate(row: &mut [f32]) {
    let head_dim = row.len() as u32;
    butterflies(row, rotation_size(head_dim) as usize);
    row.iter_mut().for_each(|x| *x *= inverse_rotation_scale(head_dim));
}

/// Undoes a rotation in f64, where its rounding does not matter.
pub fn unrotate_exactly(row: &mut [f64]) {
    let head_dim = row.len() as u32;
    butterflies(row, rotation_size(head_dim) as usize);
    row.iter_mut().for_each(|x| *x *= f64::from(inverse_rotation_scale(head_dim)));
}
