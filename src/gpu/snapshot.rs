//! Save and load.

use super::buffers::{mapped_buffer, write_mapped};
use super::cache::KvCache;
use crate::error::Error;
use crate::plan::{Operation, SequenceId};
use crate::snapshot::Snapshot;

impl KvCache {
    /// What every layer holds of a sequence. Submits copies and waits for them; work submitted before is seen.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`]; [`Error::OutOfMemory`] for the buffer that is read back; [`Error::Device`] if the device is lost.
    pub async fn submit_and_save(&self, sequence: SequenceId) -> Result<Snapshot, Error> {
        let mut layers = Vec::with_capacity(self.layers.len());
        for layer in 0..self.geometry().layers {
            layers.push(self.submit_and_read_state(layer, sequence).await?);
        }
        Ok(Snapshot::new(self.geometry(), layers))
    }

    /// As [`Self::submit_and_save`], blocking.
    ///
    /// # Errors
    /// As [`Self::submit_and_save`].
    #[cfg(not(target_arch = "wasm32"))]
    pub fn submit_and_save_blocking(&self, sequence: SequenceId) -> Result<Snapshot, Error> {
        pollster::block_on(self.submit_and_save(sequence))
    }

    /// Adds a sequence with the content of a snapshot, by copies that are recorded into `encoder`. Upload buffers with all of the content exist until it has
    /// been executed.
    ///
    /// # Errors
    /// [`Error::SnapshotMismatch`] if it was saved with another configuration; [`Error::TooManySequences`], [`Error::CapacityExceeded`], [`Error::OutOfMemory`].
    /// Nothing has changed then.
    pub fn load(
        &mut self,
        encoder: &mut wgpu::CommandEncoder,
        snapshot: &Snapshot,
    ) -> Result<(SequenceId, Operation), Error> {
        snapshot.check(self.geometry())?;
        let (tokens, blocks) = (snapshot.tokens(), snapshot.blocks());
        let (sequence, applied) = self.with_room(|planner| planner.insert(tokens, blocks))?;
        match self.upload_snapshot(sequence, snapshot) {
            Ok(uploads) => {
                for (source, copies) in &uploads {
                    let mut at = 0;
                    for (target, offset, size) in copies {
                        encoder.copy_buffer_to_buffer(source, at, target, *offset, *size);
                        at += size;
                    }
                }
                Ok((sequence, self.planner.commit_applied(applied)))
            }
            Err(error) => {
                self.planner.abandon(applied);
                Err(error)
            }
        }
    }

    /// Buffers with the snapshot's words, and where these go: (buffer, offset, size) in bytes.
    #[allow(clippy::type_complexity)]
    fn upload_snapshot(
        &self,
        sequence: SequenceId,
        snapshot: &Snapshot,
    ) -> Result<Vec<(wgpu::Buffer, Vec<(&wgpu::Buffer, u64, u64)>)>, Error> {
        let view = self.planner.view(sequence)?;
        let mut uploads = Vec::new();
        for (layer, state) in (0..).zip(snapshot.layers()) {
            let (sinks, window) = (&state.sinks, &state.window);
            let words = [&sinks.keys, &sinks.values, &window.keys, &window.values, &state.blocks];
            let words: Vec<u32> = words.into_iter().flatten().copied().collect();
            let mut rest: &[u8] = bytemuck::cast_slice(&words);
            for copies in self.places(layer, &view)?.pieces() {
                let size: u64 = copies.iter().map(|(_, _, size)| size).sum();
                let (bytes, tail) = rest.split_at(size as usize);
                rest = tail;
                let usage = wgpu::BufferUsages::MAP_WRITE | wgpu::BufferUsages::COPY_SRC;
                let upload = mapped_buffer(&self.device, "kivi snapshot", size, usage)?;
                write_mapped(&upload, bytes)?;
                uploads.push((upload, copies));
            }
        }
        Ok(uploads)
    }
}
