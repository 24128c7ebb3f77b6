//! The one error type of the crate.

use crate::format::Dtype;

/// Everything that can go wrong. Each message says what to change; nothing already cached is lost.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    // ---- configuration -------------------------------------------------------------------------
    /// A configuration value outside what the format or the kernels support.
    #[error("{name} = {got} is not supported: use {allowed}")]
    Unsupported {
        /// Name of the configuration field.
        name: &'static str,
        /// The value that was given.
        got: u64,
        /// What would be accepted.
        allowed: &'static str,
    },
    /// Query heads are not a multiple of KV heads.
    #[error(
        "query_heads = {query_heads} is not a multiple of kv_heads = {kv_heads}: each KV head must serve the same number of query heads"
    )]
    HeadsDoNotDivide {
        /// Query heads per layer.
        query_heads: u32,
        /// KV heads per layer.
        kv_heads: u32,
    },
    /// `softmax_scale` is not a positive finite number.
    #[error("softmax_scale = {got} is not a positive finite number")]
    SoftmaxScale {
        /// The value that was given.
        got: f32,
    },
    /// `soft_cap` is not a positive finite number.
    #[error("soft_cap = {got} is not a positive finite number")]
    SoftCap {
        /// The value that was given.
        got: f32,
    },
    /// More sink tokens than the cache can hold at all.
    #[error("sink_tokens = {sink_tokens} exceeds capacity = {capacity}: lower sink_tokens or raise capacity")]
    SinksBeyondCapacity {
        /// Tokens kept unpacked at the start of each sequence.
        sink_tokens: u32,
        /// Tokens the pool is sized for.
        capacity: u32,
    },
    /// Two choices of a configuration that cannot both be met.
    #[error("{a} and {b} contradict each other: {instead}")]
    Contradiction {
        /// The one choice.
        a: String,
        /// The other.
        b: String,
        /// What to change.
        instead: &'static str,
    },
    /// A device limit is too low for this configuration.
    #[error(
        "{limit} = {available} is too low: {what} needs {needed}; raise the limit (a device's when the device is created), or {instead}"
    )]
    LimitTooLow {
        /// Name of the field of `wgpu::Limits`, or of the configuration.
        limit: &'static str,
        /// What the device offers.
        available: u64,
        /// What is needed.
        needed: u64,
        /// What needs it.
        what: &'static str,
        /// Which configuration change would lower the need.
        instead: &'static str,
    },
    /// The adapter's arithmetic does not give the words that the format prescribes.
    #[error(
        "{adapter} does not round f32 sums to nearest as the block format needs ({detail}): use another adapter or backend"
    )]
    Arithmetic {
        /// Name and driver of the adapter.
        adapter: String,
        /// First difference from the oracle.
        detail: String,
    },
    /// An attention kernel computes something else than attention.
    #[error(
        "{adapter} computes wrong attention with the kernel {kernel}: {detail}; use another adapter, backend or driver, or another variant of the kernels"
    )]
    WrongAttention {
        /// Name and driver of the adapter.
        adapter: String,
        /// The kernel: pass, rows per workgroup and variant.
        kernel: String,
        /// First difference from the oracle.
        detail: String,
    },
    /// The chosen variant of the kernels cannot run.
    #[error("the {variant} kernels need {needed}: choose another variant, or let the library choose")]
    VariantUnavailable {
        /// The variant.
        variant: String,
        /// What it needs and does not have.
        needed: &'static str,
    },
    /// Kernels that are of another device.
    #[error(
        "the kernels are of another device: make them with Kernels::new of the device that the cache is for"
    )]
    ForeignKernels,
    /// The device ran out of memory.
    #[error(
        "out of GPU memory while allocating {what} ({bytes} bytes): lower capacity, max_sequences or max_step"
    )]
    OutOfMemory {
        /// What was being allocated.
        what: &'static str,
        /// Size of the request.
        bytes: u64,
    },
    /// wgpu refused something that the library did not foresee; the text is wgpu's.
    #[error("wgpu reported: {0}")]
    Device(String),

    // ---- sequences and steps -------------------------------------------------------------------
    /// No such sequence in this cache (never created, or removed).
    #[error("{0} does not exist in this cache: create it with create_sequence()")]
    UnknownSequence(crate::ids::SequenceId),
    /// The sequence is one of another cache.
    #[error("{0} was created by another cache: use the ids that this cache gave")]
    ForeignSequence(crate::ids::SequenceId),
    /// The operation is one of another cache.
    #[error("this operation is another cache's: discard it with the cache that returned it")]
    ForeignOperation,
    /// The same sequence appears twice in one step or reorder.
    #[error("{0} appears twice: name each sequence once")]
    DuplicateSequence(crate::ids::SequenceId),
    /// All sequence slots are in use.
    #[error("all {max} sequences are in use: remove one, or raise max_sequences")]
    TooManySequences {
        /// The configured `max_sequences`.
        max: u32,
    },
    /// A step without work.
    #[error("the step has no sequence with tokens to append or queries to attend")]
    EmptyStep,
    /// More new tokens of one sequence than a step may hold.
    #[error("{got} new tokens for one sequence exceed max_step = {max}: append them in several steps")]
    StepTooLong {
        /// Tokens given.
        got: u32,
        /// The configured maximum.
        max: u32,
    },
    /// More new tokens in all than a step may hold.
    #[error("{got} new tokens in one step exceed max_batch_tokens = {max}: split the batch")]
    BatchTooLong {
        /// Tokens given.
        got: u64,
        /// The configured maximum.
        max: u32,
    },
    /// More queries than a step may hold.
    #[error(
        "{got} queries exceed {max}: a sequence may have max_step of them in a step, all sequences together max_batch_tokens"
    )]
    TooManyQueries {
        /// Queries asked for.
        got: u64,
        /// The maximum that they exceed.
        max: u32,
    },
    /// More queries than tokens.
    #[error(
        "{got} queries but the sequence holds {tokens} newest tokens after this step: each query is one of them"
    )]
    QueriesExceedTokens {
        /// Queries asked for.
        got: u32,
        /// Length of the sequence after the append; after what is gone to `history_limit`, if something is.
        tokens: u32,
    },
    /// The pool of pages is full, and as large as it may get.
    #[error(
        "{needed} more pages of 256 tokens are needed and {available} can be had: {fits} more tokens of the first sequence that does not fit would; raise max_capacity, or remove or truncate a sequence"
    )]
    CapacityExceeded {
        /// Pages that the operation needs.
        needed: u32,
        /// Pages that are free or that the pool may grow by.
        available: u32,
        /// Tokens that the first sequence without room could still append, as far as the first class of
        /// layers without room goes; 0 where none would be appended.
        fits: u32,
    },
    /// A sequence would grow past what positions can number.
    #[error("the sequence would hold {tokens} tokens; the most is {max}")]
    SequenceTooLong {
        /// Tokens after the append.
        tokens: u64,
        /// The most that positions can number.
        max: u32,
    },
    /// A sequence cannot be truncated to more than it has.
    #[error("{sequence} holds {tokens} tokens and cannot be truncated to {got}")]
    TruncateBeyondEnd {
        /// The sequence.
        sequence: crate::ids::SequenceId,
        /// The length asked for.
        got: u32,
        /// The length that it has.
        tokens: u32,
    },
    /// A sequence cannot be cut among tokens that are gone.
    #[error(
        "{sequence} has lost its tokens from {sinks} to {first} to history_limit: truncate it to {first} or more, or to {sinks} or less, not to {got}"
    )]
    TruncateIntoEvicted {
        /// The sequence.
        sequence: crate::ids::SequenceId,
        /// The length asked for.
        got: u32,
        /// The first position after those that are gone.
        first: u32,
        /// The first position that is gone.
        sinks: u32,
    },
    /// No sequence of this configuration has such lengths.
    #[error(
        "{tokens} tokens with {blocks} packed blocks, {evicted} of them gone, are no sequence of this configuration"
    )]
    SequenceLengths {
        /// Tokens.
        tokens: u32,
        /// Blocks that have been packed.
        blocks: u32,
        /// Blocks that are gone.
        evicted: u32,
    },
    /// A reorder without exactly one parent per sequence.
    #[error(
        "reorder of {sequences} sequences with {parents} parents, the largest {largest}: give one index into the sequences for each of them"
    )]
    Parents {
        /// Sequences given.
        sequences: u64,
        /// Parents given.
        parents: u64,
        /// The largest parent.
        largest: u64,
    },
    /// Only the newest operation can be discarded.
    #[error("operation {given} is not the latest, which is {latest}: discard newer operations first")]
    NotLatest {
        /// The operation given.
        given: u64,
        /// The latest operation that is still in force.
        latest: u64,
    },
    /// The record of this operation is gone.
    #[error(
        "operation {given} can no longer be discarded: it is discarded already, or older than the last max_undo = {max_undo}, or what it freed is in use again or given back"
    )]
    TooOld {
        /// The operation given.
        given: u64,
        /// The configured `max_undo`.
        max_undo: u32,
    },

    // ---- snapshots -----------------------------------------------------------------------------
    /// A file that is no snapshot, or was cut or altered.
    #[error("this is no intact snapshot of a cache: {detail}")]
    SnapshotCorrupt {
        /// What is wrong with it.
        detail: String,
    },
    /// A snapshot of another version of the format.
    #[error(
        "the snapshot has format version {found}, and this version of the library reads {supported}: save it anew, or use a matching version"
    )]
    SnapshotVersion {
        /// The file's version.
        found: u32,
        /// The version that can be read.
        supported: u32,
    },
    /// A snapshot of a cache with another configuration.
    #[error(
        "the snapshot was saved with {field} = {saved}, and this cache has {own}: load it into a cache with the same configuration"
    )]
    SnapshotMismatch {
        /// Name of the configuration field.
        field: &'static str,
        /// The snapshot's value.
        saved: String,
        /// The cache's value.
        own: String,
    },

    // ---- layers and buffers --------------------------------------------------------------------
    /// Layer index out of range.
    #[error("layer {got} does not exist: there are {layers}")]
    LayerOutOfRange {
        /// The index given.
        got: u32,
        /// Layers of the cache.
        layers: u32,
    },
    /// A layer was recorded twice in a step.
    #[error("layer {0} was already recorded in this step; to attend again use Step::attend")]
    LayerRepeated(u32),
    /// `finish` before every layer was recorded, or `attend` before the layer itself.
    #[error("layer {0} has not been recorded in this step: call Step::layer for it first")]
    LayerMissing(u32),
    /// Another layer has since used the staging buffer which holds this layer's new tokens.
    #[error(
        "layer {layer}'s new tokens left the staging buffer when layer {by} was recorded: attend from shared keys and values before recording the next layer"
    )]
    StagingOverwritten {
        /// The layer to attend to.
        layer: u32,
        /// The layer recorded since.
        by: u32,
    },
    /// The step appends, but the binding has no keys and values; or it attends and there is no query or
    /// output.
    #[error("the step needs {what}, which this binding does not have")]
    BindingIncomplete {
        /// The missing tensors.
        what: &'static str,
    },
    /// The binding was made by another cache.
    #[error("this binding was made by another cache: bind the tensors with the cache that records them")]
    ForeignBinding,
    /// A buffer is too small for the rows that are read or written.
    #[error("the buffer of {tensor} holds {got} bytes and {needed} are needed (offset and strides included)")]
    BufferTooSmall {
        /// Which tensor.
        tensor: &'static str,
        /// Bytes the last element needs.
        needed: u64,
        /// Bytes there are.
        got: u64,
    },
    /// A buffer lacks a usage flag.
    #[error("the buffer of {tensor} lacks BufferUsages::{usage}")]
    BufferUsage {
        /// Which tensor.
        tensor: &'static str,
        /// The missing flag.
        usage: &'static str,
    },
    /// Two tensors that must be apart share bytes.
    #[error("{a} and {b} overlap in one buffer: give them disjoint ranges")]
    Overlap {
        /// First tensor.
        a: &'static str,
        /// Second tensor.
        b: &'static str,
    },
    /// Two tensors of one pass share a buffer, of which at least one is written.
    #[error(
        "{a} and {b} are in one buffer, which a pass may not both read and write: give them buffers of their own"
    )]
    SharedBuffer {
        /// First tensor.
        a: &'static str,
        /// Second tensor.
        b: &'static str,
    },
    /// An offset or a stride that the kernels cannot address.
    #[error("{field} of {tensor} = {got} is not supported: {rule} ({dtype:?})")]
    Stride {
        /// Which tensor.
        tensor: &'static str,
        /// Which field of its view.
        field: &'static str,
        /// The value given.
        got: u64,
        /// What must hold.
        rule: &'static str,
        /// Element type of the tensor.
        dtype: Dtype,
    },
}
