//! A GPU cache that runs beside an oracle cache.

use crate::support::{
    Random, decode, device, encode, options_on, poison, poisoned_buffer, read_buffer, storage_buffer,
};
use kivi_wgpu::oracle::{AttentionOutput, CpuCache, LayerInput};
use kivi_wgpu::{
    CacheConfig, Dtype, Error, KvCache, LayerIo, Operation, SequenceId, SequenceStep, TensorView, Variant,
    wgpu,
};
use std::cell::RefCell;

/// Inputs of one layer in one step.
pub struct Tensors {
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    pub q: Vec<f32>,
}

impl Tensors {
    /// The rows of each sequence of a step in which sequence `i` appends `tokens[i]` tokens that all attend.
    pub fn split(&self, tokens: &[u32]) -> Vec<Tensors> {
        let total: u32 = tokens.iter().sum();
        let mut first = 0;
        let rows = |x: &[f32], first: u32, n: u32| {
            let row = x.len() / total as usize;
            x[first as usize * row..(first + n) as usize * row].to_vec()
        };
        tokens
            .iter()
            .map(|&n| {
                let part = |x| rows(x, first, n);
                let own = Tensors { k: part(&self.k), v: part(&self.v), q: part(&self.q) };
                first += n;
                own
            })
            .collect()
    }
}

/// A GPU cache and an oracle cache that are given the same steps.
pub struct Pair {
    pub gpu: KvCache,
    pub cpu: CpuCache,
    pub random: Random,
    pub input: Dtype,
    pub output: Dtype,
    /// Factor of random keys.
    pub key_scale: f32,
    /// Factor of the keys in every 17th channel, as some channels of real models are larger.
    pub key_outlier: f32,
    /// Relative errors of all rows so far, with f32 outputs.
    pub errors: RefCell<Vec<f64>>,
    /// Learned sink logits of all layers; empty: none.
    pub sink_logits: Vec<f32>,
    /// Log-sum-exp outputs of the step recorded last, by layer.
    lse: Vec<wgpu::Buffer>,
}

impl Pair {
    /// Both caches empty, and every cell of the GPU's poisoned with NaN. The kernels are the portable ones,
    /// or those that `KIVI_VARIANT` names where they can run.
    pub fn new(config: &CacheConfig) -> Pair {
        let wanted = std::env::var("KIVI_VARIANT").ok();
        let named = |v: &&Variant| Some(format!("{v:?}").to_lowercase()) == wanted;
        let variant = Variant::ALL.iter().find(named).copied();
        assert!(variant.is_some() || wanted.is_none(), "KIVI_VARIANT is none of {:?}", Variant::ALL);
        variant
            .and_then(|v| Pair::with_variant(config, v).ok())
            .unwrap_or_else(|| Pair::with_variant(config, Variant::Portable).unwrap())
    }

    /// As [`Self::new`], with these kernels; an error if they cannot run.
    pub fn with_variant(config: &CacheConfig, variant: Variant) -> Result<Pair, Error> {
        let (device, queue) = device();
        // Attention is what the tests try out.
        let options = options_on(device).with_variant(variant);
        let gpu = KvCache::with_options_blocking(device, queue, config, &options)?;
        poison(&gpu);
        // The same slabs as the GPU's, so that both run one plan.
        let cpu = CpuCache::with_id(config, gpu.id()).unwrap();
        for layer in 0..cpu.layers() {
            assert_eq!(gpu.shape_of(layer), cpu.shape_of(layer));
        }
        Ok(Pair {
            gpu,
            cpu,
            random: Random(7),
            input: Dtype::F32,
            output: Dtype::F32,
            key_scale: 1.0,
            key_outlier: 8.0,
            errors: RefCell::default(),
            sink_logits: Vec::new(),
            lse: Vec::new(),
        })
    }

    pub fn create_sequence(&mut self) -> SequenceId {
        let id = self.cpu.create_sequence().unwrap();
        assert_eq!(self.gpu.create_sequence().unwrap(), id);
        id
    }

    /// Random inputs for every layer of a step.
    pub fn tensors(&mut self, steps: &[SequenceStep]) -> Vec<Tensors> {
        let g = self.cpu.shape().first().clone();
        let tokens: u32 = steps.iter().map(|s| s.append).sum();
        let queries: u32 = steps.iter().map(|s| s.attend).sum();
        let kv = (tokens * g.layout.kv_heads * g.layout.head_dim) as usize;
        let q = (queries * g.query_heads * g.layout.head_dim) as usize;
        (0..self.cpu.layers())
            .map(|_| {
                let (scale, outlier) = (self.key_scale, self.key_outlier);
                // Channel outliers in keys, token outliers in values, as in real models.
                let k = (0..kv)
                    .map(|i| self.random.normal() * scale * if i % 17 == 3 { outlier } else { 1.0 })
                    .collect();
                let v =
                    (0..kv).map(|i| self.random.normal() * if i % 401 == 5 { 30.0 } else { 1.0 }).collect();
                Tensors { k, v, q: self.random.normals(q) }
            })
            .collect()
    }

