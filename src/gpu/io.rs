//! The host's tensors: how they are described, checked and bound.

use super::cache::KvCache;
use super::pipelines::now_or_never;
use super::upload::filled_buffer;
use crate::error::Error;
use crate::format::Dtype;
use crate::plan::StepPlan;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A tensor `[token][head][head_dim]` in a host's buffer. The elements of one head's row are contiguous; rows may be anywhere.
#[derive(Debug, Clone, Copy)]
pub struct TensorView<'a> {
    /// The buffer; needs [`wgpu::BufferUsages::STORAGE`].
    pub buffer: &'a wgpu::Buffer,
    /// Element type.
    pub dtype: Dtype,
    /// Bytes before token 0, head 0; a multiple of 4.
    pub offset: u64,
    /// Elements from one token to the next; `None`: heads × head_dim. Even for 16-bit types.
    pub token_stride: Option<u32>,
    /// Elements from one head to the next; `None`: head_dim. Even for 16-bit types.
    pub head_stride: Option<u32>,
}

impl<'a> TensorView<'a> {
    /// A contiguous `[token][head][head_dim]` tensor at the start of `buffer`.
    pub fn new(buffer: &'a wgpu::Buffer, dtype: Dtype) -> Self {
        TensorView { buffer, dtype, offset: 0, token_stride: None, head_stride: None }
    }

    /// Starts `bytes` into the buffer.
    #[must_use]
    pub fn with_offset(mut self, bytes: u64) -> Self {
        self.offset = bytes;
        self
    }

    /// Sets the distances, in elements, between tokens and between heads.
    ///
    /// A fused `[token][q heads, k heads, v heads][head_dim]` buffer is three views with the same strides and different offsets.
    #[must_use]
    pub fn with_strides(mut self, token: u32, head: u32) -> Self {
        self.token_stride = Some(token);
        self.head_stride = Some(head);
        self
    }
}

/// The tensors of a layer. A step that only appends needs no queries and output; one that only attends no keys and values.
#[derive(Debug, Clone, Copy, Default)]
pub struct LayerIo<'a> {
    /// New keys after RoPE, `[token][kv head][head_dim]`.
    pub k: Option<TensorView<'a>>,
    /// New values, `[token][kv head][head_dim]`.
    pub v: Option<TensorView<'a>>,
    /// Queries after RoPE, `[query][query head][head_dim]`.
    pub q: Option<TensorView<'a>>,
    /// Attention output, `[query][query head][head_dim]`.
    pub out: Option<TensorView<'a>>,
}

impl<'a> LayerIo<'a> {
    /// Keys, values, queries and output.
    pub fn new(k: TensorView<'a>, v: TensorView<'a>, q: TensorView<'a>, out: TensorView<'a>) -> Self {
        LayerIo { k: Some(k), v: Some(v), q: Some(q), out: Some(out) }
    }

    /// Only keys and values, to append without attending.
    pub fn append(k: TensorView<'a>, v: TensorView<'a>) -> Self {
        LayerIo { k: Some(k), v: Some(v), ..Self::default() }
    }

    /// Only queries and output, to attend without appending.
    pub fn attend(q: TensorView<'a>, out: TensorView<'a>) -> Self {
        LayerIo { q: Some(q), out: Some(out), ..Self::default() }
    }
}

/// A view as shaders see it. Twin: `View` in shaders/lib/element.wgsl.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
pub struct ViewParams {
    /// Elements from the start of the binding.
    pub offset: u32,
    /// Elements from token to token.
    pub token_stride: u32,
    /// Elements from head to head.
    pub head_stride: u32,
    /// [`Dtype::index`]
    pub dtype: u32,
}

/// All views of a binding. Twin: `Io` in shaders/lib/element.wgsl.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
pub struct IoParams {
    /// Keys.
    pub k: ViewParams,
    /// Values.
    pub v: ViewParams,
    /// Queries.
    pub q: ViewParams,
    /// Output.
    pub out: ViewParams,
}

