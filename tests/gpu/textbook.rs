//! Attention against textbook attention in f64 that shares no code with the library: sliding windows, soft
//! caps and learned sinks of every size.
//!
//! Keys and values are kept in 16 bits and are exact in them, so that nothing but attention is compared.

use crate::support::{Random, device, full, poisoned_buffer, read_buffer, skipped, storage_buffer};
use kivi_wgpu::{
    Bits, CacheConfig, Dtype, Error, KvCache, LayerAttention, LayerIo, SequenceId, SequenceStep, TensorView,
    Variant, wgpu,
};

const QUERY_HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = 64;

/// Everything that was ever appended: rows of `KV_HEADS * DIM`.
#[derive(Default)]
struct Tokens {
    keys: Vec<Vec<f32>>,
    values: Vec<Vec<f32>>,
}

/// Output and log-sum-exp of a row, and the largest Σ|q·k| of a token.
struct Row {
    out: Vec<f64>,
    lse: f64,
    magnitude: f64,
}

/// Attention of a query at `position`.
fn textbook(
    tokens: &Tokens,
    query: &[f32],
    head: usize,
    position: usize,
    attention: LayerAttention,
    sink: Option<f32>,
) -> Row {
    let kv = head / (QUERY_HEADS / KV_HEADS) * DIM;
    let first = match attention.sliding_window {
        Some(n) => (position + 1).saturating_sub(n as usize),
        None => 0,
    };
    let scale = 1.0 / (DIM as f64).sqrt();
    let mut logits = Vec::new();
    let mut magnitude: f64 = 0.0;
    for key in &tokens.keys[first..=position] {
        let products: Vec<f64> = query
            .iter()
            .zip(&key[kv..kv + DIM])
            .map(|(q, k)| f64::from(*q) * f64::from(*k) * scale)
            .collect();
        magnitude = magnitude.max(products.iter().map(|p| p.abs()).sum());
        let logit: f64 = products.iter().sum();
        logits.push(match attention.soft_cap {
            Some(cap) => f64::from(cap) * (logit / f64::from(cap)).tanh(),
            None => logit,
        });
    }
    let sink = sink.map_or(f64::NEG_INFINITY, f64::from);
    let most = logits.iter().copied().fold(sink, f64::max);
    let weights: Vec<f64> = logits.iter().map(|l| (l - most).exp()).collect();
    let sum = weights.iter().sum::<f64>() + (sink - most).exp();
    let values = &tokens.values[first..=position];
    let channel = |c| weights.iter().zip(values).map(|(w, v)| w * f64::from(v[kv + c])).sum::<f64>() / sum;
    Row { out: (0..DIM).map(channel).collect(), lse: most + sum.ln(), magnitude }
}

/// Numbers that f16 holds exactly.
fn exact(random: &mut Random, n: usize) -> Vec<f32> {
    (0..n).map(|_| half::f16::from_f32(random.normal()).to_f32()).collect()
}

/// A cache whose layers attend in different ways to the same tokens.
struct Case {
    cache: KvCache,
    attention: Vec<LayerAttention>,
    tokens: Tokens,
    random: Random,
    sequence: SequenceId,
}

impl Case {
    fn new(attention: &[LayerAttention], sinks: u32, variant: Variant) -> Result<Case, Error> {
        let config =
            CacheConfig::new(attention.len() as u32, QUERY_HEADS as u32, KV_HEADS as u32, DIM as u32)
                .with_bits(Bits::Sixteen, Bits::Sixteen)
                .with_residual_window(32)
                .with_sink_tokens(sinks)
                .with_layer_attention(attention.to_vec());
        let options = crate::support::options_on(&device().0).with_variant(variant);
        let mut cache = KvCache::with_options_blocking(&device().0, &device().1, &config, &options)?;
        let sequence = cache.create_sequence()?;
        let (attention, tokens) = (attention.to_vec(), Tokens::default());
        Ok(Case { cache, attention, tokens, random: Random(5), sequence })
    }

