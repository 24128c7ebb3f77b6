//! A fixed program of every operation, and a digest of all that a cache answers to it.
//!
//! What the digests were once, they are today: a change that is meant to change nothing is held to it, bit
//! for bit. `tests/data/recorded_oracle.txt` and `recorded_gpu.txt` hold them; `KIVI_RECORD=1` writes them
//! anew.

use kivi_wgpu::{
    Axis, Bits, CacheConfig, Dtype, LayerAttention, Operation, Preset, SequenceId, SequenceStep,
    TensorFormat, ZeroPoint,
};

/// A cache that runs the program. Every operation is submitted unless its name says otherwise.
pub trait Recorded {
    fn create(&mut self) -> SequenceId;
    fn remove(&mut self, id: SequenceId);
    /// Outputs and log-sum-exps of each layer; `inputs` are keys, values and queries of each.
    fn step(&mut self, steps: &[SequenceStep], inputs: &[[Vec<f32>; 3]]) -> Vec<Vec<f32>>;
    /// Records a step and discards it.
    fn discarded_step(&mut self, steps: &[SequenceStep], inputs: &[[Vec<f32>; 3]]);
    fn truncate(&mut self, id: SequenceId, tokens: u32);
    fn fork(&mut self, id: SequenceId) -> SequenceId;
    /// Records a fork and discards it.
    fn discarded_fork(&mut self, id: SequenceId);
    fn reorder(&mut self, ids: &[SequenceId], parents: &[usize]);
    fn save(&mut self, id: SequenceId) -> Vec<u8>;
    fn load(&mut self, file: &[u8]) -> SequenceId;
    fn shrink(&mut self) -> Operation;
}

/// Numbers that look like noise (SplitMix64).
struct Noise(u64);

impl Noise {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Between −2 and 2, mostly near 0; now and then larger.
    fn next(&mut self) -> f32 {
        let mut unit = || (self.bits() >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
        let (a, b) = (unit(), unit());
        if b.abs() < 0.01 { 20.0 * a } else { a + b }
    }

    fn tensor(&mut self, elements: u32) -> Vec<f32> {
        (0..elements).map(|_| self.next()).collect()
    }
}

/// FNV-1a.
fn digest(bytes: impl IntoIterator<Item = u8>) -> u64 {
    bytes.into_iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// What is recorded of one cache: (what, digest) in order.
pub struct Run<'a> {
    cache: &'a mut dyn Recorded,
    config: &'a CacheConfig,
    noise: Noise,
    pub outputs: Vec<u64>,
    pub files: Vec<u64>,
}

impl Run<'_> {
    fn inputs(&mut self, steps: &[SequenceStep]) -> Vec<[Vec<f32>; 3]> {
        let c = self.config;
        let tokens: u32 = steps.iter().map(|s| s.append).sum();
        let queries: u32 = steps.iter().map(|s| s.attend).sum();
        let (kv, q) = (tokens * c.kv_heads * c.head_dim, queries * c.query_heads * c.head_dim);
        (0..c.layers).map(|_| [kv, kv, q].map(|elements| self.noise.tensor(elements))).collect()
    }

    fn step(&mut self, steps: &[SequenceStep]) {
        let inputs = self.inputs(steps);
        for output in self.cache.step(steps, &inputs) {
            // No two zeros, and no two numbers that are none.
            let bits = |x: f32| if x.is_nan() { f32::NAN.to_bits() } else { (x + 0.0).to_bits() };
            self.outputs.push(digest(output.iter().flat_map(|x| bits(*x).to_le_bytes())));
        }
    }

    fn save(&mut self, id: SequenceId) -> Vec<u8> {
        let file = self.cache.save(id);
        self.files.push(digest(file.iter().copied()));
        file
    }

    /// Every operation, sequences of several lengths, steps of one and of many tokens.
    fn run(&mut self) {
        let extend = SequenceStep::extend;
        let longest = self.config.max_step;
        let a = self.cache.create();
        self.step(&[extend(a, longest)]);
        self.step(&[SequenceStep::append(a, longest)]);
        let b = self.cache.create();
        self.step(&[extend(a, 1), extend(b, 70.min(longest))]);
        self.step(&[extend(b, 9), SequenceStep::attend(a, 3)]);
        self.save(a);
        self.save(b);
        let inputs = self.inputs(&[extend(a, 40)]);
        self.cache.discarded_step(&[extend(a, 40)], &inputs);
        self.step(&[SequenceStep::decode(b), SequenceStep::decode(a)]);
        for _ in 0..3 {
            self.step(&[SequenceStep::append(a, longest), extend(b, 5)]);
        }
        let c = self.cache.fork(a);
        self.cache.discarded_fork(b);
        self.step(&[extend(c, 40), SequenceStep::decode(a), SequenceStep::decode(b)]);
        let length = 2 * longest;
        // Where history is limited, tokens in the middle are gone.
        if self.config.format.history_limit.is_none() {
            self.cache.truncate(c, length - 7);
        }
        self.step(&[extend(c, 2), extend(a, 3)]);
        self.save(c);
        self.cache.reorder(&[a, b, c], &[2, 0, 0]);
        self.step(&[SequenceStep::decode(a), SequenceStep::decode(b), SequenceStep::decode(c)]);
        self.step(&[extend(a, 17), SequenceStep::append(c, 60)]);
        let file = self.save(b);
        self.cache.remove(b);
        let d = self.cache.load(&file);
        self.cache.remove(a);
        self.cache.shrink();
        self.step(&[extend(d, longest), extend(c, 1)]);
        self.step(&[SequenceStep::decode(d), SequenceStep::attend(c, 8)]);
        self.cache.truncate(d, 3);
        self.step(&[extend(d, 30)]);
        self.cache.truncate(d, 0);
        self.step(&[extend(d, 200.min(longest)), extend(c, 12)]);
        self.save(c);
        self.save(d);
    }
}

