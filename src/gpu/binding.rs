//! The host's tensors, checked and bound to a cache.

use super::device::{filled_buffer, now_or_never};
use super::executor::{Gpu, HostGroups};
use super::io::{LayerIo, TensorView};
use super::params::{IoParams, ViewParams};
use crate::error::Error;
use crate::format::Dtype;
use crate::ids::CacheId;
use crate::shape::Shape;
use std::sync::atomic::{AtomicU64, Ordering};

/// What a tensor is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    Keys,
    Values,
    Queries,
    Output,
    SinkLogits,
    Lse,
}

impl Role {
    fn name(self) -> &'static str {
        match self {
            Role::Keys => "k",
            Role::Values => "v",
            Role::Queries => "q",
            Role::Output => "out",
            Role::SinkLogits => "sink_logits",
            Role::Lse => "lse",
        }
    }

    fn heads(self, s: &Shape) -> u32 {
        match self {
            Role::Keys | Role::Values => s.layout.kv_heads,
            _ => s.query_heads,
        }
    }

    /// Contiguous elements of one head.
    fn row(self, s: &Shape) -> u32 {
        match self {
            Role::SinkLogits | Role::Lse => 1,
            _ => s.layout.head_dim,
        }
    }

    fn is_written(self) -> bool {
        matches!(self, Role::Output | Role::Lse)
    }

    /// Tensors of the merge pass. wgpu tracks usage per buffer, and one pass may not both read and write a
    /// buffer.
    fn is_merged(self) -> bool {
        matches!(self, Role::Output | Role::SinkLogits | Role::Lse)
    }
}

/// A checked view. It compares buffers but holds none: bind groups do, and the host drops those.
#[derive(Debug, Clone)]
struct Checked {
    role: Role,
    dtype: Dtype,
    heads: u64,
    /// Contiguous elements of one head.
    row: u64,
    /// In elements.
    offset: u64,
    token_stride: u64,
    head_stride: u64,
    /// Bytes of the buffer that the binding reaches.
    reach: u64,
    /// Bytes before the binding.
    binding_offset: u64,
    /// Equal for equal buffers, within one binding.
    buffer: usize,
}

impl Checked {
    fn new(gpu: &Gpu, role: Role, view: &TensorView<'_>, buffer: usize) -> Result<Checked, Error> {
        let s = gpu.shape.first();
        let (name, heads, row) = (role.name(), role.heads(s), role.row(s));
        if !view.buffer.usage().contains(wgpu::BufferUsages::STORAGE) {
            return Err(Error::BufferUsage { tensor: name, usage: "STORAGE" });
        }
        let token_stride = view.token_stride.unwrap_or(heads * row);
        let head_stride = view.head_stride.unwrap_or(row);
        let wrong =
            |field, got, rule| Err(Error::Stride { tensor: name, field, got, rule, dtype: view.dtype });
        if view.offset > view.buffer.size() {
            return Err(Error::BufferTooSmall { tensor: name, needed: view.offset, got: view.buffer.size() });
        }
        if !view.offset.is_multiple_of(4) {
            return wrong("offset", view.offset, "a multiple of 4 bytes");
        }
        for (field, stride) in [("token_stride", token_stride), ("head_stride", head_stride)] {
            if stride < row {
                return wrong(field, stride.into(), "the row length (head_dim) or more");
            }
            if view.dtype != Dtype::F32 && row > 1 && stride % 2 == 1 {
                return wrong(field, stride.into(), "even for 16-bit types");
            }
        }
        if role == Role::Lse && view.dtype != Dtype::F32 {
            return wrong("dtype", view.dtype.index().into(), "F32 only");
        }
        let limits = gpu.device().limits();
        let alignment = u64::from(limits.min_storage_buffer_offset_alignment);
        let binding_offset = view.offset / alignment * alignment;
        let reach = view.buffer.size().min(binding_offset + limits.max_storage_buffer_binding_size) & !3;
        let checked = Checked {
            role,
            dtype: view.dtype,
            heads: heads.into(),
            row: row.into(),
            offset: view.offset / u64::from(view.dtype.bytes()),
            token_stride: token_stride.into(),
            head_stride: head_stride.into(),
            reach,
            binding_offset,
            buffer,
        };
        checked.check_size(1)?;
        Ok(checked)
    }

    /// Bytes from the start of the buffer to the end of the last element of `tokens` tokens.
    fn end(&self, tokens: u64) -> u64 {
        let last = self.offset + (tokens - 1) * self.token_stride + (self.heads - 1) * self.head_stride;
        (last + self.row) * u64::from(self.dtype.bytes())
    }

    fn check_size(&self, tokens: u64) -> Result<(), Error> {
        if tokens > 0 && self.end(tokens) > self.reach {
            return Err(Error::BufferTooSmall {
                tensor: self.role.name(),
                needed: self.end(tokens),
                got: self.reach,
            });
        }
        Ok(())
    }

