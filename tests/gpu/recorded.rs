//! The recorded program on the GPU: the oracle's files on every adapter, and its own outputs, bit for bit, on
//! the one on which they were recorded.

use crate::reference::recorded::{self, Recorded};
use crate::support::{
    decode, device, full, new_cache_of, poisoned_buffer, read_buffer, skipped, storage_buffer,
};
use kivi_wgpu::{
    Dtype, Error, KvCache, LayerIo, Operation, SequenceId, SequenceStep, Snapshot, TensorView, Variant, wgpu,
};
use std::io::Write;

struct Gpu(KvCache);

impl Gpu {
    /// Submits what `record` records, unless it is to be thrown away.
    fn encode<T>(submit: bool, record: impl FnOnce(&mut wgpu::CommandEncoder) -> T) -> T {
        let (device, queue) = device();
        let mut encoder = device.create_command_encoder(&Default::default());
        let done = record(&mut encoder);
        if submit {
            queue.submit([encoder.finish()]);
        }
        done
    }

    /// Output and log-sum-exp buffers of each layer.
    fn record(
        &mut self,
        submit: bool,
        steps: &[SequenceStep],
        inputs: &[[Vec<f32>; 3]],
    ) -> (Operation, Vec<[wgpu::Buffer; 2]>) {
        let mut outputs = Vec::new();
        let mut bindings = Vec::new();
        for tensors in inputs {
            let buffers = tensors.each_ref().map(|x| storage_buffer(bytemuck::cast_slice(x)));
            let [k, v, q] = buffers.each_ref().map(|buffer| TensorView::new(buffer, Dtype::F32));
            let out = poisoned_buffer(tensors[2].len() * 4);
            let lse = poisoned_buffer(tensors[2].len() * 4 / self.0.shape().first().layout.head_dim as usize);
            let [to, lse_to] = [&out, &lse].map(|buffer| TensorView::new(buffer, Dtype::F32));
            let io = match (tensors[0].is_empty(), tensors[2].is_empty()) {
                (true, _) => LayerIo::attend(q, to).with_lse(lse_to),
                (_, true) => LayerIo::append(k, v),
                _ => LayerIo::new(k, v, q, to).with_lse(lse_to),
            };
            bindings.push(self.0.bind(&io).unwrap());
            outputs.push([out, lse]);
        }
        let operation = Gpu::encode(submit, |encoder| {
            let mut step = self.0.begin_step(encoder, steps).unwrap();
            for (layer, binding) in (0..).zip(&bindings) {
                step.layer(&mut *encoder, layer, binding).unwrap();
            }
            step.finish().unwrap()
        });
        (operation, outputs)
    }
}

impl Recorded for Gpu {
    fn create(&mut self) -> SequenceId {
        self.0.create_sequence().unwrap()
    }

    fn remove(&mut self, id: SequenceId) {
        self.0.remove_sequence(id).unwrap();
    }

    fn step(&mut self, steps: &[SequenceStep], inputs: &[[Vec<f32>; 3]]) -> Vec<Vec<f32>> {
        let (_, outputs) = self.record(true, steps, inputs);
        let rows = steps.iter().map(|s| s.attend).sum::<u32>() as usize;
        let rows = rows * self.0.shape().first().query_heads as usize;
        let head_dim = self.0.shape().first().layout.head_dim as usize;
        let read = |buffer: &wgpu::Buffer, n: usize| decode(&read_buffer(buffer), Dtype::F32)[..n].to_vec();
        outputs.iter().flat_map(|[out, lse]| [read(out, rows * head_dim), read(lse, rows)]).collect()
    }

    fn discarded_step(&mut self, steps: &[SequenceStep], inputs: &[[Vec<f32>; 3]]) {
        let (operation, _) = self.record(false, steps, inputs);
        self.0.discard(operation).unwrap();
    }

    fn truncate(&mut self, id: SequenceId, tokens: u32) {
        Gpu::encode(true, |encoder| self.0.truncate(encoder, id, tokens)).unwrap();
    }

    fn fork(&mut self, id: SequenceId) -> SequenceId {
        Gpu::encode(true, |encoder| self.0.fork(encoder, id)).unwrap().0
    }

    fn discarded_fork(&mut self, id: SequenceId) {
        let (_, operation) = Gpu::encode(false, |encoder| self.0.fork(encoder, id)).unwrap();
        self.0.discard(operation).unwrap();
    }

    fn reorder(&mut self, ids: &[SequenceId], parents: &[usize]) {
        Gpu::encode(true, |encoder| self.0.reorder(encoder, ids, parents)).unwrap();
    }

    fn save(&mut self, id: SequenceId) -> Vec<u8> {
        self.0.submit_and_save_blocking(id).unwrap().to_bytes().unwrap()
    }

    fn load(&mut self, file: &[u8]) -> SequenceId {
        let snapshot = Snapshot::from_bytes(file).unwrap();
        Gpu::encode(true, |encoder| self.0.load(encoder, &snapshot)).unwrap().0
    }

    fn shrink(&mut self) -> Operation {
        self.0.shrink_to_fit()
    }
}

#[test]
fn the_recorded_program_gives_what_it_gave() {
    let info = device().0.adapter_info();
    let adapter = format!("{} {}", info.name, info.driver_info);
    let oracle = include_str!("../data/recorded_oracle.txt");
    let mut lines = vec![format!("adapter: {adapter}")];
    for (name, config) in recorded::configs() {
        // Kernels take a software adapter long to build: without `KIVI_FULL=1`, those of two configurations.
        let clusters = (name == "mixed" && full()).then_some(Variant::Subgroups);
        let portable = (["mixed", "staged"].contains(&name) || full()).then_some(Variant::Portable);
        for variant in portable.into_iter().chain(clusters) {
            let cache = match new_cache_of(&config, variant) {
                Ok(cache) => cache,
                Err(Error::VariantUnavailable { needed, .. }) if variant != Variant::Portable => {
                    skipped(variant, needed);
                    continue;
                }
                Err(error) => panic!("{error}"),
            };
            let (outputs, files) = recorded::run(&config, &mut Gpu(cache));
            let files = recorded::line(&format!("{name} files"), &files);
            assert!(
                oracle.lines().any(|line| line == files),
                "{variant:?} kernels write other words: {files}"
            );
            lines.push(recorded::line(&format!("{name} {variant:?}").to_lowercase(), &outputs));
        }
    }
    let known = include_str!("../data/recorded_gpu.txt").lines().next().unwrap_or_default();
    if known != lines[0] && std::env::var("KIVI_RECORD").is_err() {
        // Past the test harness, which would hide it.
        let _ = writeln!(std::io::stderr(), "skipped: recorded outputs are of another {known}");
        return;
    }
    if std::env::var("KIVI_RECORD").is_ok() {
        assert!(full(), "what is recorded is everything: KIVI_FULL=1");
        recorded::check("recorded_gpu.txt", &lines);
    }
    let known = include_str!("../data/recorded_gpu.txt");
    for line in lines {
        assert!(known.lines().any(|known| known == line), "recorded_gpu.txt has another: {line}");
    }
}
