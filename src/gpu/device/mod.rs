//! What a device does for everything above: buffers whose creation may fail, uploads, and reading back.

mod buffers;
mod read;
mod upload;

pub(super) use crate::lifecycle::now_or_never;
pub(super) use buffers::{buffer, buffer_now, filled_buffer, mapped_buffer, scoped, write_mapped};
pub(super) use read::{Gather, Mapping, submit_and_read};
pub(super) use upload::Uploads;