    fn params(&self) -> ViewParams {
        ViewParams {
            offset: (self.offset - self.binding_offset / u64::from(self.dtype.bytes())) as u32,
            token_stride: self.token_stride as u32,
            head_stride: self.head_stride as u32,
            dtype: self.dtype.index(),
        }
    }

    /// Tokens of this tensor in a step.
    fn rows_of(&self, tokens: u64, queries: u64) -> u64 {
        match self.role {
            Role::Keys | Role::Values => tokens,
            Role::Queries | Role::Output | Role::Lse => queries,
            Role::SinkLogits => 1,
        }
    }

    /// Whether all heads of a token lie before the next token.
    fn is_nested(&self) -> bool {
        (self.heads - 1) * self.head_stride + self.row <= self.token_stride
    }

    /// Whether the first and last bytes alone leave room for an overlap.
    fn may_meet(&self, rows: u64, other: &Checked, other_rows: u64) -> bool {
        let start = |c: &Checked| c.offset * u64::from(c.dtype.bytes());
        rows > 0 && other_rows > 0 && start(self) < other.end(other_rows) && start(other) < self.end(rows)
    }

    /// Byte ranges of the rows of `tokens` tokens.
    fn rows(&self, tokens: u64) -> impl Iterator<Item = (u64, u64)> {
        let bytes = u64::from(self.dtype.bytes());
        let (offset, head_stride, token_stride) = (self.offset, self.head_stride, self.token_stride);
        let (heads, length) = (self.heads, self.row * bytes);
        (0..tokens).flat_map(move |t| {
            (0..heads).map(move |h| {
                let start = (offset + t * token_stride + h * head_stride) * bytes;
                (start, start + length)
            })
        })
    }
}

/// Whether a range of `a` shares a byte with a range of `b`.
fn sets_overlap(a: Vec<(u64, u64)>, b: Vec<(u64, u64)>) -> bool {
    let mut ranges: Vec<_> = a.into_iter().map(|r| (r, 0)).chain(b.into_iter().map(|r| (r, 1))).collect();
    ranges.sort_unstable();
    // The end of each side's furthest range so far.
    let mut end = [0, 0];
    ranges.into_iter().any(|((start, stop), side): ((u64, u64), usize)| {
        let meets = start < end[1 - side];
        end[side] = end[side].max(stop);
        meets
    })
}

/// Whether any two of the byte ranges share a byte.
fn any_overlap(mut ranges: Vec<(u64, u64)>) -> bool {
    ranges.sort_unstable();
    ranges.windows(2).any(|pair| pair[1].0 < pair[0].1)
}

/// A layer's tensors, checked and bound to a cache: made once, used in any number of steps and layers.
///
/// It keeps the host's buffers alive until it is dropped; the cache itself never does.
#[derive(Debug)]
pub struct LayerBinding {
    pub(super) cache: CacheId,
    append: Option<wgpu::BindGroup>,
    queries: Option<wgpu::BindGroup>,
    output: Option<wgpu::BindGroup>,
    views: Vec<Checked>,
    /// New tokens (high half) and queries (low half) up to which the views are known not to overlap. One
    /// word: what is known of one number holds only together with the other.
    apart: AtomicU64,
}

