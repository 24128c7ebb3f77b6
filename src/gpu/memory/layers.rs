//! The buffers of a cache, and the bind groups of group 0 that read and write them.

use crate::gpu::kernels::{CacheLayouts, Layouts};
use crate::gpu::params::PassParams;
use std::collections::HashMap;

/// Buffers that all layers share.
#[derive(Debug)]
pub(in crate::gpu) struct Shared {
    /// The work of the operation at hand.
    pub(in crate::gpu) plan: wgpu::Buffer,
    /// New tokens of a step that is longer than a ring.
    pub(in crate::gpu) staging: wgpu::Buffer,
    /// Partial results of attention.
    pub(in crate::gpu) scratch: wgpu::Buffer,
    pub(in crate::gpu) merge: wgpu::BindGroup,
    /// If something is rotated before a kernel reads it.
    pub(in crate::gpu) rotated: Option<Rotated>,
}

/// Rotated queries, or rows that are about to be packed.
#[derive(Debug)]
pub(in crate::gpu) struct Rotated {
    pub(in crate::gpu) buffer: wgpu::Buffer,
    /// The layout of queries in it, as of a host's.
    io: wgpu::Buffer,
    /// To write it.
    pub(in crate::gpu) target: wgpu::BindGroup,
    /// To read it, in the place of the host's queries.
    pub(in crate::gpu) queries: wgpu::BindGroup,
}

impl Rotated {
    /// In `buffer`, whose queries `io` describes.
    pub(in crate::gpu) fn new(
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
    pub(in crate::gpu) fn buffers(&self) -> (wgpu::Buffer, wgpu::Buffer) {
        (self.buffer.clone(), self.io.clone())
    }
}

impl Shared {
    pub(in crate::gpu) fn new(
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
pub(in crate::gpu) struct Slab {
    pub(in crate::gpu) buffer: wgpu::Buffer,
    /// To attend to it, and to unpacked tokens.
    pub(in crate::gpu) attend: wgpu::BindGroup,
    pub(in crate::gpu) pack: wgpu::BindGroup,
    /// From rows that were rotated apart.
    pub(in crate::gpu) pack_rotated: Option<wgpu::BindGroup>,
    pub(in crate::gpu) unpack: wgpu::BindGroup,
    pub(in crate::gpu) copy: wgpu::BindGroup,
}

/// Buffers of one layer.
#[derive(Debug)]
pub(in crate::gpu) struct LayerBuffers {
    pub(in crate::gpu) ring: wgpu::Buffer,
    /// `None` where a slab has been given back.
    pub(in crate::gpu) slabs: Vec<Option<Slab>>,
    pub(in crate::gpu) append: wgpu::BindGroup,
    /// To attend to unpacked tokens alone: the ring is in the place of a slab.
    pub(in crate::gpu) unpacked: wgpu::BindGroup,
    pub(in crate::gpu) copy_tokens: wgpu::BindGroup,
    /// To rotate rows that are about to be packed.
    pub(in crate::gpu) rotate: Option<wgpu::BindGroup>,
    /// By slab that is read and slab that is written.
    across: HashMap<(usize, usize), wgpu::BindGroup>,
}

impl LayerBuffers {
    pub(in crate::gpu) fn new(
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
            unpacked: bind(&layouts.attend, &[&ring, &ring, staging, scratch]),
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
    pub(in crate::gpu) fn rebound(
        self,
        device: &wgpu::Device,
        layouts: &CacheLayouts,
        shared: &Shared,
    ) -> LayerBuffers {
        let slabs = self.slabs.into_iter().map(|slab| slab.map(|slab| slab.buffer)).collect();
        LayerBuffers::new(device, layouts, shared, self.ring, slabs)
    }

    /// Puts a slab in a place that is empty or the next.
    pub(in crate::gpu) fn add_slab(
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
            attend: bind(&layouts.attend, &[&buffer, &self.ring, staging, scratch]),
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

    pub(in crate::gpu) fn remove_slab(&mut self, at: usize) {
        self.slabs[at] = None;
        self.across.retain(|(from, to), _| *from != at && *to != at);
    }

    /// Forgets the bind groups between pairs of slabs once there are many. Those that are recorded live on.
    pub(in crate::gpu) fn bound_across(&mut self) {
        if self.across.len() >= 64 {
            self.across.clear();
        }
    }

    /// Makes sure that blocks can be copied from one slab to another.
    pub(in crate::gpu) fn ensure_across(
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

    pub(in crate::gpu) fn slab(&self, at: usize) -> Option<&Slab> {
        self.slabs.get(at)?.as_ref()
    }

    pub(in crate::gpu) fn across(&self, from: usize, to: usize) -> Option<&wgpu::BindGroup> {
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
