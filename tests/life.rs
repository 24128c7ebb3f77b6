//! The life of the oracle's cache: programs of every operation against the naive model, and snapshots.

mod python;
mod reference;

use kivi_wgpu::oracle::{CpuCache, LayerInput};
use kivi_wgpu::{
    Axis, Bits, CacheConfig, Dtype, Error, Operation, Preset, SequenceId, SequenceStep, Snapshot,
    TensorFormat, ZeroPoint,
};
use proptest::prelude::*;
use reference::NaiveSequence;
use reference::contents::Contents;
use reference::program::{Executor, Machine, Op, Work, program};
use reference::recorded::{self, Recorded};

struct Oracle {
    cache: CpuCache,
    contents: Contents,
    /// The cache before each operation that was thrown away: the oracle has no encoder, it carries everything
    /// out at once.
    before: Vec<CpuCache>,
}

impl Oracle {
    fn machine(config: &CacheConfig) -> Machine<Oracle> {
        let (cache, contents) = (CpuCache::new(config).unwrap(), Contents::new(config));
        Machine::new(config, Oracle { cache, contents, before: Vec::new() })
    }

    fn inputs<'a>(&self, [k, v, q]: &'a [Vec<f32>; 3]) -> Vec<LayerInput<'a>> {
        vec![LayerInput { k, v, q, ..Default::default() }; self.contents.config.layers as usize]
    }

    fn note<T>(
        &mut self,
        work: Work,
        run: impl FnOnce(&mut CpuCache) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let before = (work == Work::ThrownAway).then(|| self.cache.clone());
        let done = run(&mut self.cache)?;
        self.before.extend(before);
        Ok(done)
    }
}

impl Executor for Oracle {
    fn create(&mut self) -> Result<SequenceId, Error> {
        self.cache.create_sequence()
    }

    fn remove(&mut self, id: SequenceId, work: Work) -> Operation {
        self.note(work, |cache| cache.remove_sequence(id)).unwrap()
    }

    fn step(
        &mut self,
        steps: &[SequenceStep],
        tokens: &[u64],
        during: &[NaiveSequence],
        work: Work,
    ) -> Result<Operation, Error> {
        let tensors = self.contents.tensors(steps, tokens);
        let inputs = self.inputs(&tensors);
        let (operation, outputs) = self.note(work, |cache| cache.step(steps, &inputs))?;
        for output in outputs {
            // x̂ is rounded to f32 once in the naive model, and exact in the oracle.
            self.contents.check_attention(steps, during, &tensors[2], &output.out, 1e-5);
        }
        Ok(operation)
    }

    fn dropped_step(&mut self, _: &[SequenceStep], _: &[u64]) {}

    fn truncate(&mut self, id: SequenceId, tokens: u32, before: &NaiveSequence, work: Work) -> Operation {
        self.contents.truncate(before, tokens);
        self.note(work, |cache| cache.truncate(id, tokens)).unwrap()
    }

    fn fork(&mut self, id: SequenceId, work: Work) -> Result<(SequenceId, Operation), Error> {
        self.note(work, |cache| cache.fork(id))
    }

    fn reorder(&mut self, ids: &[SequenceId], parents: &[usize], work: Work) -> Result<Operation, Error> {
        self.note(work, |cache| cache.reorder(ids, parents))
    }

    fn save_and_load(&mut self, id: SequenceId) -> Result<SequenceId, Error> {
        let snapshot = self.cache.save(id)?;
        let file = snapshot.to_bytes()?;
        let read = Snapshot::from_bytes(&file)?;
        assert!(read == snapshot, "the file says something else");
        let (loaded, _) = self.cache.load(&read)?;
        assert!(self.cache.save(loaded)?.to_bytes()? == file, "the same state gives another file");
        Ok(loaded)
    }

    fn shrink(&mut self) {
        self.cache.shrink_to_fit();
    }

    fn free_pages(&self) -> u32 {
        self.cache.planner().free_pages(0)
    }

    fn discard(&mut self, operation: Operation) -> Result<(), Error> {
        self.cache.discard(operation)?;
        if let Some(before) = self.before.pop() {
            self.cache = before;
        }
        Ok(())
    }