    /// Runs a step with random inputs on both and checks the outputs; returns the GPU's, by layer.
    pub fn step(&mut self, steps: &[SequenceStep]) -> Vec<Vec<f32>> {
        let tensors = self.tensors(steps);
        self.step_with(steps, &tensors)
    }

    pub fn step_with(&mut self, steps: &[SequenceStep], tensors: &[Tensors]) -> Vec<Vec<f32>> {
        let (device, queue) = device();
        let mut encoder = device.create_command_encoder(&Default::default());
        let (_, outputs, expected) = self.record(&mut encoder, steps, tensors);
        queue.submit([encoder.finish()]);
        let outputs: Vec<Vec<f32>> = outputs.iter().map(|b| decode(&read_buffer(b), self.output)).collect();
        for (layer, (out, expected)) in outputs.iter().zip(&expected).enumerate() {
            self.check(layer, out, expected);
            let lse = decode(&read_buffer(&self.lse[layer]), Dtype::F32);
            for (row, ((lse, expected), magnitude)) in
                lse.iter().zip(&expected.lse).zip(&expected.magnitude).enumerate()
            {
                // Its own rounding to f32 and back from base 2 on top of the logits'.
                let own = 2f64.powi(-23) * expected.abs();
                let bound = 1e-5 + 8.0 * 2f64.powi(-24) * magnitude + own;
                // Rows that are no number have a log-sum-exp that is none.
                let right = match expected.is_nan() {
                    true => lse.is_nan(),
                    false => (f64::from(*lse) - expected).abs() <= bound,
                };
                assert!(right, "row {row}: log-sum-exp {lse}, {expected}");
            }
        }
        outputs
    }

    /// Records a step for the GPU and runs it on the oracle; returns the output buffers and the oracle's
    /// outputs.
    pub fn record(
        &mut self,
        encoder: &mut wgpu::CommandEncoder,
        steps: &[SequenceStep],
        tensors: &[Tensors],
    ) -> (Operation, Vec<wgpu::Buffer>, Vec<AttentionOutput>) {
        let mut outputs = Vec::new();
        let mut bindings = Vec::new();
        let mut rounded = Vec::new();
        self.lse.clear();
        let sinks = storage_buffer(bytemuck::cast_slice(&self.sink_logits));
        for t in tensors {
            let [(k, kr), (v, vr), (q, qr)] = [&t.k, &t.v, &t.q].map(|x| encode(x, self.input));
            let buffers = [&k, &v, &q].map(|b| storage_buffer(b));
            let out = poisoned_buffer(t.q.len() * self.output.bytes() as usize);
            let lse = poisoned_buffer(t.q.len() * 4);
            let view = |b| TensorView::new(b, self.input);
            let io = {
                let mut io = LayerIo::default();
                io.k = (!t.k.is_empty()).then(|| view(&buffers[0]));
                io.v = (!t.v.is_empty()).then(|| view(&buffers[1]));
                io.q = (!t.q.is_empty()).then(|| view(&buffers[2]));
                io.out = (!t.q.is_empty()).then(|| TensorView::new(&out, self.output));
                io.sink_logits = (!self.sink_logits.is_empty()).then(|| TensorView::new(&sinks, Dtype::F32));
                io.lse = (!t.q.is_empty()).then_some(TensorView::new(&lse, Dtype::F32));
                io
            };
            bindings.push(self.gpu.bind(&io).unwrap());
            outputs.push(out);
            self.lse.push(lse);
            rounded.push(Tensors { k: kr, v: vr, q: qr });
        }
        let mut step = self.gpu.begin_step(encoder, steps).unwrap();
        for (layer, binding) in bindings.iter().enumerate() {
            step.layer(&mut *encoder, layer as u32, binding).unwrap();
        }
        let operation = step.finish().unwrap();
        let inputs: Vec<_> = rounded
            .iter()
            .map(|t| LayerInput { k: &t.k, v: &t.v, q: &t.q, sink_logits: &self.sink_logits })
            .collect();
        let (_, expected) = self.cpu.step(steps, &inputs).unwrap();
        (operation, outputs, expected)
    }

