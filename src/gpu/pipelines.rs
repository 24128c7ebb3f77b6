//! Bind group layouts and compute pipelines.

use super::shaders::Pass;
use super::variant::Variant;
use crate::error::Error;
use crate::geometry::Geometry;
use std::collections::HashMap;
use std::sync::Arc;

/// The kinds of bindings, in order of their numbers.
#[derive(Clone, Copy)]
enum Kind {
    /// The pass's parameters, at a dynamic offset of the plan.
    Params,
    Read,
    Write,
}

/// Layouts of group 0, which holds the cache's buffers.
#[derive(Debug)]
pub(super) struct CacheLayouts {
    pub(super) append: wgpu::BindGroupLayout,
    pub(super) pack: wgpu::BindGroupLayout,
    pub(super) attend: wgpu::BindGroupLayout,
    pub(super) merge: wgpu::BindGroupLayout,
    /// One buffer that is read and written.
    pub(super) in_place: wgpu::BindGroupLayout,
    /// One that is read and one that is written.
    pub(super) across: wgpu::BindGroupLayout,
}

/// Layouts of group 1, which holds the host's buffers.
#[derive(Debug)]
pub(super) struct HostLayouts {
    pub(super) append: wgpu::BindGroupLayout,
    pub(super) queries: wgpu::BindGroupLayout,
    pub(super) output: wgpu::BindGroupLayout,
}

/// Layouts of groups and of pipelines. All classes of layers share them.
#[derive(Debug)]
pub(super) struct Layouts {
    pub(super) cache: CacheLayouts,
    pub(super) host: HostLayouts,
    append: wgpu::PipelineLayout,
    pack: wgpu::PipelineLayout,
    attend: wgpu::PipelineLayout,
    merge: wgpu::PipelineLayout,
    rotate: wgpu::PipelineLayout,
    in_place: wgpu::PipelineLayout,
    across: wgpu::PipelineLayout,
}

/// The pipelines of a class of layers, as far as they have been needed.
#[derive(Debug)]
pub(super) struct Pipelines {
    pub(super) layouts: Arc<Layouts>,
    variant: Variant,
    built: HashMap<Pass, wgpu::ComputePipeline>,
}

impl Layouts {
    pub(super) fn new(device: &wgpu::Device) -> Layouts {
        use Kind::{Params, Read, Write};
        let cache = CacheLayouts {
            append: layout(device, "kivi append", &[Params, Read, Write, Write]),
            pack: layout(device, "kivi pack", &[Params, Read, Read, Read, Write]),
            attend: layout(device, "kivi attend", &[Params, Read, Read, Read, Write]),
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
}

impl Pipelines {
    pub(super) fn new(layouts: Arc<Layouts>, variant: Variant) -> Pipelines {
        Pipelines { layouts, variant, built: HashMap::new() }
    }

    pub(super) fn variant(&self) -> Variant {
        self.variant
    }

    pub(super) fn get(&self, pass: Pass) -> Option<&wgpu::ComputePipeline> {
        self.built.get(&pass)
    }

    /// Builds `pass` if that has not been done.
    pub(super) fn ensure(
        &mut self,
        device: &wgpu::Device,
        g: &Geometry,
        pass: Pass,
        pipeline_cache: Option<&wgpu::PipelineCache>,
    ) -> Result<(), Error> {
        if !self.built.contains_key(&pass) {
            let text = pass.source(g, self.variant).target_text();
            let pipeline = self.build(device, pass, text, pipeline_cache)?;
            log::debug!("built {pass:?}");
            self.built.insert(pass, pipeline);
        }
        Ok(())
    }

    /// Runs `edit` over the text of a pass, for tests of what happens where a kernel is wrong.
    #[cfg(test)]
    pub(super) fn break_pass(
        &mut self,
        device: &wgpu::Device,
        g: &Geometry,
        pass: Pass,
        edit: impl Fn(&str) -> String,
    ) {
        let text = edit(&pass.source(g, self.variant).target_text());
        let pipeline = self.build(device, pass, text, None).unwrap();
        self.built.insert(pass, pipeline);
    }

    fn build(
        &self,
        device: &wgpu::Device,
        pass: Pass,
        text: String,
        pipeline_cache: Option<&wgpu::PipelineCache>,
    ) -> Result<wgpu::ComputePipeline, Error> {
        let layouts = &self.layouts;
        let layout = match pass {
            Pass::Append => &layouts.append,
            Pass::Pack(_) | Pass::RotateRows(_) => &layouts.pack,
            Pass::RotateQueries => &layouts.rotate,
            Pass::AttendHistory(_) | Pass::AttendWindow(_) | Pass::FoldHistory | Pass::FoldWindow => {
                &layouts.attend
            }
            Pass::Merge(_) => &layouts.merge,
            Pass::CopyTokens | Pass::CopyBlocks => &layouts.in_place,
            Pass::CopyBlocksAcross | Pass::Unpack | Pass::UnpackRotated(_) => &layouts.across,
        };
        let scopes =
            [wgpu::ErrorFilter::Internal, wgpu::ErrorFilter::OutOfMemory, wgpu::ErrorFilter::Validation]
                .map(|filter| device.push_error_scope(filter));
        let module = device.create_shader_module(wgpu::ShaderModuleDescriptor {
            label: Some(pass.entry_point()),
            source: wgpu::ShaderSource::Wgsl(text.into()),
        });
        let pipeline = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: Some(pass.entry_point()),
            layout: Some(layout),
            module: &module,
            entry_point: Some(pass.entry_point()),
            compilation_options: wgpu::PipelineCompilationOptions {
                // Every word of workgroup memory is written before it is read; zeroing is a serial loop on Metal and DX12.
                zero_initialize_workgroup_memory: false,
                ..Default::default()
            },
            cache: pipeline_cache,
        });
        // The last scope pushed is the first to be popped.
        let errors = scopes.into_iter().rev().filter_map(|scope| now_or_never(scope.pop()).flatten());
        if let Some(error) = errors.last() {
            return Err(Error::Device(format!("{}: {error}", pass.entry_point())));
        }
        Ok(pipeline)
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

/// The result of a future that needs no waiting, as error scopes on native do. `None` in browsers, where the answer comes later.
pub(super) fn now_or_never<T>(future: impl Future<Output = T>) -> Option<T> {
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    match std::pin::pin!(future).poll(&mut context) {
        std::task::Poll::Ready(value) => Some(value),
        std::task::Poll::Pending => None,
    }
}
