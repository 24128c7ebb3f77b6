//! Whether the attention kernels attend: two packed blocks and some unpacked tokens, alone and together, by
//! as many queries as each kernel is for.
//!
//! A compiler that gets the packing right may still get attention wrong: Chromium's Tint did, where a
//! variable in a loop has no initializer.

use super::{Noise, Wrong, block_elements, content, upload, view};
use crate::config::LayerAttention;
use crate::error::Error;
use crate::gpu::binding::LayerBinding;
use crate::gpu::device::{Gather, buffer, filled_buffer, scoped, submit_and_read};
use crate::gpu::executor::{Gpu, Part as Recorded};
use crate::gpu::io::LayerIo;
use crate::gpu::work::Work;
use crate::ids::CacheId;
use crate::oracle::{AttentionOutput, TwoBlocks};
use crate::plan::{Plan, Slot, attend_over};
use crate::schedule::Tiles;
use crate::shape::Shape;
use wgpu::BufferUsages as Usage;

/// What queries attend to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Unpacked,
    Packed,
    Both,
}

/// A trial, and what it should give.
struct Trial {
    queries: u32,
    plan: Plan,
    expected: AttentionOutput,
}

/// The first kernel of a class of layers that attends wrongly, if there is one. The class has a page.
///
/// What steps alone bring about is not tried: more than a page, new tokens in the staging buffer,
/// sliding windows.
pub(super) async fn attention(gpu: &mut Gpu, cache: CacheId, class: usize) -> Result<Option<Wrong>, Error> {
    let s = as_tried(gpu.classes[class].shape());
    let tiles = gpu.classes[class].sizes.tiles.clone();
    let (mut noise, offset) = (Noise(3), |channel: u32| (channel % 5) as f32 * 0.25);
    let keys = block_elements(&s, |_, _, channel| noise.next() + offset(channel));
    let values = block_elements(&s, |_, head, channel| noise.next() + offset(channel + head));
    let counts = query_counts(&tiles, s.max_step);
    // Logits about as large as those of a model, whatever the scale.
    let amplitude = (2.0 / (s.softmax_scale * (s.layout.head_dim as f32).sqrt())).clamp(1e-30, 1e30);
    let row = (s.query_heads * s.layout.head_dim) as usize;
    let queries: Vec<f32> =
        (0..row * counts.iter().max().map_or(0, |n| *n as usize)).map(|_| amplitude * noise.next()).collect();

    let blocks = TwoBlocks::new(&s, &keys, &values);
    let trial = |count: u32, part: Part| {
        let packed = if part == Part::Unpacked { 0 } else { 2 };
        // Each query is one of the tokens: the same slots again, where a group has fewer.
        let held = if part == Part::Packed { 0 } else { s.layout.group.max(count) };
        let window: Vec<Slot> = (0..held).map(|i| Slot::ring(i % s.layout.group)).collect();
        let plan = attend_over(&s, count, packed, &window);
        let expected = blocks.attend(&s, &plan, &queries[..count as usize * row]);
        Trial { queries: count, plan, expected }
    };
    let parts = [Part::Unpacked, Part::Packed, Part::Both];
    let trials: Vec<Trial> = counts.iter().flat_map(|n| parts.map(|part| trial(*n, part))).collect();
    let outputs = run(gpu, cache, class, &s, [&keys, &values, &queries], &trials).await?;
    let variant = gpu.classes[class].kernels.variant();
    let of_counts = counts.iter().zip(outputs.chunks(3).zip(trials.chunks(3)));
    let mut wrong = of_counts.filter_map(|(&queries, (outputs, trials))| {
        let difference = |i: usize| difference(&s, &outputs[i], &trials[i]);
        let (stem, detail) = culprit(&s, &tiles, queries, [0, 1, 2].map(difference))?;
        let kernel = format!("{stem} ({} rows, {variant:?})", tiles.row_tile(queries));
        Some(Wrong { kernel, detail })
    });
    Ok(wrong.next())
}

