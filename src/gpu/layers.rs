//! The buffers of a cache, and the bind groups of group 0 that read and write them.

use super::kernels::{CacheLayouts, Layouts};
use super::work::PassParams;
use std::collections::HashMap;

/// Buffers that all layers share.
#[derive(Debug)]
pub(super) struct Shared {
    /// The work of the operation at hand.
    pub(super) plan: wgpu::Buffer,
    /// New tokens of a step that is longer than a ring.
    pub(super) staging: wgpu::Buffer,
    /// Partial results of attention.
    pub(super) scratch: wgpu::Buffer,
    pub(super) merge: wgpu::BindGroup,
    /// If something is rotated before a kernel reads it.
    pub(super) rotated: Option<Rotated>,
}

/// Rotated queries, or rows that are about to be packed.
#[derive(Debug)]
pub(super) struct Rotated {
    pub(super) buffer: wgpu::Buffer,
    /// The layout of queries in it, as of a host's.
    io: wgpu::Buffer,
    /// To write it.
    pub(super) target: wgpu::BindGroup,
    /// To read it, in the place of the host's queries.
    pub(super) queries: wgpu::BindGroup,
}

impl Rotated {
    /// In `buffer`, whose queries `io` describes.
    pub(super) fn new(
        device: &wgpu::Device,
        layouts: &Layouts,
        plan: &wgpu::Buffer,
        (buffer, io): (wgpu::Buffer, wgpu::Buffer),
    ) -> Rotated {
        Rotated {
            target: bind_group(device, &layouts.cache.in_place, plan, &[&buffer]),
            queries: device.create_bind_group(&wgpu::BindGroupDescriptor {
                label: Some("kivi rotated queries"),
                layout: &layouts.host.queries,
                entries: &[
                    wgpu::BindGroupEntry { binding: 0, resource: io.as_entire_binding() },
                    wgpu::BindGroupEntry { binding: 1, resource: buffer.as_entire_binding() },
                    wgpu::BindGroupEntry { binding: 2, resource: buffer.as_entire_binding() },
                ],
            }),
            buffer,
            io,
        }
    }

    /// The buffers.
    pub(super) fn buffers(&self) -> (wgpu::Buffer, wgpu::Buffer) {
        (self.buffer.clone(), self.io.clone())
    }
}

impl Shared {
    pub(super) fn new(
        device: &wgpu::Device,
        layouts: &Layouts,
        plan: wgpu::Buffer,
        staging: wgpu::Buffer,
        scratch: wgpu::Buffer,
        rotated: Option<(wgpu::Buffer, wgpu::Buffer)>,
    ) -> Shared {
        let merge = bind_group(device, &layouts.cache.merge, &plan, &[&scratch]);
        let rotated = rotated.map(|buffers| Rotated::new(device, layouts, &plan, buffers));
        Shared { plan, staging, scratch, merge, rotated }
    }
}

/// One slab of one layer.
#[derive(Debug)]
pub(super) struct Slab {
    pub(super) buffer: wgpu::Buffer,
    pub(super) history: wgpu::BindGroup,
    pub(super) pack: wgpu::BindGroup,
    /// From rows that were rotated apart.
    pub(super) pack_rotated: Option<wgpu::BindGroup>,
    pub(super) unpack: wgpu::BindGroup,
    pub(super) copy: wgpu::BindGroup,
}

/// Buffers of one layer.
#[derive(Debug)]
pub(super) struct LayerBuffers {
    pub(super) ring: wgpu::Buffer,
    /// `None` where a slab has been given back.
    pub(super) slabs: Vec<Option<Slab>>,
    pub(super) append: wgpu::BindGroup,
    pub(super) window: wgpu::BindGroup,
    pub(super) copy_tokens: wgpu::BindGroup,
    /// To rotate rows that are about to be packed.
    pub(super) rotate: Option<wgpu::BindGroup>,
    /// By slab that is read and slab that is written.
    across: HashMap<(usize, usize), wgpu::BindGroup>,
}

