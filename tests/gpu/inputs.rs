//! Bad input gets a typed error, and the cache stays as it was.

use crate::support::{Pair, device, new_device, storage_buffer};
use kivi_wgpu::{
    Bits, CacheConfig, Dtype, Error, KvCache, LayerAttention, LayerFormat, LayerIo, SequenceStep,
    TensorFormat, TensorView, ZeroPoint, wgpu,
};

fn config() -> CacheConfig {
    CacheConfig::new(1, 4, 2, 64)
        .with_residual_window(32)
        .with_max_step(64)
        .with_capacity(1000)
        .with_max_capacity(1000)
}

/// Runs `attempt` on a cache that holds 150 tokens, checks that it is unchanged, and returns the error.
fn refused(attempt: impl FnOnce(&mut Pair, kivi_wgpu::SequenceId) -> Error) -> Error {
    let mut pair = Pair::new(&config());
    let s = pair.create_sequence();
    pair.fill(s, 150);
    let error = attempt(&mut pair, s);
    pair.check_state(s);
    pair.step(&[SequenceStep::decode(s)]);
    pair.check_state(s);
    error
}

fn begin_error(steps: impl FnOnce(&mut Pair, kivi_wgpu::SequenceId) -> Vec<SequenceStep>) -> Error {
    refused(|pair, s| {
        let steps = steps(pair, s);
        let mut encoder = device().0.create_command_encoder(&Default::default());
        pair.gpu.begin_step(&mut encoder, &steps).map(drop).unwrap_err()
    })
}

#[test]
fn wrong_steps() {
    assert_eq!(
        begin_error(|_, s| vec![SequenceStep::append(s, 65)]),
        Error::StepTooLong { got: 65, max: 64 }
    );
    assert_eq!(
        begin_error(|_, s| vec![SequenceStep::attend(s, 65)]),
        Error::TooManyQueries { got: 65, max: 64 }
    );
    assert_eq!(begin_error(|_, s| vec![SequenceStep::append(s, 0)]), Error::EmptyStep);
    assert_eq!(begin_error(|_, _| vec![]), Error::EmptyStep);
    let twice = begin_error(|_, s| vec![SequenceStep::decode(s), SequenceStep::decode(s)]);
    assert!(matches!(twice, Error::DuplicateSequence(_)), "{twice}");
    let mut pair = Pair::new(&config());
    let removed = pair.create_sequence();
    pair.remove(removed);
    let mut encoder = device().0.create_command_encoder(&Default::default());
    let unknown = pair.gpu.begin_step(&mut encoder, &[SequenceStep::decode(removed)]).map(drop);
    assert_eq!(unknown, Err(Error::UnknownSequence(removed)));
}

