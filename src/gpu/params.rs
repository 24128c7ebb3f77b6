//! What shaders read besides the records of plans: the twins of structs in WGSL.

/// Parameters of one pass. Twin: `PassParams` in shaders/lib/step.wgsl.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct PassParams {
    /// Word of the plan where the pass's first work item lies.
    pub first: u32,
    /// Number of work items.
    pub count: u32,
    /// Word where the tiles begin.
    pub tiles: u32,
    /// Word where the slot lists begin.
    pub slots: u32,
    /// First KV head.
    pub first_head: u32,
    /// Number of KV heads.
    pub heads: u32,
    /// Positions that a query sees, its own included.
    pub sliding_window: u32,
    /// Soft cap of the logits in base 2, or 0.
    pub soft_cap: f32,
}

/// [`ViewParams::dtype`] of a tensor that the binding does not have.
pub(super) const ABSENT: u32 = 3;

/// A view as shaders see it. Twin: `View` in shaders/lib/element.wgsl.
#[repr(C)]
#[derive(Debug, Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
pub struct ViewParams {
    /// Elements from the start of the binding.
    pub offset: u32,
    /// Elements from token to token.
    pub token_stride: u32,
    /// Elements from head to head.
    pub head_stride: u32,
    /// [`Dtype::index`](crate::Dtype::index), or 3 if there is no such tensor.
    pub dtype: u32,
}

impl Default for ViewParams {
    /// No tensor.
    fn default() -> ViewParams {
        ViewParams { offset: 0, token_stride: 0, head_stride: 0, dtype: ABSENT }
    }
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
    /// Sink logits.
    pub sinks: ViewParams,
    /// Log-sum-exp.
    pub lse: ViewParams,
}
