//! Where a step's time goes, by timestamps at the boundaries of its compute passes.

use crate::gpu::{Gpu, Reading};
use anyhow::{Result, bail};
use kivi_wgpu::wgpu;

/// A part of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// Everything in the layers but the cache.
    Model,
    /// The cache: append, attend, pack.
    Cache,
    /// The last norm and the logits.
    Head,
}

impl Part {
    pub const ALL: [Part; 3] = [Part::Model, Part::Cache, Part::Head];
}

/// Timestamps of one step. It takes a compute pass per part instead of one for all, which costs some time
/// itself.
pub struct Profile {
    set: wgpu::QuerySet,
    resolved: wgpu::Buffer,
    period: f64,
    parts: Vec<Part>,
}

impl Profile {
    /// For steps of a model with so many layers.
    pub fn new(gpu: &Gpu, layers: u32) -> Result<Profile> {
        if !gpu.device.features().contains(wgpu::Features::TIMESTAMP_QUERY) {
            bail!("{} has no timestamps", gpu.info.name);
        }
        let count = 2 * (2 * layers + 2);
        Ok(Profile {
            set: gpu.device.create_query_set(&wgpu::QuerySetDescriptor {
                label: Some("parts of a step"),
                ty: wgpu::QueryType::Timestamp,
                count,
            }),
            resolved: gpu.device.create_buffer(&wgpu::BufferDescriptor {
                label: Some("timestamps"),
                size: u64::from(count) * 8,
                usage: wgpu::BufferUsages::QUERY_RESOLVE | wgpu::BufferUsages::COPY_SRC,
                mapped_at_creation: false,
            }),
            period: gpu.queue.get_timestamp_period().into(),
            parts: Vec::new(),
        })
    }

    /// Submits the encoder of the step that this was given to.
    pub fn submit(&self, gpu: &Gpu, mut encoder: wgpu::CommandEncoder) -> Reading<u64> {
        let count = 2 * self.parts.len() as u32;
        encoder.resolve_query_set(&self.set, 0..count, &self.resolved, 0);
        gpu.submit_and_read(encoder, &self.resolved, 0..u64::from(count) * 8)
    }

    /// Waits for what [`Self::submit`] has returned: the milliseconds of each part, in the order of
    /// [`Part::ALL`].
    pub fn times(&mut self, gpu: &Gpu, ticks: Reading<u64>) -> Result<[f64; 3]> {
        let ticks = ticks.wait(gpu)?;
        let mut times = [0.0; 3];
        for (part, ends) in self.parts.drain(..).zip(ticks.chunks_exact(2)) {
            let spent = ends[1].saturating_sub(ends[0]) as f64 * self.period / 1e6;
            times[part as usize] += spent;
        }
        Ok(times)
    }
}

/// The compute passes of a step: one for all of it, or one per part in turn if it is profiled.
pub struct Segments<'a> {
    encoder: &'a mut wgpu::CommandEncoder,
    profile: Option<&'a mut Profile>,
    current: Option<(Part, wgpu::ComputePass<'static>)>,
}

impl<'a> Segments<'a> {
    pub fn new(encoder: &'a mut wgpu::CommandEncoder, profile: Option<&'a mut Profile>) -> Segments<'a> {
        if let Some(profile) = &profile {
            debug_assert!(profile.parts.is_empty());
        }
        Segments { encoder, profile, current: None }
    }

    /// Where to record what belongs to `part`.
    pub fn pass(&mut self, part: Part) -> &mut wgpu::ComputePass<'static> {
        let stays = self.current.as_ref().is_some_and(|(now, _)| self.profile.is_none() || *now == part);
        if !stays {
            // One pass at a time: this ends the one before.
            self.current = None;
        }
        let (encoder, profile) = (&mut *self.encoder, self.profile.as_deref_mut());
        let begin = || {
            let timestamp_writes = profile.map(|profile| {
                let at = 2 * profile.parts.len() as u32;
                profile.parts.push(part);
                wgpu::ComputePassTimestampWrites {
                    query_set: &profile.set,
                    beginning_of_pass_write_index: Some(at),
                    end_of_pass_write_index: Some(at + 1),
                }
            });
            let descriptor = wgpu::ComputePassDescriptor { label: Some("model"), timestamp_writes };
            (part, encoder.begin_compute_pass(&descriptor).forget_lifetime())
        };
        &mut self.current.get_or_insert_with(begin).1
    }
}