/// Two caches of one application, whose first sequences have the same number: what one hands out, the other
/// refuses, and nothing changes.
#[test]
fn what_another_cache_has_handed_out() {
    let mut own = Pair::new(&config().with_max_sequences(2));
    let mut other = Pair::new(&config().with_max_sequences(2));
    let (s, t) = (own.create_sequence(), other.create_sequence());
    assert_eq!(s.to_string(), t.to_string());
    assert_ne!(s, t);
    own.fill(s, 150);
    other.fill(t, 90);
    let foreign = Error::ForeignSequence(s);
    assert!(foreign.to_string().contains("another cache"), "{foreign}");
    let mut encoder = device().0.create_command_encoder(&Default::default());
    let gpu = &mut other.gpu;
    assert_eq!(gpu.tokens(s), Err(foreign.clone()));
    for step in [SequenceStep::decode(s), SequenceStep::append(s, 1), SequenceStep::attend(s, 1)] {
        let steps = [SequenceStep::decode(t), step];
        assert_eq!(gpu.begin_step(&mut encoder, &steps).map(drop), Err(foreign.clone()));
    }
    assert_eq!(gpu.fork(&mut encoder, s).map(drop), Err(foreign.clone()));
    assert_eq!(gpu.truncate(&mut encoder, s, 10).map(drop), Err(foreign.clone()));
    assert_eq!(gpu.reorder(&mut encoder, &[t, s], &[0, 0]).map(drop), Err(foreign.clone()));
    assert_eq!(gpu.remove_sequence(s).map(drop), Err(foreign.clone()));
    assert_eq!(gpu.submit_and_save_blocking(s).map(drop), Err(foreign.clone()));
    assert_eq!(gpu.submit_and_read_state_blocking(0, s).map(drop), Err(foreign.clone()));
    // The first operations of both have the same number, too.
    let (forked, operation) = own.gpu.fork(&mut encoder, s).unwrap();
    let (_, mine) = gpu.fork(&mut encoder, t).unwrap();
    assert_eq!(gpu.discard(operation), Err(Error::ForeignOperation));
    gpu.discard(mine).unwrap();
    own.gpu.discard(operation).unwrap();
    assert_eq!(own.gpu.tokens(forked), Err(Error::UnknownSequence(forked)));
    assert_eq!(other.cpu.step(&[SequenceStep::append(s, 0)], &[]).map(drop), Err(foreign));
    for (pair, sequence) in [(&mut own, s), (&mut other, t)] {
        pair.check_state(sequence);
        pair.step(&[SequenceStep::decode(sequence)]);
        pair.check_state(sequence);
    }
}

#[test]
fn queries_beyond_the_sequence() {
    let mut pair = Pair::new(&config());
    let s = pair.create_sequence();
    let mut encoder = device().0.create_command_encoder(&Default::default());
    let steps = [SequenceStep::new(s, 2, 3)];
    let error = pair.gpu.begin_step(&mut encoder, &steps).map(drop).unwrap_err();
    assert_eq!(error, Error::QueriesExceedTokens { got: 3, tokens: 2 });
    assert!(matches!(pair.gpu.create_sequence(), Err(Error::TooManySequences { max: 1 })));
}

#[test]
fn more_tokens_than_capacity_says_how_many_would_fit() {
    let mut pair = Pair::new(&config());
    let s = pair.create_sequence();
    pair.fill(s, 1000);
    let mut refusal = None;
    // The pool is sized in pages, so a little more than the capacity fits; then the error says exactly how
    // much still does.
    while refusal.is_none() {
        let mut encoder = device().0.create_command_encoder(&Default::default());
        let steps = [SequenceStep::append(s, 64)];
        match pair.gpu.begin_step(&mut encoder, &steps).map(drop) {
            Ok(()) => drop(pair.step(&steps)),
            Err(error) => refusal = Some(error),
        }
    }
    let Some(Error::CapacityExceeded { needed: 1, available: 0, fits }) = refusal else {
        panic!("{refusal:?}")
    };
    if fits > 0 {
        pair.step(&[SequenceStep::new(s, fits, 1)]);
    }
    let mut encoder = device().0.create_command_encoder(&Default::default());
    let error = pair.gpu.begin_step(&mut encoder, &[SequenceStep::decode(s)]).map(drop).unwrap_err();
    assert!(matches!(error, Error::CapacityExceeded { fits: 0, .. }), "{error}");
    pair.step(&[SequenceStep::attend(s, 1)]);
    pair.check_state(s);
}

fn bind_error(io: impl for<'a> Fn(&'a Buffers) -> LayerIo<'a>) -> Error {
    let buffers = Buffers {
        k: storage_buffer(&[0; 4096]),
        v: storage_buffer(&[0; 4096]),
        q: storage_buffer(&[0; 4096]),
        out: storage_buffer(&[0; 4096]),
        no_storage: device().0.create_buffer(&wgpu::BufferDescriptor {
            label: None,
            size: 4096,
            usage: wgpu::BufferUsages::COPY_DST,
            mapped_at_creation: false,
        }),
    };
    refused(|pair, _| pair.gpu.bind(&io(&buffers)).map(drop).unwrap_err())
}

