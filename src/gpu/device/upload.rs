//! Recycled mapped buffers through which plans reach the GPU, by copies recorded in the host's encoder.
//!
//! wgpu's own `StagingBelt` does the same and panics where memory runs out or the device is lost.

use super::{mapped_buffer, write_mapped};
use crate::error::Error;
use crate::memory::UPLOADS;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use wgpu::BufferUsages;

/// Idle buffers kept for later operations; more are dropped.
const MAX_IDLE: usize = 16;

#[derive(Debug)]
pub(in crate::gpu) struct Uploads {
    /// Each holds the longest plan.
    size: u64,
    idle: Vec<Upload>,
    /// Buffers whose copy has been executed and which are mapped again. One whose encoder is thrown away
    /// never comes.
    returned: Mutex<Receiver<Upload>>,
    give_back: Sender<Upload>,
    bytes: Arc<AtomicU64>,
}

/// A mapped buffer that counts.
#[derive(Debug)]
struct Upload {
    buffer: wgpu::Buffer,
    bytes: Arc<AtomicU64>,
}

impl Drop for Upload {
    fn drop(&mut self) {
        self.bytes.fetch_sub(self.buffer.size(), Relaxed);
    }
}

impl Uploads {
    /// Buffers for plans of up to `size` bytes: as many as a host has steps on their way that waits for one
    /// before it records the next but one.
    pub(in crate::gpu) fn new(device: &wgpu::Device, size: u64) -> Result<Uploads, Error> {
        let (give_back, returned) = channel();
        let (returned, bytes) = (Mutex::new(returned), Arc::default());
        let mut uploads = Uploads { size: 0, idle: Vec::new(), returned, give_back, bytes };
        uploads.grow(device, size)?;
        Ok(uploads)
    }

    /// From now on, plans have up to `size` bytes.
    pub(in crate::gpu) fn grow(&mut self, device: &wgpu::Device, size: u64) -> Result<(), Error> {
        let new: Result<Vec<_>, Error> = (0..UPLOADS).map(|_| self.create(device, size)).collect();
        self.idle = new?;
        self.size = size;
        Ok(())
    }

    /// Bytes of all buffers, those on their way included.
    pub(in crate::gpu) fn bytes(&self) -> u64 {
        self.bytes.load(Relaxed)
    }

    fn create(&self, device: &wgpu::Device, size: u64) -> Result<Upload, Error> {
        let usage = BufferUsages::MAP_WRITE | BufferUsages::COPY_SRC;
        let buffer = mapped_buffer(device, "kivi upload", size, usage)?;
        self.bytes.fetch_add(buffer.size(), Relaxed);
        Ok(Upload { buffer, bytes: self.bytes.clone() })
    }

    /// Records a copy of `bytes` (a multiple of 4) to the start of `target`.
    pub(in crate::gpu) fn record(
        &mut self,
        device: &wgpu::Device,
        encoder: &mut wgpu::CommandEncoder,
        target: &wgpu::Buffer,
        bytes: &[u8],
    ) -> Result<(), Error> {
        if let Ok(returned) = self.returned.get_mut() {
            self.idle.extend(returned.try_iter().filter(|upload| upload.buffer.size() == self.size));
        }
        self.idle.truncate(MAX_IDLE);
        let upload = match self.idle.pop() {
            Some(upload) => upload,
            None => self.create(device, self.size)?,
        };
        write_mapped(&upload.buffer, bytes)?;
        encoder.copy_buffer_to_buffer(&upload.buffer, 0, target, 0, bytes.len() as u64);
        let (give_back, buffer) = (self.give_back.clone(), upload.buffer.clone());
        encoder.map_buffer_on_submit(&buffer, wgpu::MapMode::Write, .., move |result| {
            if result.is_ok() {
                // The cache may be gone: then nobody waits for the buffer.
                let _ = give_back.send(upload);
            }
        });
        Ok(())
    }
}
