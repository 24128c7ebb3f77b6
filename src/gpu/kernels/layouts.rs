//! Layouts of bind groups and of pipelines.

/// The kinds of bindings, in order of their numbers.
#[derive(Clone, Copy)]
enum Kind {
    /// The pass's parameters, at a dynamic offset of the plan.
    Params,
    Read,
    Write,
}

/// What a kernel binds: group 0 holds the cache's buffers, group 1 the host's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Bindings {
    /// Rings and staging are written; the host's keys and values are read.
    Append,
    /// Rings or rotated rows, and staging, are read; one buffer is written.
    Pack,
    /// Pages and unpacked tokens are read, partial results are written; the host's queries are read.
    Attend,
    /// Partial results are read; the host's output is written.
    Merge,
    /// One buffer is written; the host's queries are read.
    Rotate,
    /// One buffer is read and written.
    InPlace,
    /// One buffer is read, another is written.
    Across,
}

/// Layouts of group 0, which holds the cache's buffers.
#[derive(Debug)]
pub(crate) struct CacheLayouts {
    pub(crate) append: wgpu::BindGroupLayout,
    pub(crate) pack: wgpu::BindGroupLayout,
    pub(crate) attend: wgpu::BindGroupLayout,
    pub(crate) merge: wgpu::BindGroupLayout,
    /// One buffer that is read and written.
    pub(crate) in_place: wgpu::BindGroupLayout,
    /// One that is read and one that is written.
    pub(crate) across: wgpu::BindGroupLayout,
}

/// Layouts of group 1, which holds the host's buffers.
#[derive(Debug)]
pub(crate) struct HostLayouts {
    pub(crate) append: wgpu::BindGroupLayout,
    pub(crate) queries: wgpu::BindGroupLayout,
    pub(crate) output: wgpu::BindGroupLayout,
}

/// Layouts of groups and of pipelines: the same for all caches of a device.
#[derive(Debug)]
pub(crate) struct Layouts {
    pub(crate) cache: CacheLayouts,
    pub(crate) host: HostLayouts,
    append: wgpu::PipelineLayout,
    pack: wgpu::PipelineLayout,
    attend: wgpu::PipelineLayout,
    merge: wgpu::PipelineLayout,
    rotate: wgpu::PipelineLayout,
    in_place: wgpu::PipelineLayout,
    across: wgpu::PipelineLayout,
}

impl Layouts {
    pub(super) fn new(device: &wgpu::Device) -> Layouts {
        use Kind::{Params, Read, Write};
        let cache = CacheLayouts {
            append: layout(device, "kivi append", &[Params, Read, Write, Write]),
            pack: layout(device, "kivi pack", &[Params, Read, Read, Read, Write]),
            attend: layout(device, "kivi attend", &[Params, Read, Read, Read, Read, Write]),
            merge: layout(device, "kivi merge", &[Params, Read, Read]),
            in_place: layout(device, "kivi in place", &[Params, Read, Write]),
            across: layout(device, "kivi across", &[Params, Read, Read, Write]),
        };
        let host = HostLayouts {
            append: layout(device, "kivi keys and values", &[Read, Read, Read]),
            queries: layout(device, "kivi queries", &[Read, Read, Read]),
            output: layout(device, "kivi output", &[Read, Write, Read, Write]),
        };
        let pipeline_layout = |groups: &[&wgpu::BindGroupLayout]| {
            let groups: Vec<_> = groups.iter().map(|g| Some(*g)).collect();
            device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
                label: Some("kivi"),
                bind_group_layouts: &groups,
                immediate_size: 0,
            })
        };
        Layouts {
            append: pipeline_layout(&[&cache.append, &host.append]),
            pack: pipeline_layout(&[&cache.pack]),
            attend: pipeline_layout(&[&cache.attend, &host.queries]),
            merge: pipeline_layout(&[&cache.merge, &host.output]),
            rotate: pipeline_layout(&[&cache.in_place, &host.queries]),
            in_place: pipeline_layout(&[&cache.in_place]),
            across: pipeline_layout(&[&cache.across]),
            cache,
            host,
        }
    }

    /// Of a kernel with these bindings.
    pub(super) fn pipeline(&self, bindings: Bindings) -> &wgpu::PipelineLayout {
        match bindings {
            Bindings::Append => &self.append,
            Bindings::Pack => &self.pack,
            Bindings::Attend => &self.attend,
            Bindings::Merge => &self.merge,
            Bindings::Rotate => &self.rotate,
            Bindings::InPlace => &self.in_place,
            Bindings::Across => &self.across,
        }
    }
}

fn layout(device: &wgpu::Device, label: &str, kinds: &[Kind]) -> wgpu::BindGroupLayout {
    let entries: Vec<_> = kinds
        .iter()
        .zip(0..)
        .map(|(kind, binding)| {
            let (ty, has_dynamic_offset) = match kind {
                Kind::Params => (wgpu::BufferBindingType::Uniform, true),
                Kind::Read => (wgpu::BufferBindingType::Storage { read_only: true }, false),
                Kind::Write => (wgpu::BufferBindingType::Storage { read_only: false }, false),
            };
            wgpu::BindGroupLayoutEntry {
                binding,
                visibility: wgpu::ShaderStages::COMPUTE,
                ty: wgpu::BindingType::Buffer { ty, has_dynamic_offset, min_binding_size: None },
                count: None,
            }
        })
        .collect();
    device
        .create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor { label: Some(label), entries: &entries })
}