struct Buffers {
    k: wgpu::Buffer,
    v: wgpu::Buffer,
    q: wgpu::Buffer,
    out: wgpu::Buffer,
    no_storage: wgpu::Buffer,
}

fn f32_view(buffer: &wgpu::Buffer) -> TensorView<'_> {
    TensorView::new(buffer, Dtype::F32)
}

impl Buffers {
    fn io(&self) -> LayerIo<'_> {
        LayerIo::new(f32_view(&self.k), f32_view(&self.v), f32_view(&self.q), f32_view(&self.out))
    }
}

#[test]
fn wrong_buffers() {
    let usage = bind_error(|b| {
        let mut io = b.io();
        io.v = Some(f32_view(&b.no_storage));
        io
    });
    assert_eq!(usage, Error::BufferUsage { tensor: "v", usage: "STORAGE" });
    let small = bind_error(|b| {
        let mut io = b.io();
        io.q = Some(f32_view(&b.q).with_offset(4000));
        io
    });
    assert_eq!(small, Error::BufferTooSmall { tensor: "q", needed: 4000 + 1024, got: 4096 });
    let overlap = bind_error(|b| {
        let mut io = b.io();
        io.v = Some(f32_view(&b.k).with_offset(256));
        io
    });
    assert_eq!(overlap, Error::Overlap { a: "k", b: "v" });
    let overlap = bind_error(|b| {
        let mut io = b.io();
        io.out = Some(f32_view(&b.q));
        io
    });
    assert_eq!(overlap, Error::Overlap { a: "q", b: "out" });
    let overlap = bind_error(|b| {
        let mut io = b.io();
        io.out = Some(f32_view(&b.k).with_offset(508));
        io
    });
    assert_eq!(overlap, Error::Overlap { a: "k", b: "out" });
    let offset = bind_error(|b| {
        let mut io = b.io();
        io.k = Some(f32_view(&b.k).with_offset(2));
        io
    });
    assert!(matches!(offset, Error::Stride { field: "offset", got: 2, .. }), "{offset}");
    let odd = bind_error(|b| {
        let mut io = b.io();
        io.k = Some(TensorView::new(&b.k, Dtype::F16).with_strides(129, 64));
        io
    });
    assert!(matches!(odd, Error::Stride { field: "token_stride", got: 129, .. }), "{odd}");
    let short = bind_error(|b| {
        let mut io = b.io();
        io.k = Some(f32_view(&b.k).with_strides(128, 32));
        io
    });
    assert!(matches!(short, Error::Stride { field: "head_stride", got: 32, .. }), "{short}");
    let shared = bind_error(|b| b.io().with_lse(f32_view(&b.out).with_offset(2048)));
    assert_eq!(shared, Error::SharedBuffer { a: "out", b: "lse" });
    let wide = bind_error(|b| b.io().with_lse(TensorView::new(&b.k, Dtype::F16)));
    assert!(matches!(wide, Error::Stride { tensor: "lse", field: "dtype", .. }), "{wide}");
    let few = bind_error(|b| b.io().with_sink_logits(f32_view(&b.v).with_offset(4096 - 8)));
    assert_eq!(few, Error::BufferTooSmall { tensor: "sink_logits", needed: 4096 + 8, got: 4096 });
    let half = bind_error(|b| {
        let mut io = b.io();
        io.k = None;
        io
    });
    assert!(matches!(half, Error::BindingIncomplete { .. }), "{half}");
    let half = bind_error(|b| {
        let mut io = b.io();
        io.out = None;
        io
    });
    assert!(matches!(half, Error::BindingIncomplete { .. }), "{half}");
}

