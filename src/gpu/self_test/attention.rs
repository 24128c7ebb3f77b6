//! Whether the attention kernels attend: two packed blocks and some unpacked tokens, alone and together, by
//! as many queries as each kernel is for.
//!
//! A compiler that gets the packing right may still get attention wrong: Chromium's Tint did, where a
//! variable in a loop has no initializer.

use super::super::buffers::{buffer, filled_buffer, scoped};
use super::super::cache::KvCache;
use super::super::io::LayerIo;
use super::super::kernels::{KernelSet, Pass};
use super::super::read::{Gather, submit_and_read};
use super::super::work::Work;
use super::{Noise, Wrong, block_elements, content, upload, view};
use crate::config::LayerAttention;
use crate::error::Error;
use crate::geometry::Geometry;
use crate::oracle::{AttentionOutput, TwoBlocks};
use crate::plan::{Slot, StepPlan, plan_attention_over};
use wgpu::BufferUsages as Usage;

/// What [`Variant::IntegerDot`] may be off by, relative to a row's norm (for log-sum-exp, absolute): on this
/// data it is off by a tenth of that.
const INTEGER_DOT: f64 = 0.1;

/// What queries attend to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Window,
    History,
    Both,
}

/// A trial, and what it should give.
struct Trial {
    queries: u32,
    part: Part,
    plan: StepPlan,
    expected: AttentionOutput,
}

/// The first kernel of a class of layers that attends wrongly, if there is one. The class has a page.
///
/// What steps alone bring about is not tried: more than a page of history, new tokens in the staging buffer,
/// sliding windows.
pub(in super::super) async fn attention(cache: &mut KvCache, class: usize) -> Result<Option<Wrong>, Error> {
    let g = as_tried(cache.classes[class].geometry());
    let (mut noise, offset) = (Noise(3), |channel: u32| (channel % 5) as f32 * 0.25);
    let keys = block_elements(&g, |_, _, channel| noise.next() + offset(channel));
    let values = block_elements(&g, |_, head, channel| noise.next() + offset(channel + head));
    let counts = query_counts(&g);
    // Logits about as large as those of a model, whatever the scale.
    let amplitude = (2.0 / (g.softmax_scale * (g.layout.head_dim as f32).sqrt())).clamp(1e-30, 1e30);
    let row = (g.query_heads * g.layout.head_dim) as usize;
    let queries: Vec<f32> =
        (0..row * counts.iter().max().map_or(0, |n| *n as usize)).map(|_| amplitude * noise.next()).collect();

    let blocks = TwoBlocks::new(&g, &keys, &values);
    let trial = |count: u32, part: Part| {
        let packed = if part == Part::Window { 0 } else { 2 };
        // Each query is one of the tokens: the same slots again, where a group has fewer.
        let held = if part == Part::History { 0 } else { g.layout.group.max(count) };
        let window: Vec<Slot> = (0..held).map(|i| Slot::ring(i % g.layout.group)).collect();
        let plan = plan_attention_over(&g, count, packed, &window);
        let expected = blocks.attend(&g, &plan, &queries[..count as usize * row]);
        Trial { queries: count, part, plan, expected }
    };
    let parts = [Part::Window, Part::History, Part::Both];
    let trials: Vec<Trial> = counts.iter().flat_map(|n| parts.map(|part| trial(*n, part))).collect();
    let outputs = run(cache, class, &g, &keys, &values, &queries, &trials).await?;
    let kernels = &cache.classes[class].kernels;
    let variant = kernels.variant();
    let of_counts = counts.iter().zip(outputs.chunks(3).zip(trials.chunks(3)));
    let mut wrong = of_counts.filter_map(|(&queries, (outputs, trials))| {
        let difference = |i: usize| difference(&g, kernels, &outputs[i], &trials[i]);
        let (stem, detail) = culprit(&g, queries, [0, 1, 2].map(difference))?;
        let kernel = format!("{stem} ({} rows, {variant:?})", g.row_tile(queries));
        Some(Wrong { kernel, detail })
    });
    Ok(wrong.next())
}

/// The kernel that has made one of the trials of window, history and both go wrong.
fn culprit(g: &Geometry, queries: u32, wrong: [Option<String>; 3]) -> Option<(&'static str, String)> {
    let folds = g.folds(queries);
    let (window, history) = match (folds, g.layout.keys.rotated) {
        (true, false) => ("prefill_unpacked", "prefill_packed"),
        (false, false) => ("decode_unpacked", "decode_packed"),
        // Only packed keys meet rotated queries.
        (true, true) => ("prefill_unpacked", "prefill_packed or rotate_queries"),
        (false, true) => ("decode_unpacked", "decode_packed or rotate_queries"),
    };
    match wrong {
        [None, None, None] => None,
        [Some(detail), None, _] => Some((window, detail)),
        [None, Some(detail), _] => Some((history, detail)),
        // The window extends what the history of a long chunk has left.
        [None, None, Some(detail)] if folds => Some((window, detail)),
        // What both go through.
        [Some(detail), Some(_), _] | [None, None, Some(detail)] => Some(("merge", detail)),
    }
}