/// A checked view. It compares buffers but holds none: bind groups do, and the host drops those.
#[derive(Debug, Clone)]
struct Checked {
    name: &'static str,
    dtype: Dtype,
    heads: u64,
    head_dim: u64,
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
    fn new(
        cache: &KvCache,
        name: &'static str,
        view: &TensorView<'_>,
        buffer: usize,
    ) -> Result<Checked, Error> {
        let g = cache.geometry();
        let is_query = name == "q" || name == "out";
        let heads = if is_query { g.query_heads } else { g.layout.kv_heads };
        let head_dim = g.layout.head_dim;
        if !view.buffer.usage().contains(wgpu::BufferUsages::STORAGE) {
            return Err(Error::BufferUsage { tensor: name, usage: "STORAGE" });
        }
        let token_stride = view.token_stride.unwrap_or(heads * head_dim);
        let head_stride = view.head_stride.unwrap_or(head_dim);
        let wrong =
            |field, got, rule| Err(Error::Stride { tensor: name, field, got, rule, dtype: view.dtype });
        if view.offset > view.buffer.size() {
            return Err(Error::BufferTooSmall { tensor: name, needed: view.offset, got: view.buffer.size() });
        }
        if !view.offset.is_multiple_of(4) {
            return wrong("offset", view.offset, "a multiple of 4 bytes");
        }
        for (field, stride) in [("token_stride", token_stride), ("head_stride", head_stride)] {
            if stride < head_dim {
                return wrong(field, stride.into(), "head_dim or more");
            }
            if view.dtype != Dtype::F32 && stride % 2 == 1 {
                return wrong(field, stride.into(), "even for 16-bit types");
            }
        }
        let limits = cache.device().limits();
        let alignment = u64::from(limits.min_storage_buffer_offset_alignment);
        let binding_offset = view.offset / alignment * alignment;
        let reach = view.buffer.size().min(binding_offset + limits.max_storage_buffer_binding_size) & !3;
        let checked = Checked {
            name,
            dtype: view.dtype,
            heads: heads.into(),
            head_dim: head_dim.into(),
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
        (last + self.head_dim) * u64::from(self.dtype.bytes())
    }

    fn check_size(&self, tokens: u64) -> Result<(), Error> {
        if tokens > 0 && self.end(tokens) > self.reach {
            return Err(Error::BufferTooSmall {
                tensor: self.name,
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
        if self.name == "q" || self.name == "out" { queries } else { tokens }
    }

    /// Whether all heads of a token lie before the next token.
    fn is_nested(&self) -> bool {
        (self.heads - 1) * self.head_stride + self.head_dim <= self.token_stride
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
        let (heads, length) = (self.heads, self.head_dim * bytes);
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
    pub(super) cache: Arc<()>,
    pub(super) append: Option<wgpu::BindGroup>,
    pub(super) queries: Option<wgpu::BindGroup>,
    pub(super) output: Option<wgpu::BindGroup>,
    views: Vec<Checked>,
    /// (new tokens, queries) up to which the views are known not to overlap.
    apart: [AtomicU64; 2],
}

impl LayerBinding {
    pub(super) fn new(cache: &KvCache, io: &LayerIo<'_>) -> Result<LayerBinding, Error> {
        let mut params = [ViewParams::default(); 4];
        let mut views = Vec::new();
        let mut buffers: Vec<&wgpu::Buffer> = Vec::new();
        for (i, (name, view)) in
            [("k", io.k), ("v", io.v), ("q", io.q), ("out", io.out)].into_iter().enumerate()
        {
            let Some(view) = view else { continue };
            let known = buffers.iter().position(|b| *b == view.buffer);
            let checked = Checked::new(cache, name, &view, known.unwrap_or(buffers.len()))?;
            if known.is_none() {
                buffers.push(view.buffer);
            }
            params[i] = checked.params();
            views.push(checked);
        }
        let [k, v, q, out] = params;
        let params = IoParams { k, v, q, out };
        if io.k.is_some() != io.v.is_some() {
            return Err(Error::BindingIncomplete { what: "keys and values together" });
        }
        if io.q.is_some() != io.out.is_some() {
            return Err(Error::BindingIncomplete { what: "queries and output together" });
        }
        let mut binding = LayerBinding {
            cache: cache.identity(),
            append: None,
            queries: None,
            output: None,
            views,
            apart: [AtomicU64::new(0), AtomicU64::new(0)],
        };
        binding.check_apart(1, 1)?;

        let device = cache.device();
        let uniform =
            filled_buffer(device, "kivi io", bytemuck::bytes_of(&params), wgpu::BufferUsages::UNIFORM)?;
        let scope = device.push_error_scope(wgpu::ErrorFilter::Validation);
        let bind = |layout: &wgpu::BindGroupLayout, tensors: &[(&str, Option<TensorView<'_>>)]| {
            let mut entries =
                vec![wgpu::BindGroupEntry { binding: 0, resource: uniform.as_entire_binding() }];
            for (&(name, tensor), index) in tensors.iter().zip(1..) {
                let checked = binding.views.iter().find(|v| v.name == name)?;
                entries.push(wgpu::BindGroupEntry {
                    binding: index,
                    resource: wgpu::BindingResource::Buffer(wgpu::BufferBinding {
                        buffer: tensor?.buffer,
                        offset: checked.binding_offset,
                        size: wgpu::BufferSize::new(checked.reach - checked.binding_offset),
                    }),
                });
            }
            let descriptor = wgpu::BindGroupDescriptor { label: Some("kivi io"), layout, entries: &entries };
            Some(device.create_bind_group(&descriptor))
        };
        let layouts = cache.host_layouts();
        let append = bind(&layouts.append, &[("k", io.k), ("v", io.v)]);
        let queries = bind(&layouts.queries, &[("q", io.q)]);
        let output = bind(&layouts.output, &[("out", io.out)]);
        if let Some(Some(error)) = now_or_never(scope.pop()) {
            // A buffer of another device, for example.
            return Err(Error::Device(error.to_string()));
        }
        (binding.append, binding.queries, binding.output) = (append, queries, output);
        Ok(binding)
    }

    /// Whether the binding serves a step of this plan; without `appends`, only its queries and output count.
    pub(super) fn check_step(&self, plan: &StepPlan, appends: bool) -> Result<(), Error> {
        let plan_tokens = if appends { plan.tokens } else { 0 };
        if plan_tokens > 0 && self.append.is_none() {
            return Err(Error::BindingIncomplete { what: "keys and values" });
        }
        if plan.queries > 0 && self.queries.is_none() {
            return Err(Error::BindingIncomplete { what: "queries and output" });
        }
        let (tokens, queries) = (u64::from(plan_tokens), u64::from(plan.queries));
        for view in &self.views {
            view.check_size(view.rows_of(tokens, queries))?;
        }
        self.check_apart(tokens, queries)
    }

    /// Keys and values must be apart, and the output must be apart from every input and from itself.
    fn check_apart(&self, tokens: u64, queries: u64) -> Result<(), Error> {
        let known = |i: usize| self.apart[i].load(Ordering::Relaxed);
        if tokens <= known(0) && queries <= known(1) {
            return Ok(());
        }
        for (i, a) in self.views.iter().enumerate() {
            let rows = a.rows_of(tokens, queries);
            if a.name == "out" && !a.is_nested() && any_overlap(a.rows(rows).collect()) {
                return Err(Error::Overlap { a: "out", b: "out" });
            }
            for b in &self.views[i + 1..] {
                let matters = b.name == "out" || (a.name == "k" && b.name == "v");
                let other_rows = b.rows_of(tokens, queries);
                if matters && a.buffer == b.buffer && a.may_meet(rows, b, other_rows) {
                    // Each may overlap itself (inputs may); only rows of one against rows of the other count.
                    let (own, other) = (a.rows(rows).collect(), b.rows(other_rows).collect());
                    if sets_overlap(own, other) {
                        return Err(Error::Overlap { a: a.name, b: b.name });
                    }
                }
            }
        }
        self.apart[0].fetch_max(tokens, Ordering::Relaxed);
        self.apart[1].fetch_max(queries, Ordering::Relaxed);
        Ok(())
    }
}