/// What is wrong only for the length of a step is found when the layer is recorded.
#[test]
fn wrong_buffers_for_this_step() {
    let big = storage_buffer(&[0; 64 * 1024]);
    let small = storage_buffer(&[0; 4096]);
    let other = Pair::new(&config());
    let mut errors = Vec::new();
    refused(|pair, s| {
        // One token after the other, interleaved with too short a stride: two tokens overlap, one does not.
        let meet = LayerIo::append(
            f32_view(&big).with_strides(128, 64),
            f32_view(&big).with_offset(512).with_strides(128, 64),
        );
        let fused = LayerIo::append(
            f32_view(&big).with_strides(256, 64),
            f32_view(&big).with_offset(512).with_strides(256, 64),
        );
        let short = LayerIo::append(f32_view(&small), f32_view(&big));
        let none = LayerIo::attend(f32_view(&small), f32_view(&big));
        let bind = |io| pair.gpu.bind(&io).unwrap();
        let bindings = [bind(meet), bind(short), bind(none), other.gpu.bind(&fused).unwrap()];
        let fused = bind(fused);
        let mut encoder = device().0.create_command_encoder(&Default::default());
        let mut step = pair.gpu.begin_step(&mut encoder, &[SequenceStep::append(s, 9)]).unwrap();
        for binding in &bindings {
            errors.push(step.layer(&mut encoder, 0, binding).unwrap_err());
        }
        // The step can still go on.
        step.layer(&mut encoder, 0, &fused).unwrap();
        errors[0].clone()
    });
    assert_eq!(errors[0], Error::Overlap { a: "k", b: "v" });
    assert_eq!(errors[1], Error::BufferTooSmall { tensor: "k", needed: 9 * 512, got: 4096 });
    assert_eq!(errors[2], Error::BindingIncomplete { what: "keys and values" });
    assert_eq!(errors[3], Error::ForeignBinding);
}

/// Rows that meet only where both tensors are long: found although longer steps of either alone were fine.
#[test]
fn overlap_of_two_long_tensors() {
    let mut pair = Pair::new(&config());
    let s = pair.create_sequence();
    pair.fill(s, 50);
    let shared = storage_buffer(&[0; 64 * 1024]);
    let [v, q] = [&[0; 64 * 1024], &[0; 64 * 1024]].map(|zeros| storage_buffer(zeros));
    // Keys at 2048 t, outputs at 1024 + 1792 q: key 3 and output 3 share bytes.
    let k = f32_view(&shared).with_strides(512, 64);
    let out = f32_view(&shared).with_offset(1024).with_strides(448, 64);
    let binding = pair.gpu.bind(&LayerIo::new(k, f32_view(&v), f32_view(&q), out)).unwrap();
    let mut record = |append, attend| {
        let mut encoder = device().0.create_command_encoder(&Default::default());
        let steps = [SequenceStep::new(s, append, attend)];
        let mut step = pair.gpu.begin_step(&mut encoder, &steps).unwrap();
        step.layer(&mut encoder, 0, &binding)
    };
    record(9, 1).unwrap();
    record(1, 8).unwrap();
    assert_eq!(record(8, 8).unwrap_err(), Error::Overlap { a: "k", b: "out" });
}

fn config_error(config: CacheConfig) -> Error {
    crate::support::new_cache(&device().0, &device().1, &config).map(drop).unwrap_err()
}

