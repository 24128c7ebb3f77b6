//! How large a model's buffers are: what options of the command line ask for, checked against the device and
//! the model before weights are loaded.

use crate::complain;
use crate::gpu::Gpu;
use crate::shape::Shape;
use anyhow::{Result, ensure};

/// What buffers are made for.
#[derive(Debug, Clone, Copy)]
pub struct Room {
    /// Tokens of a step, over all sequences.
    pub tokens: u32,
    /// Rows of logits of a step.
    pub logits: u32,
    /// Positions of a sequence.
    pub context: u32,
}

/// A size, and the option that asks for it.
#[derive(Debug, Clone, Copy)]
pub struct Asked {
    pub size: u64,
    pub option: &'static str,
}

/// A size that an option asks for.
pub fn asked(size: impl TryInto<u64>, option: &'static str) -> Asked {
    // What no u64 holds is more than any device has, too.
    Asked { size: size.try_into().unwrap_or(u64::MAX), option }
}

impl Asked {
    /// The size if it is at most `most`.
    pub fn within(self, most: u64, of_what: &str) -> Result<u32> {
        let Asked { size, option } = self;
        ensure!(size <= most, "{option} asks for {size} {of_what}, and here there can be at most {most}");
        Ok(u32::try_from(size)?)
    }
}

impl Room {
    /// For these sizes; a context of 0 is that which the model was trained for, or what the device has room
    /// for.
    pub fn new(gpu: &Gpu, shape: &Shape, tokens: Asked, logits: Asked, context: Asked) -> Result<Room> {
        // A kernel takes rows by 16, a workgroup for each row at most, and sees this much of a buffer.
        let rows = |width: u32| {
            let fitting = gpu.largest_buffer() / (4 * u64::from(width)) / 16 * 16;
            fitting.min(gpu.device.limits().max_compute_workgroups_per_dimension.into())
        };
        let queries = shape.query_heads * shape.head_dim;
        let widest = [shape.hidden, shape.qkv(), queries, 2 * shape.feed_forward].into_iter().max();
        let positions = (gpu.largest_buffer() / (4 * u64::from(shape.head_dim))).min(1 << 30);
        let trained = u64::from(shape.context);
        let context = match context.size {
            0 if trained > positions => {
                complain(format_args!(
                    "the model was trained for {trained} tokens; there is room for {positions}"
                ));
                positions as u32
            }
            0 => shape.context,
            size => {
                let context = context.within(positions, "positions of a sequence")?;
                if size > trained {
                    complain(format_args!(
                        "the model was trained for {trained} tokens, this asks for {size}"
                    ));
                }
                context
            }
        };
        Ok(Room {
            tokens: tokens.within(rows(widest.unwrap_or(1)), "tokens in a step")?,
            logits: logits.within(rows(shape.vocabulary), "rows of logits in a step")?,
            context,
        })
    }
}