    /// Appends `append` tokens and compares the attention of the newest `queries`.
    fn step(&mut self, append: usize, queries: usize, sinks: Option<[f32; QUERY_HEADS]>) {
        let row = KV_HEADS * DIM;
        let (k, v) = (exact(&mut self.random, append * row), exact(&mut self.random, append * row));
        let q: Vec<f32> = self.random.normals(queries * QUERY_HEADS * DIM);
        self.tokens.keys.extend(k.chunks(row).map(<[f32]>::to_vec));
        self.tokens.values.extend(v.chunks(row).map(<[f32]>::to_vec));

        let [k, v, q_buffer] = [&k, &v, &q].map(|x| storage_buffer(bytemuck::cast_slice(x)));
        let sink_buffer = storage_buffer(bytemuck::cast_slice(&sinks.unwrap_or_default()));
        let view = |b| TensorView::new(b, Dtype::F32);
        let outputs: Vec<_> = self
            .attention
            .iter()
            .map(|_| {
                (poisoned_buffer(queries * QUERY_HEADS * DIM * 4), poisoned_buffer(queries * QUERY_HEADS * 4))
            })
            .collect();
        let mut encoder = device().0.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        let steps = [SequenceStep::new(self.sequence, append as u32, queries as u32)];
        let mut step = self.cache.begin_step(&mut encoder, &steps).unwrap();
        for (layer, (out, lse)) in (0..).zip(&outputs) {
            let io = {
                let mut io = LayerIo::default();
                io.k = (append > 0).then(|| view(&k));
                io.v = (append > 0).then(|| view(&v));
                io.q = (queries > 0).then(|| view(&q_buffer));
                io.out = (queries > 0).then(|| view(out));
                io.sink_logits = sinks.map(|_| view(&sink_buffer));
                io.lse = (queries > 0).then(|| view(lse));
                io
            };
            let binding = step.bind(&io).unwrap();
            step.layer(&mut encoder, layer, &binding).unwrap();
        }
        step.finish().unwrap();
        device().1.submit([encoder.finish()]);
        if queries == 0 {
            return;
        }
        let read = |b| bytemuck::pod_collect_to_vec::<u8, f32>(&read_buffer(b));
        for (attention, (out, lse)) in self.attention.iter().zip(&outputs) {
            let (out, lse) = (read(out), read(lse));
            for (i, query) in q.chunks(DIM).enumerate() {
                let (position, head) = (self.tokens.keys.len() - queries + i / QUERY_HEADS, i % QUERY_HEADS);
                let sink = sinks.map(|sinks| sinks[head]);
                let expected = textbook(&self.tokens, query, head, position, *attention, sink);
                let norm = expected.out.iter().map(|x| x * x).sum::<f64>().sqrt();
                let error =
                    expected.out.iter().zip(&out[i * DIM..]).map(|(x, o)| (x - f64::from(*o)).powi(2));
                let error = error.sum::<f64>().sqrt();
                let products = 2f64.powi(-24) * expected.magnitude;
                // A sink may take all but nothing.
                let bound = (1e-5 + 4.0 * products) * norm + 1e-30;
                let what = format!("{attention:?}, sink {sink:?}, row {i}, position {position}");
                assert!(error <= bound, "{what}: error {error:e}, bound {bound:e}");
                let lse_error = (f64::from(lse[i]) - expected.lse).abs();
                let bound = 1e-5 + 8.0 * products + 2f64.powi(-23) * expected.lse.abs();
                assert!(lse_error <= bound, "{what}: log-sum-exp {} of {}", lse[i], expected.lse);
            }
        }
    }
}

/// Runs with the portable kernels, and those for subgroups where they can run.
fn cases(attention: &[LayerAttention], sinks: u32, run: impl Fn(&mut Case)) {
    for variant in [Variant::Portable, Variant::Subgroups] {
        match Case::new(attention, sinks, variant) {
            Ok(mut case) => run(&mut case),
            Err(Error::VariantUnavailable { needed, .. }) if variant != Variant::Portable => {
                skipped(variant, needed);
            }
            Err(other) => panic!("{other}"),
        }
    }
}

fn layer(sliding_window: Option<u32>, soft_cap: Option<f32>) -> LayerAttention {
    {
        let mut attention = LayerAttention::default();
        attention.sliding_window = sliding_window;
        attention.soft_cap = soft_cap;
        attention
    }
}

/// Steps of one token, of a few and of many, over one page of history and over several.
const STEPS: [(usize, usize); 9] =
    [(1, 1), (40, 40), (1, 1), (3, 3), (300, 0), (1, 1), (400, 30), (8, 8), (1, 1)];

#[test]
fn sliding_windows_of_every_size() {
    let windows = [1, 2, 31, 32, 33, 100, 255, 256, 257, 600, 1 << 30, 1 << 31, u32::MAX - 1, u32::MAX];
    let attention = windows.map(|n| layer(Some(n), None));
    for sinks in [0, 5] {
        cases(&attention, sinks, |case| STEPS.iter().for_each(|&(n, q)| case.step(n, q, None)));
    }
}

#[test]
fn soft_caps_of_every_size() {
    let caps = [1e-30, 1e-10, 1e-3, 0.3, 5.0, 50.0, 1e4, 1e20, 1e38, 3e38, f32::MAX];
    let attention: Vec<_> = caps.into_iter().map(|cap| layer(None, Some(cap))).collect();
    cases(&attention, 4, |case| STEPS.iter().for_each(|&(n, q)| case.step(n, q, None)));
}

/// Learned sinks beside caps and windows, over more splits than one invocation of the merge takes: of no
/// weight, of some, and of all but all of it.
#[test]
fn sinks_with_caps_and_windows_over_many_splits() {
    let attention: Vec<_> = [None, Some(1), Some(90), Some(3000)]
        .into_iter()
        .flat_map(|window| [None, Some(0.3), Some(30.0)].map(|cap| layer(window, cap)))
        .collect();
    let sinks = [
        [0.5, -3.0, 2.0, 4.0],
        [f32::NEG_INFINITY, 0.0, f32::NEG_INFINITY, -1e30],
        [200.0, 250.0, 1000.0, 3e4],
        [-200.0, 30.0, f32::NEG_INFINITY, 90.0],
    ];
    cases(&attention, 2, |case| {
        for pages in 0..12 {
            // Most of the context is there at the first steps that count.
            for _ in 0..if pages == 0 { 1 } else { 2 } {
                case.step(512, 0, None);
            }
            if pages % 4 == 0 || full() {
                for sinks in sinks {
                    case.step(1, 1, Some(sinks));
                    case.step(2, 20, Some(sinks));
                }
            }
        }
    });
}