/// The kernel that has made one of the trials of unpacked tokens, packed ones and both go wrong.
fn culprit(
    s: &Shape,
    tiles: &Tiles,
    queries: u32,
    wrong: [Option<String>; 3],
) -> Option<(&'static str, String)> {
    let is_prefill = tiles.is_prefill(queries);
    let (unpacked, packed) = match (is_prefill, s.layout.keys.rotated) {
        (true, false) => ("prefill_unpacked", "prefill_packed"),
        (false, false) => ("decode", "decode"),
        // Only packed keys meet rotated queries.
        (true, true) => ("prefill_unpacked", "prefill_packed or rotate_queries"),
        (false, true) => ("decode", "decode or rotate_queries"),
    };
    match wrong {
        [None, None, None] => None,
        [Some(detail), None, _] => Some((unpacked, detail)),
        [None, Some(detail), _] => Some((packed, detail)),
        // Unpacked tokens extend what the packed ones of a long chunk have left.
        [None, None, Some(detail)] if is_prefill => Some((unpacked, detail)),
        // What both go through.
        [Some(detail), Some(_), _] | [None, None, Some(detail)] => Some(("merge", detail)),
    }
}

/// The same sizes, with layers that see everything. Where some layers cap their logits, so do these.
fn as_tried(s: &Shape) -> Shape {
    // A cap that both of the formulas for it meet.
    let soft_cap = s.has_soft_caps().then_some(1.0);
    let mut tried = s.clone();
    tried.attention = vec![LayerAttention { soft_cap, ..LayerAttention::default() }];
    tried.layer_attention.fill(0);
    tried
}

/// The least number of queries for each tile of rows, and for long chunks.
fn query_counts(tiles: &Tiles, max_step: u32) -> Vec<u32> {
    let mut counts: Vec<u32> = Vec::new();
    for n in 1..=max_step {
        if counts.iter().all(|known| tiles.row_tile(*known) != tiles.row_tile(n)) {
            counts.push(n);
        }
        if tiles.is_prefill(n) {
            break;
        }
    }
    counts
}

/// Runs all trials in one command buffer; returns the output and the log-sum-exp of each.
async fn run(
    gpu: &mut Gpu,
    cache: CacheId,
    class: usize,
    s: &Shape,
    [keys, values, queries]: [&[f32]; 3],
    trials: &[Trial],
) -> Result<Vec<(Vec<f32>, Vec<f32>)>, Error> {
    let (device, queue) = (gpu.device().clone(), gpu.queue.clone());
    let (k, v, q) = (upload(&device, keys)?, upload(&device, values)?, upload(&device, queries)?);
    let append = LayerBinding::new(gpu, cache, &LayerIo::append(view(&k), view(&v)))?;
    let mut results = Vec::with_capacity(trials.len());
    for trial in trials {
        let rows = u64::from(trial.queries * s.query_heads);
        let usage = Usage::STORAGE | Usage::COPY_SRC;
        let out = buffer(&device, "kivi self-test", rows * u64::from(s.layout.head_dim) * 4, usage).await?;
        let lse = buffer(&device, "kivi self-test", rows * 4, usage).await?;
        let io = LayerIo::attend(view(&q), view(&out)).with_lse(view(&lse));
        let binding = LayerBinding::new(gpu, cache, &io)?;
        results.push((out, lse, binding));
    }

    let class = &mut gpu.classes[class];
    let content = content(s);
    let plans = content.iter().chain(trials.iter().map(|trial| &trial.plan));
    let (tiles, room) = (&class.sizes.tiles, class.sizes.budget.scratch_partials);
    let works: Vec<Work> = plans.map(|plan| Work::new(s, tiles, room, &class.kernels, plan)).collect();
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
            0 => class.dispatch_layer(&mut pass, work, 0, append.groups(), Recorded::Whole),
            1 => class.dispatch(&mut pass, &work.changes, 0, None),
            _ => {
                let groups = results[n - 2].2.groups();
                class.dispatch_layer(&mut pass, work, 0, groups, Recorded::Attention);
            }
        }
    }
    scoped(&device, || queue.submit([encoder.finish()]))?;

    let mut gather = Gather::default();
    for (out, lse, _) in &results {
        gather.add(out, 0, out.size());
        gather.add(lse, 0, lse.size());
    }
    let words = submit_and_read(&device, &queue, &gather).await?;
    let mut rest = words.iter().map(|word| f32::from_bits(*word));
    let mut take = |bytes: u64| rest.by_ref().take(bytes as usize / 4).collect();
    Ok(results.iter().map(|(out, lse, _)| (take(out.size()), take(lse.size()))).collect())
}

