//! Reads buffers back to the host.

use super::{buffer, scoped};
use crate::error::Error;
use std::sync::{Arc, Mutex};
use std::task::Poll;

/// Bytes read back at a time: a layer may hold more than one buffer can.
const PIECE_BYTES: u64 = 32 << 20;

/// Byte ranges of cache buffers.
#[derive(Default)]
pub(in crate::gpu) struct Gather<'a> {
    copies: Vec<(&'a wgpu::Buffer, u64, u64)>,
    bytes: u64,
}

impl<'a> Gather<'a> {
    pub(in crate::gpu) fn add(&mut self, buffer: &'a wgpu::Buffer, offset: u64, size: u64) {
        self.bytes += size;
        // Neighbouring ranges are one copy.
        match self.copies.last_mut() {
            Some((b, o, s)) if *b == buffer && *o + *s == offset => *s += size,
            _ => self.copies.push((buffer, offset, size)),
        }
    }

    /// The copies in pieces of up to [`PIECE_BYTES`].
    pub(in crate::gpu) fn pieces(&self) -> Vec<Vec<(&'a wgpu::Buffer, u64, u64)>> {
        let mut pieces = Vec::new();
        let mut piece = Vec::new();
        let mut room = PIECE_BYTES;
        for &(buffer, mut offset, mut size) in &self.copies {
            while size > 0 {
                let n = size.min(room);
                piece.push((buffer, offset, n));
                (offset, size, room) = (offset + n, size - n, room - n);
                if room == 0 {
                    pieces.push(std::mem::take(&mut piece));
                    room = PIECE_BYTES;
                }
            }
        }
        if !piece.is_empty() {
            pieces.push(piece);
        }
        pieces
    }
}

/// The words of byte ranges. Submits copies and waits for them.
pub(in crate::gpu) async fn submit_and_read(
    device: &wgpu::Device,
    queue: &wgpu::Queue,
    gather: &Gather<'_>,
) -> Result<Vec<u32>, Error> {
    let mut words = Vec::with_capacity(gather.bytes as usize / 4);
    for piece in gather.pieces() {
        let size: u64 = piece.iter().map(|(_, _, size)| size).sum();
        let usage = wgpu::BufferUsages::COPY_DST | wgpu::BufferUsages::MAP_READ;
        let target = buffer(device, "kivi read back", size, usage).await?;
        let map = scoped(device, || {
            let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
            let mut at = 0;
            for (source, offset, size) in piece {
                encoder.copy_buffer_to_buffer(source, offset, &target, at, size);
                at += size;
            }
            queue.submit([encoder.finish()]);
            Mapping::new(&target)
        })?;
        map.done(device).await?;
        let bytes = target.slice(..).get_mapped_range().map_err(|e| Error::Device(e.to_string()))?;
        words.extend(bytemuck::pod_collect_to_vec::<u8, u32>(&bytes));
    }
    Ok(words)
}

/// A buffer that is being mapped for reading.
pub(in crate::gpu) struct Mapping(Arc<Mutex<Mapped>>);

/// The result, and who waits for it.
type Mapped = (Option<Result<(), wgpu::BufferAsyncError>>, Option<std::task::Waker>);

impl Mapping {
    /// Asks for the mapping.
    pub(in crate::gpu) fn new(buffer: &wgpu::Buffer) -> Mapping {
        let shared: Arc<Mutex<Mapped>> = Arc::default();
        let from_callback = shared.clone();
        buffer.slice(..).map_async(wgpu::MapMode::Read, move |result| {
            if let Ok(mut state) = from_callback.lock() {
                state.0 = Some(result);
                if let Some(waker) = state.1.take() {
                    waker.wake();
                }
            }
        });
        Mapping(shared)
    }

    /// Waits until it is done. On native it polls the device; in browsers the callback wakes it.
    pub(in crate::gpu) async fn done(self, device: &wgpu::Device) -> Result<(), Error> {
        std::future::poll_fn(|context| {
            let polled = device.poll(wgpu::PollType::Poll);
            let Ok(mut state) = self.0.lock() else {
                return Poll::Ready(Err(Error::Device("a map callback panicked".into())));
            };
            match (state.0.take(), polled) {
                (Some(result), _) => Poll::Ready(result.map_err(|e| Error::Device(e.to_string()))),
                (None, Err(error)) => Poll::Ready(Err(Error::Device(error.to_string()))),
                (None, Ok(_)) => {
                    state.1 = Some(context.waker().clone());
                    if cfg!(not(target_arch = "wasm32")) {
                        // Polling without a pause would keep the device's locks from the host's other
                        // threads.
                        std::thread::sleep(std::time::Duration::from_micros(100));
                        context.waker().wake_by_ref();
                    }
                    Poll::Pending
                }
            }
        })
        .await
    }
}
