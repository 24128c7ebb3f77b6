//! Save and load.

use super::buffers::{mapped_buffer, write_mapped};
use super::cache::KvCache;
use super::class::Class;
use crate::error::Error;
use crate::plan::{Operation, SequenceId, all_or_none, the_same};
use crate::snapshot::Snapshot;

impl KvCache {
    /// What every layer holds of a sequence. Submits copies and waits for them; work submitted before is
    /// seen.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::ForeignSequence`]; [`Error::OutOfMemory`] for the buffer that is
    /// read back; [`Error::Device`] if the device is lost.
    pub async fn submit_and_save(&self, sequence: SequenceId) -> Result<Snapshot, Error> {
        let mut layers = Vec::with_capacity(self.layers() as usize);
        for layer in 0..self.layers() {
            layers.push(self.submit_and_read_state(layer, sequence).await?);
        }
        Ok(Snapshot::new(&self.geometries(), layers))
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
        snapshot.check(&self.geometries())?;
        let insert = |class: &mut Class| {
            class.with_room(|planner| {
                let lengths = snapshot.lengths_of(planner.geometry());
                planner.insert(lengths)
            })
        };
        let undo = |class: &mut Class, (_, applied)| class.planner.abandon(applied);
        let inserted = all_or_none(&mut self.classes, insert, undo)?;
        let sequence = inserted[0].0;
        match self.upload_snapshot(sequence, snapshot) {
            Ok(uploads) => {
                for (source, copies) in &uploads {
                    let mut at = 0;
                    for (target, offset, size) in copies {
                        encoder.copy_buffer_to_buffer(source, at, target, *offset, *size);
                        at += size;
                    }
                }
                let commit =
                    |(class, (id, applied)): (&mut Class, _)| (id, class.planner.commit_applied(applied));
                Ok(the_same(self.classes.iter_mut().zip(inserted).map(commit).collect()))
            }
            Err(error) => {
                self.classes.iter_mut().zip(inserted).for_each(|(class, inserted)| undo(class, inserted));
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
        let views: Result<Vec<_>, Error> =
            self.classes.iter().map(|class| class.planner.view(sequence)).collect();
        let views = views?;
        let mut uploads = Vec::new();
        for (layer, state) in (0..).zip(snapshot.layers()) {
            let (class, index) = self.place(layer)?;
            let (sinks, window) = (&state.sinks, &state.window);
            let words = [&sinks.keys, &sinks.values, &window.keys, &window.values, &state.blocks];
            let words: Vec<u32> = words.into_iter().flatten().copied().collect();
            let mut rest: &[u8] = bytemuck::cast_slice(&words);
            for copies in self.classes[class].places(index, &views[class]).pieces() {
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