#[test]
fn wrong_configurations() {
    let unsupported = |config, name| {
        let error = config_error(config);
        assert!(matches!(error, Error::Unsupported { name: n, .. } if n == name), "{name}: {error}");
    };
    let new = CacheConfig::new;
    assert_eq!(config_error(new(1, 5, 2, 64)), Error::HeadsDoNotDivide { query_heads: 5, kv_heads: 2 });
    unsupported(new(1, 34, 2, 64), "query_heads / kv_heads");
    unsupported(new(0, 2, 2, 64), "layers");
    unsupported(new(1, 2, 0, 64), "kv_heads");
    unsupported(new(1, 2, 2, 68), "head_dim");
    unsupported(new(1, 2, 2, 520), "head_dim");
    unsupported(new(1, 2, 2, 0), "head_dim");
    unsupported(config().with_group_size(48), "group_size");
    unsupported(config().with_value_group_size(40), "value_group_size");
    unsupported(config().with_capacity(0), "capacity");
    unsupported(config().with_max_sequences(0), "max_sequences");
    unsupported(config().with_max_step(0), "max_step");
    unsupported(config().with_max_batch_tokens(3), "max_batch_tokens");
    assert!(matches!(config_error(config().with_softmax_scale(f32::NAN)), Error::SoftmaxScale { .. }));
    assert!(matches!(config_error(config().with_sink_tokens(1001)), Error::SinksBeyondCapacity { .. }));
    let attention = |sliding_window, soft_cap| {
        let mut attention = LayerAttention::default();
        attention.sliding_window = sliding_window;
        attention.soft_cap = soft_cap;
        attention
    };
    unsupported(config().with_attention(attention(Some(0), None)), "sliding_window");
    unsupported(config().with_layer_attention(vec![attention(None, None); 3]), "layer_attention entries");
    assert!(matches!(
        config_error(config().with_attention(attention(None, Some(-1.0)))),
        Error::SoftCap { .. }
    ));
    let contradiction = |config, a: &str, b: &str| {
        let error = config_error(config);
        assert!(matches!(&error, Error::Contradiction { a: x, b: y, .. } if x == a && y == b), "{error}");
        assert!(error.to_string().contains(a) && error.to_string().contains(b), "{error}");
    };
    let two = TensorFormat::new(Bits::Two);
    let rotated = two.with_rotation();
    contradiction(new(1, 2, 2, 68).with_formats(rotated, two), "keys.rotated", "head_dim = 68");
    let sixteen = TensorFormat::new(Bits::Sixteen).with_rotation();
    contradiction(config().with_formats(two, sixteen), "values.rotated", "values.bits = 16");
    let compact = two.with_compact_parameters().with_zero_point(ZeroPoint::Rounded);
    contradiction(config().with_formats(compact, two), "keys.compact", "keys.zero_point = Rounded");
    contradiction(config().with_history_limit(31), "history_limit = 31", "residual_window = 32");
    let mut own = LayerFormat::default();
    own.history_limit = Some(0);
    contradiction(config().with_layer_format([0], own), "history_limit = 0", "residual_window = 128");
    let slab = config_error(config().with_max_slab_bytes(1000));
    assert!(matches!(slab, Error::LimitTooLow { limit: "max_slab_bytes", available: 1000, .. }), "{slab}");
}

#[test]
fn limits_too_low() {
    let low = wgpu::Limits { max_storage_buffers_per_shader_stage: 4, ..wgpu::Limits::default() };
    let (device, queue) = new_device(low);
    let error = crate::support::new_cache(&device, &queue, &config()).map(drop).unwrap_err();
    let limit = "max_storage_buffers_per_shader_stage";
    assert!(matches!(error, Error::LimitTooLow { limit: l, available: 4, .. } if l == limit), "{error}");

    let low = wgpu::Limits { max_storage_buffer_binding_size: 1 << 16, ..wgpu::Limits::default() };
    let (device, queue) = new_device(low);
    // One page of 8 heads of 512 takes 768 KiB.
    let large = CacheConfig::new(1, 8, 8, 512);
    let error = crate::support::new_cache(&device, &queue, &large).map(drop).unwrap_err();
    let limit = "max_storage_buffer_binding_size";
    assert!(
        matches!(error, Error::LimitTooLow { limit: l, available: 0x10000, .. } if l == limit),
        "{error}"
    );
    // What the library says that it needs is enough.
    let needed = KvCache::required_limits(&config()).unwrap();
    let (device, queue) = new_device(needed);
    crate::support::new_cache(&device, &queue, &config()).unwrap();
}