/// The first row that is off by more than the kernels' bound.
fn difference(
    s: &Shape,
    (out, lse): &(Vec<f32>, Vec<f32>),
    Trial { expected, .. }: &Trial,
) -> Option<String> {
    let head_dim = s.layout.head_dim as usize;
    let rows = out.chunks(head_dim).zip(expected.out.chunks(head_dim));
    rows.enumerate().find_map(|(row, (out, reference))| {
        let of_products = 2f64.powi(-24) * expected.magnitude[row];
        let norm = reference.iter().map(|x| x * x).sum::<f64>().sqrt();
        let squares = out.iter().zip(reference).map(|(x, r)| (f64::from(*x) - r).powi(2));
        let error = squares.sum::<f64>().sqrt() / norm;
        let lse_error = (f64::from(lse[row]) - expected.lse[row]).abs();
        // A NaN is no number that is small.
        let right = error <= 1e-5 + 4.0 * of_products && lse_error <= 1e-5 + 8.0 * of_products;
        (!right).then(|| {
            format!("row {row} is off by {error:.1e} of its norm, its log-sum-exp by {lse_error:.1e}")
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::CacheConfig;
    use crate::gpu::kernels::{Pass, Reads, Variant};
    use crate::gpu::self_test::try_out;
    use crate::gpu::{KvCache, KvCacheOptions};
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
        let channels = "    for (var first = 0u; first < HEAD_VECS; first += CHUNK_VECS) {";
        let splits = "    for (var i = 0u; i < run.splits; i++) {";
        let portable: Vec<(Pass, &str, Edit)> = vec![
            (Pass::Decode(Reads::Both, 8), "decode", edit("+ sh_offsets[at + 3u]", "+ sh_offsets[at + 2u]")),
            (
                Pass::Decode(Reads::Both, 8),
                "decode",
                edit("min(4u * quad / CHANNEL_GROUP", "min(4u / CHANNEL_GROUP"),
            ),
            (
                Pass::Decode(Reads::Both, 8),
                "decode",
                edit("token_vector(split, 1u, head, token + 2u", "token_vector(split, 1u, head, token"),
            ),
            (Pass::PrefillPacked, "prefill_packed", moved("        var part = TileLogits();", channels)),
            (Pass::PrefillPacked, "prefill_packed", moved("            var part = TileSums();", splits)),
            (Pass::Merge(8), "merge", edit("sum = fma(weight, head_part.y, sum)", "sum = head_part.y")),
            (Pass::Merge(8), "merge", edit("const LN_2: f32 = 0.69", "const LN_2: f32 = 0.70")),
        ];
        let clusters =
            vec![(Pass::PrefillUnpacked, "prefill_unpacked", edit("total *= shrink", "total *= 1.0"))];
        let (device, queue) = device();
        for (variant, heads, cases) in [(Variant::Portable, 16, portable), (Variant::Subgroups, 16, clusters)]
        {
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
            let id = cache.id();
            for (pass, name, edit) in cases {
                cache.lifecycle.executor_mut().classes[0].kernels.break_pass(pass, edit);
                match pollster::block_on(try_out(cache.lifecycle.executor_mut(), id, 0, &chosen)) {
                    Err(Error::WrongAttention { kernel, .. }) => {
                        assert!(kernel.starts_with(name), "{kernel}")
                    }
                    other => panic!("{pass:?} of {variant:?}: {other:?}"),
                }
                let replaced = pollster::block_on(try_out(
                    cache.lifecycle.executor_mut(),
                    id,
                    0,
                    &KvCacheOptions::default(),
                ));
                assert_eq!(replaced.is_ok(), variant != Variant::Portable, "{replaced:?}");
                assert_eq!(cache.variant(), Variant::Portable);
                cache.lifecycle.executor_mut().classes[0].kernels.break_pass(pass, str::to_string);
            }
        }
    }
}