/// The same sizes, with layers that see everything. Where some layers cap their logits, so do these.
fn as_tried(g: &Geometry) -> Geometry {
    // A cap that both of the formulas for it meet.
    let soft_cap = g.has_soft_caps().then_some(1.0);
    let mut tried = g.clone();
    tried.attention_classes = vec![LayerAttention { soft_cap, ..LayerAttention::default() }];
    tried.layer_classes.fill(0);
    tried
}

/// The least number of queries for each tile of rows, and for long chunks.
fn query_counts(g: &Geometry) -> Vec<u32> {
    let mut counts: Vec<u32> = Vec::new();
    for n in 1..=g.max_step {
        if counts.iter().all(|known| g.row_tile(*known) != g.row_tile(n)) {
            counts.push(n);
        }
        if g.folds(n) {
            break;
        }
    }
    counts
}

/// Runs all trials in one command buffer; returns the output and the log-sum-exp of each.
async fn run(
    cache: &mut KvCache,
    class: usize,
    g: &Geometry,
    keys: &[f32],
    values: &[f32],
    queries: &[f32],
    trials: &[Trial],
) -> Result<Vec<(Vec<f32>, Vec<f32>)>, Error> {
    let device = cache.device.clone();
    let (k, v, q) = (upload(&device, keys)?, upload(&device, values)?, upload(&device, queries)?);
    let append = cache.bind(&LayerIo::append(view(&k), view(&v)))?;
    let mut results = Vec::with_capacity(trials.len());
    for trial in trials {
        let rows = u64::from(trial.queries * g.query_heads);
        let usage = Usage::STORAGE | Usage::COPY_SRC;
        let out = buffer(&device, "kivi self-test", rows * u64::from(g.layout.head_dim) * 4, usage).await?;
        let lse = buffer(&device, "kivi self-test", rows * 4, usage).await?;
        let binding = cache.bind(&LayerIo::attend(view(&q), view(&out)).with_lse(view(&lse)))?;
        results.push((out, lse, binding));
    }

    let class = &mut cache.classes[class];
    let content = content(g);
    let plans = content.iter().chain(trials.iter().map(|trial| &trial.plan));
    let works: Vec<Work> = plans.map(|plan| Work::new(g, &class.kernels, plan)).collect();
    works.iter().try_for_each(|work| class.build_for(work))?;
    // One buffer for all of them: those that recycle plans are left to the host's steps.
    let words: Vec<u32> = works.iter().flat_map(|work| &work.words).copied().collect();
    let words = filled_buffer(&device, "kivi self-test", bytemuck::cast_slice(&words), Usage::COPY_SRC)?;
    let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
    let mut at = 0;
    for (n, work) in works.iter().enumerate() {
        let bytes = 4 * work.words.len() as u64;
        encoder.copy_buffer_to_buffer(&words, at, &class.shared.plan, 0, bytes);
        at += bytes;
        let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
        match n {
            0 => class.dispatch_layer(&mut pass, work, 0, &append, true),
            1 => class.dispatch(&mut pass, &work.changes, 0, None),
            _ => class.dispatch_layer(&mut pass, work, 0, &results[n - 2].2, false),
        }
    }
    scoped(&device, || cache.queue.submit([encoder.finish()]))?;

    let mut gather = Gather::default();
    for (out, lse, _) in &results {
        gather.add(out, 0, out.size());
        gather.add(lse, 0, lse.size());
    }
    let words = submit_and_read(&device, &cache.queue, &gather).await?;
    let mut rest = words.iter().map(|word| f32::from_bits(*word));
    let mut take = |bytes: u64| rest.by_ref().take(bytes as usize / 4).collect();
    Ok(results.iter().map(|(out, lse, _)| (take(out.size()), take(lse.size()))).collect())
}