impl LayerBinding {
    pub(super) fn new(gpu: &Gpu, cache: CacheId, io: &LayerIo<'_>) -> Result<LayerBinding, Error> {
        let tensors = [
            (Role::Keys, io.k),
            (Role::Values, io.v),
            (Role::Queries, io.q),
            (Role::Output, io.out),
            (Role::SinkLogits, io.sink_logits),
            (Role::Lse, io.lse),
        ];
        let mut params = [ViewParams::default(); 6];
        let mut views: Vec<Checked> = Vec::new();
        let mut buffers: Vec<&wgpu::Buffer> = Vec::new();
        for ((role, view), params) in tensors.into_iter().zip(&mut params) {
            let Some(view) = view else { continue };
            let known = buffers.iter().position(|b| *b == view.buffer);
            let checked = Checked::new(gpu, role, &view, known.unwrap_or(buffers.len()))?;
            if known.is_none() {
                buffers.push(view.buffer);
            }
            let shared = views.iter().find(|v| v.buffer == checked.buffer && v.role.is_merged());
            if let (true, Some(other)) = (role.is_merged(), shared) {
                return Err(Error::SharedBuffer { a: other.role.name(), b: role.name() });
            }
            *params = checked.params();
            views.push(checked);
        }
        let [k, v, q, out, sinks, lse] = params;
        let params = IoParams { k, v, q, out, sinks, lse };
        if io.k.is_some() != io.v.is_some() {
            return Err(Error::BindingIncomplete { what: "keys and values together" });
        }
        if io.q.is_some() != io.out.is_some() {
            return Err(Error::BindingIncomplete { what: "queries and output together" });
        }
        let mut binding = LayerBinding {
            cache,
            append: None,
            queries: None,
            output: None,
            views,
            apart: AtomicU64::new(0),
        };
        binding.check_apart(1, 1)?;

        let device = gpu.device();
        let params =
            filled_buffer(device, "kivi io", bytemuck::bytes_of(&params), wgpu::BufferUsages::STORAGE)?;
        let scope = device.push_error_scope(wgpu::ErrorFilter::Validation);
        let bind = |layout: &wgpu::BindGroupLayout, roles: &[Role]| {
            let mut entries = vec![wgpu::BindGroupEntry { binding: 0, resource: params.as_entire_binding() }];
            for (&role, index) in roles.iter().zip(1..) {
                let tensor = tensors.iter().find(|(r, _)| *r == role).and_then(|(_, tensor)| *tensor);
                let checked = binding.views.iter().find(|v| v.role == role);
                let resource = match (tensor, checked) {
                    (Some(tensor), Some(checked)) => wgpu::BindingResource::Buffer(wgpu::BufferBinding {
                        buffer: tensor.buffer,
                        offset: checked.binding_offset,
                        size: wgpu::BufferSize::new(checked.reach - checked.binding_offset),
                    }),
                    // Optional tensors: a buffer that the pass reads anyway, or does not use, stands in.
                    _ if role == Role::SinkLogits => params.as_entire_binding(),
                    _ if role == Role::Lse => gpu.spare().as_entire_binding(),
                    _ => return None,
                };
                entries.push(wgpu::BindGroupEntry { binding: index, resource });
            }
            let descriptor = wgpu::BindGroupDescriptor { label: Some("kivi io"), layout, entries: &entries };
            Some(device.create_bind_group(&descriptor))
        };
        let layouts = &gpu.kernels.layouts().host;
        let append = bind(&layouts.append, &[Role::Keys, Role::Values]);
        let queries = bind(&layouts.queries, &[Role::Queries, Role::Queries]);
        let output = bind(&layouts.output, &[Role::Output, Role::SinkLogits, Role::Lse]);
        if let Some(Some(error)) = now_or_never(scope.pop()) {
            // A buffer of another device, for example.
            return Err(Error::Device(error.to_string()));
        }
        (binding.append, binding.queries, binding.output) = (append, queries, output);
        Ok(binding)
    }

    /// The bind groups, for the executor.
    pub(super) fn groups(&self) -> HostGroups<'_> {
        let LayerBinding { append, queries, output, .. } = self;
        HostGroups { append: append.as_ref(), queries: queries.as_ref(), output: output.as_ref() }
    }

    /// Whether the binding serves so many new tokens (0 if only its queries and output count) and queries.
    pub(super) fn check_step(&self, tokens: u32, queries: u32) -> Result<(), Error> {
        if tokens > 0 && self.append.is_none() {
            return Err(Error::BindingIncomplete { what: "keys and values" });
        }
        if queries > 0 && self.queries.is_none() {
            return Err(Error::BindingIncomplete { what: "queries and output" });
        }
        let (tokens, queries) = (u64::from(tokens), u64::from(queries));
        for view in &self.views {
            view.check_size(view.rows_of(tokens, queries))?;
        }
        self.check_apart(tokens, queries)
    }

    /// Keys and values must be apart, and the output must be apart from every input and from itself.
    fn check_apart(&self, tokens: u64, queries: u64) -> Result<(), Error> {
        let known = self.apart.load(Ordering::Relaxed);
        let (known_tokens, known_queries) = (known >> 32, known & 0xffff_ffff);
        if tokens <= known_tokens && queries <= known_queries {
            return Ok(());
        }
        for (i, a) in self.views.iter().enumerate() {
            let rows = a.rows_of(tokens, queries);
            if a.role.is_written() && !a.is_nested() && any_overlap(a.rows(rows).collect()) {
                return Err(Error::Overlap { a: a.role.name(), b: a.role.name() });
            }
            for b in &self.views[i + 1..] {
                let inputs = a.role == Role::Keys && b.role == Role::Values;
                let matters = inputs || a.role.is_written() || b.role.is_written();
                let other_rows = b.rows_of(tokens, queries);
                if matters && a.buffer == b.buffer && a.may_meet(rows, b, other_rows) {
                    // Each may overlap itself (inputs may); only rows of one against rows of the other count.
                    let (own, other) = (a.rows(rows).collect(), b.rows(other_rows).collect());
                    if sets_overlap(own, other) {
                        return Err(Error::Overlap { a: a.role.name(), b: b.role.name() });
                    }
                }
            }
        }
        if tokens >= known_tokens && queries >= known_queries {
            self.apart.store(tokens << 32 | queries, Ordering::Relaxed);
        }
        Ok(())
    }
}