    /// The bound on attention: per row, ‖out − ref‖ / ‖ref‖ ≤ 1e-5 + 4·2⁻²⁴·max Σ|q·k| of a token,
    /// scaled; for 16-bit outputs each element within one ulp of the rounded result besides.
    pub fn check(&self, layer: usize, out: &[f32], expected: &AttentionOutput) {
        let head_dim = self.cpu.shape().first().layout.head_dim as usize;
        for (row, (reference, magnitude)) in
            expected.out.chunks(head_dim).zip(&expected.magnitude).enumerate()
        {
            let out = &out[row * head_dim..][..head_dim];
            if reference.iter().all(|x| x.is_nan()) {
                assert!(out.iter().all(|x| x.is_nan()), "layer {layer}, row {row}: numbers: {out:?}");
                continue;
            }
            assert!(out.iter().all(|x| x.is_finite()), "layer {layer}, row {row}: not finite: {out:?}");
            let norm = reference.iter().map(|x| x * x).sum::<f64>().sqrt();
            // A learned sink may leave less than f32 holds.
            let bound = (1e-5 + 4.0 * 2f64.powi(-24) * magnitude) * norm + 1e-36;
            if self.output == Dtype::F32 {
                let error =
                    reference.iter().zip(out).map(|(r, &o)| (r - f64::from(o)).powi(2)).sum::<f64>().sqrt();
                self.errors.borrow_mut().push(if norm > 0.0 { error / norm } else { 0.0 });
                assert!(
                    error <= bound,
                    "layer {layer}, row {row}: error {:e}, bound {:e} (largest Σ|q·k| {magnitude})",
                    error / norm,
                    bound / norm
                );
            } else {
                let bits = if self.output == Dtype::F16 { 10 } else { 7 };
                for (r, &o) in reference.iter().zip(out) {
                    let ulp = 2f64.powi((r.abs().max(6.2e-5).log2().floor() as i32) - bits);
                    assert!((r - f64::from(o)).abs() <= 1.5 * ulp + bound, "row {row}: {o}, expected {r}");
                }
            }
        }
    }

    /// Average of the relative errors of all rows so far.
    pub fn mean_error(&self) -> f64 {
        let errors = self.errors.borrow();
        errors.iter().sum::<f64>() / errors.len() as f64
    }

    /// Compares the whole content of a sequence, word for word.
    pub fn check_state(&self, sequence: SequenceId) {
        for layer in 0..self.cpu.layers() {
            let gpu = self.gpu.submit_and_read_state_blocking(layer, sequence).unwrap();
            let cpu = self.cpu.state(layer, sequence).unwrap();
            assert_eq!(gpu.lengths, cpu.lengths);
            let differs = gpu.blocks.iter().zip(&cpu.blocks).position(|(a, b)| a != b);
            if let Some(at) = differs {
                let l = &self.cpu.shape_of(layer).unwrap().layout;
                panic!(
                    "layer {layer}: block {} head {} word {}: {:#x}, oracle {:#x}",
                    at / l.block_words() as usize,
                    at % l.block_words() as usize / l.head_words() as usize,
                    at % l.head_words() as usize,
                    gpu.blocks[at],
                    cpu.blocks[at]
                );
            }
            assert!(gpu == cpu, "layer {layer}: the unpacked tokens differ");
        }
    }

    /// An encoder in which `record` has recorded something, submitted.
    fn submit<T>(record: impl FnOnce(&mut wgpu::CommandEncoder) -> T) -> T {
        let (device, queue) = device();
        let mut encoder = device.create_command_encoder(&Default::default());
        let done = record(&mut encoder);
        queue.submit([encoder.finish()]);
        done
    }

    pub fn truncate(&mut self, sequence: SequenceId, tokens: u32) {
        Self::submit(|encoder| self.gpu.truncate(encoder, sequence, tokens)).unwrap();
        self.cpu.truncate(sequence, tokens).unwrap();
    }

    pub fn fork(&mut self, sequence: SequenceId) -> SequenceId {
        let (child, _) = Self::submit(|encoder| self.gpu.fork(encoder, sequence)).unwrap();
        assert_eq!(self.cpu.fork(sequence).unwrap().0, child);
        child
    }

    pub fn reorder(&mut self, sequences: &[SequenceId], parents: &[usize]) {
        Self::submit(|encoder| self.gpu.reorder(encoder, sequences, parents)).unwrap();
        self.cpu.reorder(sequences, parents).unwrap();
    }

    pub fn remove(&mut self, sequence: SequenceId) {
        self.gpu.remove_sequence(sequence).unwrap();
        self.cpu.remove_sequence(sequence).unwrap();
    }

    /// Appends `tokens` tokens in steps of the longest length, without attending.
    pub fn fill(&mut self, sequence: SequenceId, tokens: u32) {
        let mut left = tokens;
        while left > 0 {
            let n = left.min(self.cpu.shape().first().max_step);
            self.step(&[SequenceStep::append(sequence, n)]);
            left -= n;
        }
    }
}
