//! The host's tensors: how they are described.

use crate::format::Dtype;

/// A tensor `[token][head][head_dim]` in a host's buffer. The elements of one head's row are contiguous; rows
/// may be anywhere.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct TensorView<'a> {
    /// The buffer; needs [`wgpu::BufferUsages::STORAGE`].
    pub buffer: &'a wgpu::Buffer,
    /// Element type.
    pub dtype: Dtype,
    /// Bytes before token 0, head 0; a multiple of 4.
    pub offset: u64,
    /// Elements from one token to the next; `None`: heads × row length. Even for 16-bit types.
    pub token_stride: Option<u32>,
    /// Elements from one head to the next; `None`: the row length, which is head_dim (1 for sink logits and
    /// log-sum-exp). Even for 16-bit types.
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
    /// A fused `[token][q heads, k heads, v heads][head_dim]` buffer is three views with the same strides and
    /// different offsets.
    #[must_use]
    pub fn with_strides(mut self, token: u32, head: u32) -> Self {
        self.token_stride = Some(token);
        self.head_stride = Some(head);
        self
    }
}

/// The tensors of a layer. A step that only appends needs no queries and output; one that only attends no
/// keys and values.
///
/// Numbers that are not finite, or beyond f32 on the way:
/// - **Keys and values** are sanitized as they enter the cache: NaN becomes 0, an infinity the largest
///   magnitude of the window format (65504, bf16: 65280).
/// - **A query** with a NaN or an infinity makes its own row (of one token and query head) NaN, in the output
///   and in the log-sum-exp; so does a logit whose magnitude exceeds 2·10³⁸, and a learned sink logit that is
///   NaN or +∞. No other row changes. A sink logit of −∞ is none.
/// - A row that sees no token has output 0 and log-sum-exp −∞.
#[derive(Debug, Clone, Copy, Default)]
#[non_exhaustive]
pub struct LayerIo<'a> {
    /// New keys after RoPE, `[token][kv head][head_dim]`.
    pub k: Option<TensorView<'a>>,
    /// New values, `[token][kv head][head_dim]`.
    pub v: Option<TensorView<'a>>,
    /// Queries after RoPE, `[query][query head][head_dim]`.
    pub q: Option<TensorView<'a>>,
    /// Attention output, `[query][query head][head_dim]`.
    pub out: Option<TensorView<'a>>,
    /// Learned sink logits, `[query head]` (one token, one element per head): each joins its head's softmax
    /// as the logit of a token without a value.
    pub sink_logits: Option<TensorView<'a>>,
    /// Log-sum-exp of each row's scaled logits (natural logarithm, sink logit included), `[query][query
    /// head]` in f32; −∞ for a row that sees nothing. With it a host can merge this attention with attention
    /// over other tokens.
    pub lse: Option<TensorView<'a>>,
}

impl<'a> LayerIo<'a> {
    /// Keys, values, queries and output.
    pub fn new(k: TensorView<'a>, v: TensorView<'a>, q: TensorView<'a>, out: TensorView<'a>) -> Self {
        LayerIo { k: Some(k), v: Some(v), q: Some(q), out: Some(out), ..Self::default() }
    }

    /// Only keys and values, to append without attending.
    pub fn append(k: TensorView<'a>, v: TensorView<'a>) -> Self {
        LayerIo { k: Some(k), v: Some(v), ..Self::default() }
    }

    /// Only queries and output, to attend without appending.
    pub fn attend(q: TensorView<'a>, out: TensorView<'a>) -> Self {
        LayerIo { q: Some(q), out: Some(out), ..Self::default() }
    }

    /// Adds learned sink logits, one element per query head.
    #[must_use]
    pub fn with_sink_logits(mut self, sink_logits: TensorView<'a>) -> Self {
        self.sink_logits = Some(sink_logits);
        self
    }

    /// Adds a log-sum-exp output, f32, one element per query and query head.
    #[must_use]
    pub fn with_lse(mut self, lse: TensorView<'a>) -> Self {
        self.lse = Some(lse);
        self
    }
}