impl LayerBuffers {
    pub(super) fn new(
        device: &wgpu::Device,
        layouts: &CacheLayouts,
        shared: &Shared,
        ring: wgpu::Buffer,
        slabs: Vec<Option<wgpu::Buffer>>,
    ) -> LayerBuffers {
        let Shared { plan, staging, scratch, .. } = shared;
        let bind = |layout, buffers: &[&wgpu::Buffer]| bind_group(device, layout, plan, buffers);
        let mut layer = LayerBuffers {
            append: bind(&layouts.append, &[&ring, staging]),
            window: bind(&layouts.attend, &[&ring, staging, scratch]),
            copy_tokens: bind(&layouts.in_place, &[&ring]),
            rotate: shared
                .rotated
                .as_ref()
                .map(|rotated| bind(&layouts.pack, &[&ring, staging, &rotated.buffer])),
            ring,
            slabs: Vec::with_capacity(slabs.len()),
            across: HashMap::new(),
        };
        for (at, buffer) in slabs.into_iter().enumerate() {
            match buffer {
                Some(buffer) => layer.add_slab(device, layouts, shared, at, buffer),
                None => layer.slabs.push(None),
            }
        }
        layer
    }

    /// The same buffers after the shared ones have changed.
    pub(super) fn rebound(
        self,
        device: &wgpu::Device,
        layouts: &CacheLayouts,
        shared: &Shared,
    ) -> LayerBuffers {
        let slabs = self.slabs.into_iter().map(|slab| slab.map(|slab| slab.buffer)).collect();
        LayerBuffers::new(device, layouts, shared, self.ring, slabs)
    }

    /// Puts a slab in a place that is empty or the next.
    pub(super) fn add_slab(
        &mut self,
        device: &wgpu::Device,
        layouts: &CacheLayouts,
        shared: &Shared,
        at: usize,
        buffer: wgpu::Buffer,
    ) {
        let Shared { plan, staging, scratch, .. } = shared;
        let bind = |layout, buffers: &[&wgpu::Buffer]| bind_group(device, layout, plan, buffers);
        let slab = Slab {
            history: bind(&layouts.attend, &[&buffer, &buffer, scratch]),
            pack: bind(&layouts.pack, &[&self.ring, staging, &buffer]),
            pack_rotated: shared
                .rotated
                .as_ref()
                .map(|rotated| bind(&layouts.pack, &[&rotated.buffer, staging, &buffer])),
            unpack: bind(&layouts.across, &[&buffer, &self.ring]),
            copy: bind(&layouts.in_place, &[&buffer]),
            buffer,
        };
        match self.slabs.get_mut(at) {
            Some(place) => *place = Some(slab),
            None => self.slabs.push(Some(slab)),
        }
    }

    pub(super) fn remove_slab(&mut self, at: usize) {
        self.slabs[at] = None;
        self.across.retain(|(from, to), _| *from != at && *to != at);
    }

    /// Forgets the bind groups between pairs of slabs once there are many. Those that are recorded live on.
    pub(super) fn bound_across(&mut self) {
        if self.across.len() >= 64 {
            self.across.clear();
        }
    }

    /// Makes sure that blocks can be copied from one slab to another.
    pub(super) fn ensure_across(
        &mut self,
        device: &wgpu::Device,
        layouts: &CacheLayouts,
        shared: &Shared,
        from: usize,
        to: usize,
    ) {
        if let (Some(Some(source)), Some(Some(target))) = (self.slabs.get(from), self.slabs.get(to)) {
            self.across.entry((from, to)).or_insert_with(|| {
                bind_group(device, &layouts.across, &shared.plan, &[&source.buffer, &target.buffer])
            });
        }
    }

    pub(super) fn slab(&self, at: usize) -> Option<&Slab> {
        self.slabs.get(at)?.as_ref()
    }

    pub(super) fn across(&self, from: usize, to: usize) -> Option<&wgpu::BindGroup> {
        self.across.get(&(from, to))
    }
}

/// Group 0 of a pass: parameters at a dynamic offset, the plan, then `buffers`.
fn bind_group(
    device: &wgpu::Device,
    layout: &wgpu::BindGroupLayout,
    plan: &wgpu::Buffer,
    buffers: &[&wgpu::Buffer],
) -> wgpu::BindGroup {
    let params = wgpu::BufferBinding {
        buffer: plan,
        offset: 0,
        size: wgpu::BufferSize::new(size_of::<PassParams>() as u64),
    };
    let mut entries = vec![
        wgpu::BindGroupEntry { binding: 0, resource: wgpu::BindingResource::Buffer(params) },
        wgpu::BindGroupEntry { binding: 1, resource: plan.as_entire_binding() },
    ];
    for (buffer, binding) in buffers.iter().zip(2..) {
        entries.push(wgpu::BindGroupEntry { binding, resource: buffer.as_entire_binding() });
    }
    device.create_bind_group(&wgpu::BindGroupDescriptor {
        label: Some("kivi cache"),
        layout,
        entries: &entries,
    })
}
