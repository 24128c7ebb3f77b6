//! Recycled mapped buffers through which plans reach the GPU, by copies recorded in the host's encoder.
//!
//! wgpu's own `StagingBelt` does the same and panics where memory runs out or the device is lost.

use super::buffers::{mapped_buffer, write_mapped};
use crate::error::Error;
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, Sender, channel};
use wgpu::BufferUsages;

/// Idle buffers kept for later steps; more are dropped.
const MAX_IDLE: usize = 16;

#[derive(Debug)]
pub(super) struct Uploads {
    idle: Vec<wgpu::Buffer>,
    /// Buffers whose copy has been executed and which are mapped again. One whose encoder is thrown away never comes.
    returned: Mutex<Receiver<wgpu::Buffer>>,
    give_back: Sender<wgpu::Buffer>,
}

impl Uploads {
    pub(super) fn new() -> Uploads {
        let (give_back, returned) = channel();
        Uploads { idle: Vec::new(), returned: Mutex::new(returned), give_back }
    }

    /// Records a copy of `bytes` (a multiple of 4) to the start of `target`.
    pub(super) fn record(
        &mut self,
        device: &wgpu::Device,
        encoder: &mut wgpu::CommandEncoder,
        target: &wgpu::Buffer,
        bytes: &[u8],
    ) -> Result<(), Error> {
        if let Ok(returned) = self.returned.get_mut() {
            self.idle.extend(returned.try_iter());
        }
        self.idle.truncate(MAX_IDLE);
        let size = bytes.len() as u64;
        let usage = BufferUsages::MAP_WRITE | BufferUsages::COPY_SRC;
        let buffer = match self.idle.iter().position(|b| b.size() >= size) {
            Some(at) => self.idle.swap_remove(at),
            None => mapped_buffer(device, "kivi upload", size.next_power_of_two().max(4096), usage)?,
        };
        write_mapped(&buffer, bytes)?;
        encoder.copy_buffer_to_buffer(&buffer, 0, target, 0, size);
        let (give_back, again) = (self.give_back.clone(), buffer.clone());
        encoder.map_buffer_on_submit(&buffer, wgpu::MapMode::Write, .., move |result| {
            if result.is_ok() {
                // The cache may be gone: then nobody waits for the buffer.
                let _ = give_back.send(again);
            }
        });
        Ok(())
    }
}