/// Runs the program; digests of the outputs, then of the files.
pub fn run(config: &CacheConfig, cache: &mut dyn Recorded) -> (Vec<u64>, Vec<u64>) {
    let mut run = Run { cache, config, noise: Noise(17), outputs: Vec::new(), files: Vec::new() };
    run.run();
    (run.outputs, run.files)
}

fn small_slabs(config: CacheConfig, pages: u64) -> CacheConfig {
    let page = kivi_wgpu::format::BlockLayout {
        head_dim: config.head_dim,
        kv_heads: config.kv_heads,
        group: config.format.group_size,
        channel_group: config.format.value_group_size.unwrap_or(config.format.group_size),
        keys: config.format.keys,
        values: config.format.values,
    };
    let bytes = page.page_words() * 4;
    config.with_max_slab_bytes(bytes * pages)
}

/// Configurations with every choice of a format, several formats in one cache, layers that attend in their
/// own way, rings that are too short for a step, slabs of few pages, and scratch for a part of a step.
pub fn configs() -> Vec<(&'static str, CacheConfig)> {
    let roomy = |config: CacheConfig| config.with_max_sequences(4).with_capacity(300);
    let plain = LayerAttention::default();
    let sliding = plain.with_sliding_window(100);
    let capped = plain.with_soft_cap(5.0);
    let mut wide = Preset::Bits4_5.format();
    wide.residual_window = 40;
    let mixed = CacheConfig::new(4, 8, 2, 64)
        .with_layer_format([1], wide)
        .with_layer_format([3], Preset::Bits2_25.format())
        .with_layer_attention(vec![plain, capped, sliding, plain])
        .with_max_step(100)
        .with_max_batch_tokens(300);
    let rotated = |bits| TensorFormat::new(bits).with_rotation().with_clipping().with_compact_parameters();
    let gone = CacheConfig::new(1, 6, 2, 80)
        .with_formats(rotated(Bits::Three), rotated(Bits::Two))
        .with_window_format(Dtype::Bf16)
        .with_residual_window(32)
        .with_sink_tokens(4)
        .with_history_limit(300)
        .with_max_step(90)
        .with_max_batch_tokens(300)
        .with_max_scratch_bytes(200_000);
    let staged = CacheConfig::new(2, 2, 2, 24)
        .with_formats(
            TensorFormat::new(Bits::Four).with_axis(Axis::PerToken),
            rotated(Bits::Two).with_axis(Axis::PerChannel),
        )
        .with_residual_window(20)
        .with_group_size(64)
        .with_layer_attention(vec![plain, sliding])
        .with_max_step(300)
        .with_max_batch_tokens(900);
    let sixteen = CacheConfig::new(1, 7, 1, 40)
        .with_formats(
            TensorFormat::new(Bits::Sixteen),
            TensorFormat::new(Bits::Eight).with_zero_point(ZeroPoint::Rounded),
        )
        .with_group_size(16)
        .with_residual_window(0)
        .with_window_format(Dtype::F32)
        .with_max_step(60)
        .with_max_batch_tokens(180);
    vec![
        ("mixed", small_slabs(roomy(mixed), 2)),
        ("gone", small_slabs(roomy(gone), 2)),
        ("staged", small_slabs(roomy(staged), 3)),
        ("sixteen", small_slabs(roomy(sixteen), 1)),
    ]
}

/// `name: digest digest …` of a list.
pub fn line(name: &str, digests: &[u64]) -> String {
    let digests: Vec<String> = digests.iter().map(|digest| format!("{digest:016x}")).collect();
    format!("{name}: {}", digests.join(" "))
}

/// Compares lines with those of a file in `tests/data`, or writes them there if `KIVI_RECORD` is set.
pub fn check(file: &str, lines: &[String]) {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(file);
    if std::env::var("KIVI_RECORD").is_ok() {
        std::fs::write(&path, lines.join("\n") + "\n").unwrap();
    }
    let known = std::fs::read_to_string(&path).unwrap();
    let known: Vec<&str> = known.lines().collect();
    assert_eq!(known.len(), lines.len());
    for (known, line) in known.into_iter().zip(lines) {
        assert_eq!(known, line, "{file} says the first, the second is what there is");
    }
}