    fn check(&mut self, model: &[(SequenceId, NaiveSequence)]) {
        for (id, naive) in model {
            let expected = self.contents.state(naive);
            for layer in 0..self.contents.config.layers {
                assert!(self.cache.state(layer, *id).unwrap() == expected, "layer {layer} of {id} differs");
            }
        }
    }

    fn poison(&mut self) {
        self.before.clear();
    }
}

/// `kind` is the rule for the minimum (2: compact parameters).
fn tensor(bits: usize, kind: u32, clipping: bool) -> TensorFormat {
    let format = TensorFormat::new(Bits::ALL[bits]);
    let format = match kind {
        0 => format,
        1 => format.with_zero_point(ZeroPoint::Rounded),
        _ => format.with_compact_parameters(),
    };
    if clipping { format.with_clipping() } else { format }
}

fn config() -> impl Strategy<Value = CacheConfig> {
    let sizes = (0u32..70, prop_oneof![Just(16u32), Just(32), Just(64)], 0u32..40, 20u32..200);
    let format = (0usize..5, 0usize..5, 0u32..3, 0usize..3, prop_oneof![Just(16u32), Just(24)]);
    (sizes, format, 1u64..4).prop_map(
        |((window, group, sinks, max_step), (key, value, kind, dtype, head_dim), pages)| {
            let config = CacheConfig::new(2, 4, 2, head_dim)
                .with_residual_window(window)
                .with_group_size(group)
                .with_value_group_size(if window % 2 == 0 { 16 } else { head_dim })
                .with_sink_tokens(sinks)
                .with_max_step(max_step)
                .with_max_batch_tokens(3 * max_step)
                .with_max_sequences(4)
                .with_formats(
                    match tensor(key, kind, max_step % 3 == 0) {
                        format if window % 3 == 0 => format.with_axis(Axis::PerToken),
                        format if window % 3 == 1 && format.bits.is_quantized() => format.with_rotation(),
                        format => format,
                    },
                    match tensor(value, kind, max_step % 2 == 0) {
                        format if sinks % 3 == 0 && format.bits.is_quantized() => format.with_rotation(),
                        format if sinks % 6 == 1 && format.bits.is_quantized() => {
                            format.with_rotation().with_axis(Axis::PerChannel)
                        }
                        format if sinks % 3 == 1 => format.with_axis(Axis::PerChannel),
                        format => format,
                    },
                )
                .with_window_format(Dtype::ALL[dtype])
                .with_capacity(300);
            let page = kivi_wgpu::Shape::new(&config).unwrap().layout.page_words() * 4;
            let config = config.with_max_slab_bytes(page * pages);
            if sinks % 4 == 2 { config.with_history_limit(window + 2 * max_step) } else { config }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn programs_agree_with_the_naive_model(config in config(), program in program(25)) {
        Oracle::machine(&config).run(&program);
    }
}

/// The lengths at which other projects' saved caches diverged, saved and loaded, then continued.
#[test]
fn saved_sequences_continue_bit_for_bit() {
    let config = CacheConfig::new(2, 2, 1, 16).with_sink_tokens(4).with_max_sequences(4).with_capacity(4000);
    for sinks in [0, 4] {
        for length in [0, 1, 31, 32, 33, 127, 128, 129, 130, 255, 256, 257, 383, 384, 385, 511, 512, 513] {
            let mut machine = Oracle::machine(&config.clone().with_sink_tokens(sinks));
            machine.apply(&Op::Create);
            machine.apply(&Op::Step(vec![(0, length, 1)]));
            machine.apply(&Op::Fork(0));
            machine.apply(&Op::SaveAndLoad(0));
            for n in [1, 200, 40] {
                machine.apply(&Op::Step(vec![(0, n, 2), (1, n, 2)]));
            }
            // After a truncation into a block that a fork shares, too.
            machine.apply(&Op::Fork(0));
            machine.apply(&Op::Truncate(0, 500, 5));
            machine.apply(&Op::SaveAndLoad(0));
            machine.apply(&Op::Step(vec![(0, 300, 1), (2, 10, 1)]));
        }
    }
}

fn filled(config: &CacheConfig, tokens: u32) -> (CpuCache, SequenceId) {
    let mut machine = Oracle::machine(config);
    machine.apply(&Op::Create);
    machine.apply(&Op::Step(vec![(0, tokens, 1)]));
    let id = machine.model[0].0;
    (machine.executor.cache, id)
}

#[test]
fn snapshots_of_another_configuration_are_refused() {
    let config = CacheConfig::new(2, 4, 2, 16).with_sink_tokens(4).with_capacity(600);
    let (cache, id) = filled(&config, 300);
    let snapshot = cache.save(id).unwrap();
    let shape = |layers, query_heads, kv_heads, head_dim| {
        CacheConfig::new(layers, query_heads, kv_heads, head_dim).with_sink_tokens(4).with_capacity(600)
    };
    let others = [
        ("layers", shape(3, 4, 2, 16)),
        ("kv_heads", shape(2, 4, 4, 16)),
        ("head_dim", shape(2, 4, 2, 24)),
        ("keys.bits", config.clone().with_bits(Bits::Four, Bits::Two)),
        ("values.bits", config.clone().with_bits(Bits::Two, Bits::Sixteen)),
        ("group_size", config.clone().with_group_size(64).with_value_group_size(16)),
        ("keys.zero_point", config.clone().with_zero_point(ZeroPoint::Rounded)),
        (
            "values.rotated",
            config.clone().with_formats(config.format.keys, config.format.values.with_rotation()),
        ),
        (
            "values.clipping",
            config.clone().with_formats(config.format.keys, config.format.values.with_clipping()),
        ),
        (
            "keys.axis",
            config.clone().with_formats(config.format.keys.with_axis(Axis::PerToken), config.format.values),
        ),
        (
            "values.compact",
            config.clone().with_formats(config.format.keys, config.format.values.with_compact_parameters()),
        ),
        ("history_limit", config.clone().with_history_limit(600)),
        ("residual_window", config.clone().with_residual_window(127)),
        ("sink_tokens", config.clone().with_sink_tokens(0)),
        ("window_format", config.clone().with_window_format(Dtype::Bf16)),
    ];
    for (wanted, other) in others {
        let mut other = CpuCache::new(&other).unwrap();
        let error = other.load(&snapshot).unwrap_err();
        assert!(
            matches!(error, Error::SnapshotMismatch { field, .. } if field == wanted),
            "{wanted}: {error}"
        );
        assert_eq!(other.planner().sequences().count(), 0);
    }
    // What does not affect the meaning of the words may differ.
    let same = shape(2, 2, 2, 16);
    let same = same.with_capacity(1000).with_max_sequences(3).with_max_step(7).with_softmax_scale(1.0);
    CpuCache::new(&same).unwrap().load(&snapshot).unwrap();
}

#[test]
fn cut_and_altered_files_are_refused() {
    let config = CacheConfig::new(1, 1, 1, 8).with_group_size(16).with_residual_window(1).with_sink_tokens(1);
    let (cache, id) = filled(&config, 40);
    let file = cache.save(id).unwrap().to_bytes().unwrap();
    Snapshot::from_bytes(&file).unwrap();
    for length in 0..file.len() {
        let cut = Snapshot::from_bytes(&file[..length]).unwrap_err();
        assert!(matches!(cut, Error::SnapshotCorrupt { .. }), "{length}: {cut}");
    }
    for at in 0..file.len() {
        for bit in 0..8 {
            let mut altered = file.clone();
            altered[at] ^= 1 << bit;
            let error = Snapshot::from_bytes(&altered).unwrap_err();
            let typed = matches!(error, Error::SnapshotCorrupt { .. } | Error::SnapshotVersion { .. });
            assert!(typed, "bit {bit} of byte {at}: {error}");
        }
    }
    let longer = Snapshot::from_bytes(&[&file[..], &[0]].concat()).unwrap_err();
    assert!(matches!(longer, Error::SnapshotCorrupt { .. }), "{longer}");
    let before = br#"version\":"#;
    let other = file.windows(before.len()).position(|w| w == before).unwrap() + before.len();
    let mut newer = file.clone();
    newer[other] = b'2';
    assert_eq!(Snapshot::from_bytes(&newer), Err(Error::SnapshotVersion { found: 2, supported: 1 }));
}

/// What the decoder imports.
const PACKAGES: &str = "numpy, safetensors";

/// What the decoder says of a layer: keys, then values.
fn decoded(snapshot: &Snapshot, layer: u32) -> Vec<f32> {
    let file = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("snapshot.safetensors");
    let raw = file.with_extension("raw");
    std::fs::write(&file, snapshot.to_bytes().unwrap()).unwrap();
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/decode_snapshot.py");
    let mut python = python::with(PACKAGES).unwrap();
    let output = python.arg(script).arg(&file).arg(layer.to_string()).arg(&raw).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let bytes = std::fs::read(&raw).unwrap();
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

/// `examples/decode_snapshot.py`, which knows the format only by its description, reads what the naive model
/// holds, bit for bit.
#[test]
fn python_reads_snapshots() {
    let config =
        CacheConfig::new(2, 2, 2, 24).with_group_size(32).with_value_group_size(16).with_sink_tokens(3);
    let config = config.with_residual_window(40).with_capacity(900).with_max_step(400);
    let compact = TensorFormat::new(Bits::Four).with_compact_parameters();
    let per_token = config.format.keys.with_axis(Axis::PerToken);
    let others = [
        config.clone(),
        config.clone().with_bits(Bits::Four, Bits::Eight).with_window_format(Dtype::Bf16),
        config.clone().with_bits(Bits::Sixteen, Bits::Two).with_window_format(Dtype::F32),
        config.clone().with_bits(Bits::Eight, Bits::Sixteen).with_zero_point(ZeroPoint::Rounded),
        config.clone().with_bits(Bits::Three, Bits::Three),
        config.clone().with_formats(config.format.keys, TensorFormat::new(Bits::Three).with_rotation()),
        config.clone().with_formats(per_token.with_compact_parameters(), compact.with_axis(Axis::PerChannel)),
        config.clone().with_formats(compact.with_clipping(), compact.with_rotation()).with_history_limit(100),
        config.clone().with_formats(per_token, config.format.values.with_axis(Axis::PerChannel)),
        config.clone().with_formats(compact.with_rotation(), config.format.values),
    ];
    for (i, config) in others.into_iter().enumerate() {
        if python::with(PACKAGES).is_none() {
            python::skipped("python_reads_snapshots", PACKAGES);
            return;
        }
        let mut machine = Oracle::machine(&config);
        machine.apply(&Op::Create);
        machine.apply(&Op::Step(vec![(0, [333, 2, 0, 200, 256, 350, 300, 390, 370, 380][i], 0)]));
        let (id, naive) = machine.model[0].clone();
        let tensors = machine.executor.contents.tensors(&[], &naive.tokens);
        let oracle = &machine.executor;
        let got = decoded(&oracle.cache.save(id).unwrap(), 1);
        // Decoded alike beside a layer with another format.
        let mixed = config.clone().with_layer_format([0], Preset::Bits2_75.format());
        let mut mixed = CpuCache::new(&mixed).unwrap();
        let inputs = oracle.inputs(&tensors);
        let other = mixed.create_sequence().unwrap();
        if !naive.tokens.is_empty() {
            mixed.step(&[SequenceStep::append(other, naive.tokens.len() as u32)], &inputs).unwrap();
        }
        let mixed = mixed.save(other).unwrap();
        assert_eq!(decoded(&mixed, 1), got);
        assert_eq!(decoded(&mixed, 0).len(), 2 * naive.tokens.len() * 2 * 24);
        let heads = [0, 1].map(|head| oracle.contents.seen(&naive, head));
        let tensor = |part: usize| {
            let rows = (0..naive.tokens.len() - naive.evicted).flat_map(|t| [0, 1].map(|head| (t, head)));
            rows.flat_map(
                |(t, head)| if part == 0 { heads[head].0[t].clone() } else { heads[head].1[t].clone() },
            )
            .collect::<Vec<f64>>()
        };
        let expected: Vec<f64> = [tensor(0), tensor(1)].concat();
        assert_eq!(got.len(), expected.len());
        // The decoder rotates back in f32.
        let close = |a: f64, b: f64| {
            if config.format.keys.rotated || config.format.values.rotated {
                (a - b).abs() <= 1e-5 * (1.0 + b.abs())
            } else {
                a == b
            }
        };
        assert!(got.iter().zip(&expected).all(|(a, b)| close(f64::from(*a), *b)), "configuration {i}");
    }
}

/// The format does not change by accident: a file written by the first version is written the same today.
#[test]
fn the_first_version_of_the_format() {
    let known = include_bytes!("data/snapshot_v1.safetensors");
    let config = CacheConfig::new(2, 2, 1, 16)
        .with_bits(Bits::Two, Bits::Four)
        .with_group_size(16)
        .with_residual_window(5)
        .with_sink_tokens(2)
        .with_capacity(100);
    let (cache, id) = filled(&config, 50);
    let file = cache.save(id).unwrap().to_bytes().unwrap();
    if std::env::var("KIVI_RECORD").is_ok() {
        std::fs::write(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/snapshot_v1.safetensors"), &file)
            .unwrap();
    }
    assert!(file == known, "the bytes of a snapshot have changed: that needs a new format version");
    assert!(Snapshot::from_bytes(known).unwrap() == cache.save(id).unwrap());
}

struct Plain(CpuCache);

impl Plain {
    fn inputs(inputs: &[[Vec<f32>; 3]]) -> Vec<LayerInput<'_>> {
        inputs.iter().map(|[k, v, q]| LayerInput { k, v, q, ..Default::default() }).collect()
    }
}

impl Recorded for Plain {
    fn create(&mut self) -> SequenceId {
        self.0.create_sequence().unwrap()
    }

    fn remove(&mut self, id: SequenceId) {
        self.0.remove_sequence(id).unwrap();
    }

    fn step(&mut self, steps: &[SequenceStep], inputs: &[[Vec<f32>; 3]]) -> Vec<Vec<f32>> {
        let (_, outputs) = self.0.step(steps, &Plain::inputs(inputs)).unwrap();
        // In f32: mathematical functions differ from one library to another in the last bit of an f64.
        let single = |x: Vec<f64>| x.into_iter().map(|x| x as f32).collect();
        outputs.into_iter().flat_map(|output| [single(output.out), single(output.lse)]).collect()
    }

    fn discarded_step(&mut self, steps: &[SequenceStep], inputs: &[[Vec<f32>; 3]]) {
        let before = self.0.clone();
        let (operation, _) = self.0.step(steps, &Plain::inputs(inputs)).unwrap();
        self.0.discard(operation).unwrap();
        self.0 = before;
    }

    fn truncate(&mut self, id: SequenceId, tokens: u32) {
        self.0.truncate(id, tokens).unwrap();
    }

    fn fork(&mut self, id: SequenceId) -> SequenceId {
        self.0.fork(id).unwrap().0
    }

    fn discarded_fork(&mut self, id: SequenceId) {
        let (_, operation) = self.0.fork(id).unwrap();
        self.0.discard(operation).unwrap();
    }

    fn reorder(&mut self, ids: &[SequenceId], parents: &[usize]) {
        self.0.reorder(ids, parents).unwrap();
    }

    fn save(&mut self, id: SequenceId) -> Vec<u8> {
        self.0.save(id).unwrap().to_bytes().unwrap()
    }

    fn load(&mut self, file: &[u8]) -> SequenceId {
        self.0.load(&Snapshot::from_bytes(file).unwrap()).unwrap().0
    }

    fn shrink(&mut self) -> Operation {
        self.0.shrink_to_fit()
    }
}

#[test]
fn the_recorded_program_gives_what_it_gave() {
    let mut lines = Vec::new();
    for (name, config) in recorded::configs() {
        let (outputs, files) = recorded::run(&config, &mut Plain(CpuCache::new(&config).unwrap()));
        lines.push(recorded::line(&format!("{name} files"), &files));
        lines.push(recorded::line(&format!("{name} outputs"), &outputs));
    }
    recorded::check("recorded_oracle.txt", &lines);
}
