//! How the pool of pages grows.

use super::buffers::{buffer_now, scoped};
use super::cache::KvCache;
use super::class::Class;
use super::kernels::check_limits;
use super::layers::{Rotated, Shared};
use crate::error::Error;
use crate::format::PAGE_TOKENS;
use crate::plan::{Growth, Planner};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

impl KvCache {
    /// Makes room for `tokens` packed tokens besides those that the cache holds, and for a page of each sequence that is not full, so that no step up to
    /// there allocates.
    ///
    /// # Errors
    /// [`Error::CapacityExceeded`] if `max_capacity` forbids it, [`Error::OutOfMemory`], [`Error::LimitTooLow`]. A class of layers that has grown before another fails stays so.
    pub fn reserve(&mut self, tokens: u32) -> Result<(), Error> {
        let reserve = |class: &mut Class| {
            let g = class.geometry();
            let mut pages = tokens.div_ceil(PAGE_TOKENS) + g.max_sequences;
            if g.history_limit.is_some() {
                // However many tokens there are, most of them will be gone.
                pages = pages.min(class.planner.available_pages());
            }
            class.make_room(pages, true)
        };
        self.classes.iter_mut().try_for_each(reserve)
    }
}

impl Class {
    /// What `plan` returns, after the pool has grown if it must.
    pub(super) fn with_room<T>(
        &mut self,
        mut plan: impl FnMut(&mut Planner) -> Result<T, Error>,
    ) -> Result<T, Error> {
        match plan(&mut self.planner) {
            Err(Error::CapacityExceeded { needed, available, .. }) if needed <= available => {
                // Where the usual growth fails, less may still fit.
                self.make_room(needed, false).or_else(|_| self.make_room(needed, true))?;
                plan(&mut self.planner)
            }
            other => other,
        }
    }

    /// Adds slabs until `pages` pages are free.
    fn make_room(&mut self, pages: u32, exactly: bool) -> Result<(), Error> {
        match self.planner.growth(pages, exactly)? {
            Some(growth) => self.grow(growth),
            None => Ok(()),
        }
    }

    /// Makes what a growth needs: all of it, or nothing.
    pub(super) fn grow(&mut self, growth: Growth) -> Result<(), Error> {
        let Growth { geometry: g, slabs } = &growth;
        check_limits(g, &self.device.limits())?;
        let mut new = Vec::with_capacity(self.layers.len());
        for _ in &self.layers {
            let buffers: Result<Vec<_>, Error> =
                slabs.iter().map(|slab| self.storage("kivi slab", g.slab_bytes(*slab))).collect();
            new.push(buffers?);
        }
        let larger = |old: &wgpu::Buffer, what, size| {
            if size > old.size() { self.storage(what, size).map(Some) } else { Ok(None) }
        };
        let plan = larger(&self.shared.plan, "kivi plan", g.plan_bytes())?;
        let scratch = larger(&self.shared.scratch, "kivi scratch", g.scratch_bytes())?;
        if plan.is_some() {
            self.uploads.grow(&self.device, g.plan_bytes())?;
        }

        // From here on nothing fails but a device that is lost.
        log::debug!("the pool grows to {} pages in {} slabs per layer", g.pages(), g.slabs());
        let device = self.device.clone();
        scoped(&device, || {
            let layouts = self.kernels.store.layouts();
            if plan.is_some() || scratch.is_some() {
                let plan = plan.unwrap_or_else(|| self.shared.plan.clone());
                let scratch = scratch.unwrap_or_else(|| self.shared.scratch.clone());
                let staging = self.shared.staging.clone();
                let rotated = self.shared.rotated.as_ref().map(Rotated::buffers);
                self.shared = Shared::new(&device, layouts, plan, staging, scratch, rotated);
                let old = std::mem::take(&mut self.layers);
                self.layers =
                    old.into_iter().map(|l| l.rebound(&device, &layouts.cache, &self.shared)).collect();
            }
            for (layer, buffers) in self.layers.iter_mut().zip(new) {
                for (&slab, buffer) in slabs.iter().zip(buffers) {
                    layer.add_slab(&device, &layouts.cache, &self.shared, slab as usize, buffer);
                }
            }
        })?;
        self.planner.grow(growth);
        Ok(())
    }

    /// A storage buffer. In browsers a failure shows only when it is used.
    fn storage(&self, what: &'static str, size: u64) -> Result<wgpu::Buffer, Error> {
        let count_down = |n: &AtomicU64| n.fetch_update(Relaxed, Relaxed, |n| n.checked_sub(1)).is_ok();
        let (after, failures) = &*self.failing;
        if !count_down(after) && count_down(failures) {
            return Err(Error::OutOfMemory { what, bytes: size });
        }
        let mut usage =
            wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST;
        if what == "kivi plan" {
            usage |= wgpu::BufferUsages::UNIFORM;
        }
        buffer_now(&self.device, what, size, usage)
    }
}