/// The first row that is off by more than the kernels' bound.
fn difference(
    g: &Geometry,
    kernels: &KernelSet,
    (out, lse): &(Vec<f32>, Vec<f32>),
    Trial { queries, part, expected, .. }: &Trial,
) -> Option<String> {
    let head_dim = g.layout.head_dim as usize;
    // Tiles of many rows and long chunks have f32 products.
    let rounds = *part != Part::Window
        && !g.folds(*queries)
        && kernels.rounds_queries(Pass::DecodePacked(g.row_tile(*queries)));
    let noise = if rounds { INTEGER_DOT } else { 0.0 };
    let rows = out.chunks(head_dim).zip(expected.out.chunks(head_dim));
    rows.enumerate().find_map(|(row, (out, reference))| {
        let of_products = 2f64.powi(-24) * expected.magnitude[row];
        let norm = reference.iter().map(|x| x * x).sum::<f64>().sqrt();
        let squares = out.iter().zip(reference).map(|(x, r)| (f64::from(*x) - r).powi(2));
        let error = squares.sum::<f64>().sqrt() / norm;
        let lse_error = (f64::from(lse[row]) - expected.lse[row]).abs();
        // A NaN is no number that is small.
        let right =
            error <= 1e-5 + 4.0 * of_products + noise && lse_error <= 1e-5 + 8.0 * of_products + noise;
        (!right).then(|| {
            format!("row {row} is off by {error:.1e} of its norm, its log-sum-exp by {lse_error:.1e}")
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::CacheConfig;
    use crate::gpu::cache::KvCacheOptions;
    use crate::gpu::kernels::{Pass, Variant};
    use std::io::Write;

    fn device() -> (wgpu::Device, wgpu::Queue) {
        pollster::block_on(async {
            let instance =
                wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle_from_env());
            let adapter = instance.request_adapter(&Default::default()).await.unwrap();
            let optional = std::env::var("KIVI_OPTIONAL_FEATURES").map_or(true, |v| v != "0");
            let wanted = if optional { KvCache::optional_features() } else { wgpu::Features::empty() };
            let required_features = adapter.features() & wanted;
            let descriptor = wgpu::DeviceDescriptor { required_features, ..Default::default() };
            adapter.request_device(&descriptor).await.unwrap()
        })
    }

    /// Moves a declaration to before the loop that it is in: what a compiler does that zeroes such a variable
    /// only once.
    fn hoist(declaration: &str, header: &str) -> impl Fn(&str) -> String {
        move |text| {
            let (before, rest) = text.split_once(header).expect(header);
            assert!(rest.contains(declaration), "{declaration}");
            format!("{before}{declaration}\n{header}{}", rest.replacen(declaration, "", 1))
        }
    }

    fn replace(this: &str, that: &str) -> impl Fn(&str) -> String {
        move |text| {
            assert!(text.contains(this), "{this}");
            text.replace(this, that)
        }
    }

    /// A kernel that is broken in one place is found, by its name, of each family; where the library has
    /// chosen it, portable ones take its place.
    #[test]
    fn a_kernel_that_attends_wrongly_is_refused_or_replaced() {
        type Edit = Box<dyn Fn(&str) -> String>;
        let moved = |declaration, header| -> Edit { Box::new(move |text| hoist(declaration, header)(text)) };
        let edit = |this, that| -> Edit { Box::new(move |text| replace(this, that)(text)) };
        let keys = "    for (var word = slice; word < KEY_LOW_WORDS; word += KEY_SLICES) {";
        let channels = "    for (var first = 0u; first < HEAD_VECS; first += CHUNK_VECS) {";
        let splits = "    for (var i = 0u; i < run.splits; i++) {";
        let portable: Vec<(Pass, &str, Edit)> = vec![
            (Pass::DecodePacked(16), "decode_packed", moved("        var part = Logits();", keys)),
            (Pass::PrefillPacked, "prefill_packed", moved("        var part = TileLogits();", channels)),
            (Pass::PrefillPacked, "prefill_packed", moved("            var part = TileSums();", splits)),
            (
                Pass::DecodeUnpacked(16),
                "decode_unpacked",
                edit("highest = max(highest, sh[", "highest = (sh["),
            ),
            (Pass::Merge(16), "merge", edit("sum = fma(weight, head_part.y, sum)", "sum = head_part.y")),
            (Pass::Merge(16), "merge", edit("const LN_2: f32 = 0.69", "const LN_2: f32 = 0.70")),
        ];
        let dots = vec![(Pass::DecodePacked(8), "decode_packed", edit("q.w, c3)", "q.w, c2)"))];
        let clusters =
            vec![(Pass::PrefillUnpacked, "prefill_unpacked", edit("total *= shrink", "total *= 1.0"))];
        let (device, queue) = device();
        for (variant, heads, cases) in [
            (Variant::Portable, 16, portable),
            (Variant::IntegerDot, 8, dots),
            (Variant::Subgroups, 16, clusters),
        ] {
            let chosen = KvCacheOptions::default().with_variant(variant);
            let config = CacheConfig::new(1, heads, 1, 64).with_max_step(32);
            let mut cache = match KvCache::with_options_blocking(&device, &queue, &config, &chosen) {
                Ok(cache) => cache,
                Err(Error::VariantUnavailable { needed, .. }) if variant != Variant::Portable => {
                    // Past the test harness, which would hide it.
                    let _ = writeln!(std::io::stderr(), "skipped: {variant:?} kernels need {needed}");
                    continue;
                }
                Err(other) => panic!("{other}"),
            };
            for (pass, name, edit) in cases {
                cache.classes[0].kernels.break_pass(pass, edit);
                match pollster::block_on(cache.try_out(0, &chosen)) {
                    Err(Error::WrongAttention { kernel, .. }) => {
                        assert!(kernel.starts_with(name), "{kernel}")
                    }
                    other => panic!("{pass:?} of {variant:?}: {other:?}"),
                }
                let replaced = pollster::block_on(cache.try_out(0, &KvCacheOptions::default()));
                assert_eq!(replaced.is_ok(), variant != Variant::Portable, "{replaced:?}");
                assert_eq!(cache.variant(), Variant::Portable);
                cache.classes[0].kernels.break_pass(pass, str::to_string);
            }
        }
    }
}
