//! Steps are transactions, and can be recorded in several ways.

use crate::support::{Pair, Tensors, decode, device, poisoned_buffer, read_buffer, storage_buffer};
use kivi_wgpu::oracle::{CpuCache, LayerInput};
use kivi_wgpu::{CacheConfig, Dtype, Error, KvCache, LayerIo, SequenceStep, TensorView, wgpu};

fn config() -> CacheConfig {
    CacheConfig::new(2, 4, 2, 64).with_residual_window(32).with_max_step(100).with_capacity(2000)
}

fn submit(record: impl FnOnce(&mut wgpu::CommandEncoder)) {
    let (device, queue) = device();
    let mut encoder = device.create_command_encoder(&Default::default());
    record(&mut encoder);
    queue.submit([encoder.finish()]);
}

/// Records a step on the GPU only and neither finishes nor forgets it.
fn record_and_drop(
    gpu: &mut KvCache,
    encoder: &mut wgpu::CommandEncoder,
    steps: &[SequenceStep],
    tensors: &[Tensors],
) {
    let t = &tensors[0];
    let [k, v, q] = [&t.k, &t.v, &t.q].map(|x| storage_buffer(bytemuck::cast_slice(x)));
    let out = poisoned_buffer(t.q.len() * 4);
    let view = |b| TensorView::new(b, Dtype::F32);
    let binding = gpu.bind(&LayerIo::new(view(&k), view(&v), view(&q), view(&out))).unwrap();
    let mut step = gpu.begin_step(encoder, steps).unwrap();
    for layer in 0..tensors.len() as u32 {
        step.layer(&mut *encoder, layer, &binding).unwrap();
    }
}

#[test]
fn a_dropped_step_changes_nothing_even_if_its_encoder_is_submitted() {
    let mut pair = Pair::new(&config());
    let s = pair.create_sequence();
    for n in [100, 31, 7, 100, 1] {
        let dropped = [SequenceStep::new(s, n, n.min(4))];
        let tensors = pair.tensors(&dropped);
        submit(|encoder| record_and_drop(&mut pair.gpu, encoder, &dropped, &tensors));
        pair.check_state(s);
        pair.step(&[SequenceStep::new(s, 1 + n / 2, 1)]);
        pair.check_state(s);
    }
}

#[test]
fn discarded_steps_leave_no_trace() {
    let mut pair = Pair::new(&config().with_max_undo(3));
    let s = pair.create_sequence();
    for n in [60, 5, 100, 33, 1] {
        // Three finished steps whose encoders are thrown away, discarded newest first.
        let before = pair.cpu.clone();
        let mut operations = Vec::new();
        for m in [n, 3, 40] {
            let steps = [SequenceStep::append(s, m)];
            let tensors = pair.tensors(&steps);
            let mut encoder = device().0.create_command_encoder(&Default::default());
            operations.push(pair.record(&mut encoder, &steps, &tensors).0);
        }
        assert!(matches!(pair.gpu.discard(operations[0]), Err(Error::NotLatest { .. })));
        for operation in operations.into_iter().rev() {
            pair.gpu.discard(operation).unwrap();
        }
        pair.cpu = before;
        pair.check_state(s);
        pair.step(&[SequenceStep::new(s, n, 2.min(n))]);
    }
}

#[test]
fn only_recent_operations_can_be_discarded() {
    let mut pair = Pair::new(&config().with_max_undo(2));
    let s = pair.create_sequence();
    let mut operations = Vec::new();
    for _ in 0..3 {
        let steps = [SequenceStep::append(s, 1)];
        let tensors = pair.tensors(&steps);
        submit(|encoder| operations.push(pair.record(encoder, &steps, &tensors).0));
    }
    assert!(matches!(pair.gpu.discard(operations[0]), Err(Error::TooOld { max_undo: 2, .. })));
    pair.gpu.discard(operations[2]).unwrap();
    pair.gpu.discard(operations[1]).unwrap();
    assert!(matches!(pair.gpu.discard(operations[0]), Err(Error::TooOld { .. })));
    assert_eq!(pair.gpu.tokens(s).unwrap(), 1);
}

#[test]
fn two_steps_in_one_submit_equal_two_submits() {
    let mut one = Pair::new(&config());
    let mut two = Pair::new(&config());
    let (a, b) = (one.create_sequence(), two.create_sequence());
    for (n, m) in [(50, 50), (100, 100), (1, 64), (100, 3)] {
        let first = [SequenceStep::new(a, n, 1)];
        let second = [SequenceStep::new(a, m, 1)];
        let tensors = [one.tensors(&first), one.tensors(&second)];
        let mut outputs = Vec::new();
        submit(|encoder| {
            outputs.extend(one.record(encoder, &first, &tensors[0]).1);
            outputs.extend(one.record(encoder, &second, &tensors[1]).1);
        });
        let mut expected = Vec::new();
        for (n, tensors) in [n, m].into_iter().zip(&tensors) {
            let step = [SequenceStep::new(b, n, 1)];
            expected.extend(two.step_with(&step, tensors));
        }
        let outputs: Vec<_> = outputs.iter().map(|o| decode(&read_buffer(o), Dtype::F32)).collect();
        for (a, b) in outputs.iter().zip(&expected) {
            assert_eq!(a[..b.len().min(a.len())], b[..a.len().min(b.len())]);
        }
    }
    one.check_state(a);
    two.check_state(b);
}

#[test]
fn a_step_can_be_recorded_into_the_hosts_pass() {
    let mut pair = Pair::new(&config());
    let s = pair.create_sequence();
    pair.fill(s, 190);
    let steps = [SequenceStep::extend(s, 2)];
    let tensors = pair.tensors(&steps);
    let t = &tensors[0];
    let [k, v, q] = [&t.k, &t.v, &t.q].map(|x| storage_buffer(bytemuck::cast_slice(x)));
    let outs = [poisoned_buffer(t.q.len() * 4), poisoned_buffer(t.q.len() * 4)];
    let view = |b| TensorView::new(b, Dtype::F32);
    let bindings = outs
        .each_ref()
        .map(|out| pair.gpu.bind(&LayerIo::new(view(&k), view(&v), view(&q), view(out))).unwrap());
    submit(|encoder| {
        let mut step = pair.gpu.begin_step(encoder, &steps).unwrap();
        let mut pass = encoder.begin_compute_pass(&Default::default());
        for (layer, binding) in bindings.iter().enumerate() {
            step.layer(&mut pass, layer as u32, binding).unwrap();
        }
        drop(pass);
        step.finish().unwrap();
    });
    let input = LayerInput { k: &t.k, v: &t.v, q: &t.q, ..Default::default() };
    let (_, expected) = pair.cpu.step(&steps, &[input, input]).unwrap();
    for (layer, (out, expected)) in outs.iter().zip(&expected).enumerate() {
        pair.check(layer, &decode(&read_buffer(out), Dtype::F32), expected);
    }
    pair.check_state(s);
}

#[test]
fn layers_are_recorded_once_each() {
    let mut pair = Pair::new(&config());
    let s = pair.create_sequence();
    // The window is as full as it gets: 100 more tokens do not fit the ring.
    pair.fill(s, 63);
    let k = storage_buffer(&[0; 4 * 128 * 100]);
    let v = storage_buffer(&[0; 4 * 128 * 100]);
    let view = |b| TensorView::new(b, Dtype::F32);
    let binding = pair.gpu.bind(&LayerIo::append(view(&k), view(&v))).unwrap();
    submit(|encoder| {
        let mut step = pair.gpu.begin_step(encoder, &[SequenceStep::append(s, 100)]).unwrap();
        assert_eq!(step.attend(&mut *encoder, 0, &binding).unwrap_err(), Error::LayerMissing(0));
        step.layer(&mut *encoder, 0, &binding).unwrap();
        assert_eq!(step.layer(&mut *encoder, 0, &binding).unwrap_err(), Error::LayerRepeated(0));
        let beyond = step.layer(&mut *encoder, 2, &binding).unwrap_err();
        assert_eq!(beyond, Error::LayerOutOfRange { got: 2, layers: 2 });
        step.attend(&mut *encoder, 0, &binding).unwrap();
        assert_eq!(step.finish().unwrap_err(), Error::LayerMissing(1));
        assert_eq!(pair.gpu.tokens(s).unwrap(), 63);

        // The staging buffer is the last layer's.
        let mut step = pair.gpu.begin_step(encoder, &[SequenceStep::append(s, 100)]).unwrap();
        step.layer(&mut *encoder, 0, &binding).unwrap();
        step.layer(&mut *encoder, 1, &binding).unwrap();
        let overwritten = step.attend(&mut *encoder, 0, &binding).unwrap_err();
        assert_eq!(overwritten, Error::StagingOverwritten { layer: 0, by: 1 });
        step.finish().unwrap();
    });
    assert_eq!(pair.gpu.tokens(s).unwrap(), 163);
}

#[test]
fn layers_that_share_keys_and_values_attend_without_appending() {
    let mut pair = Pair::new(&config());
    let s = pair.create_sequence();
    pair.fill(s, 150);
    // The same queries again after the layers were recorded and packed: the same output, bit for bit.
    for n in [1, 8, 70] {
        let steps = [SequenceStep::new(s, n, n.min(8))];
        let tensors = pair.tensors(&steps);
        let t = &tensors[0];
        let [k, v, q] = [&t.k, &t.v, &t.q].map(|x| storage_buffer(bytemuck::cast_slice(x)));
        let outs = [poisoned_buffer(t.q.len() * 4), poisoned_buffer(t.q.len() * 4)];
        let view = |b| TensorView::new(b, Dtype::F32);
        let first = pair.gpu.bind(&LayerIo::new(view(&k), view(&v), view(&q), view(&outs[0]))).unwrap();
        // It needs no keys and values of its own, and can be bound while the step is recorded.
        let again = LayerIo::attend(view(&q), view(&outs[1]));
        submit(|encoder| {
            let mut step = pair.gpu.begin_step(encoder, &steps).unwrap();
            let again = step.bind(&again).unwrap();
            step.layer(&mut *encoder, 0, &first).unwrap();
            step.attend(&mut *encoder, 0, &again).unwrap();
            step.layer(&mut *encoder, 1, &first).unwrap();
            step.attend(&mut *encoder, 1, &again).unwrap();
            step.finish().unwrap();
        });
        let input = LayerInput { k: &t.k, v: &t.v, q: &t.q, ..Default::default() };
        pair.cpu.step(&steps, &[input, input]).unwrap();
        assert_eq!(read_buffer(&outs[0]), read_buffer(&outs[1]));
        pair.check_state(s);
    }
}

/// Strided tensors: `[heads, tokens, head_dim]`, and queries, keys and values fused in one buffer.
#[test]
fn any_layout_of_the_hosts_tensors() {
    let config = CacheConfig::new(1, 4, 2, 64).with_residual_window(32);
    for &dtype in Dtype::ALL {
        for fused in [false, true] {
            let mut pair = Pair::new(&config);
            pair.input = dtype;
            let s = pair.create_sequence();
            pair.fill(s, 100);
            let n = 5;
            let steps = [SequenceStep::extend(s, n)];
            let t = pair.tensors(&steps).remove(0);
            let n = n as usize;
            // (tensor, heads, element offset, token stride, head stride) in one buffer of 8 heads of 64 per
            // token, after 24 elements.
            let place = |head: usize| 24 + if fused { head * 64 } else { head * n * 64 };
            let (token, head) = if fused { (8 * 64, 64) } else { (64, n * 64) };
            let mut host = vec![0.0; 24 + 8 * 64 * n];
            for (data, heads, first) in [(&t.q, 4, 0), (&t.k, 2, 4), (&t.v, 2, 6)] {
                for (i, row) in data.chunks(64).enumerate() {
                    let at = place(first) + (i / heads) * token + (i % heads) * head;
                    host[at..at + 64].copy_from_slice(row);
                }
            }
            let (bytes, rounded) = crate::support::encode(&host, dtype);
            let buffer = storage_buffer(&bytes);
            let view = |first: usize| {
                TensorView::new(&buffer, dtype)
                    .with_offset((place(first) * dtype.bytes() as usize) as u64)
                    .with_strides(token as u32, head as u32)
            };
            let out = poisoned_buffer(4 * (8 + 4 * 100 * n));
            let out_view =
                TensorView::new(&out, Dtype::F32).with_offset(32).with_strides(100, 100 * n as u32);
            let io = LayerIo::new(view(4), view(6), view(0), out_view);
            let binding = pair.gpu.bind(&io).unwrap();
            submit(|encoder| {
                let mut step = pair.gpu.begin_step(encoder, &steps).unwrap();
                step.layer(&mut *encoder, 0, &binding).unwrap();
                step.finish().unwrap();
            });
            let gather = |heads: usize, first: usize| -> Vec<f32> {
                (0..n * heads)
                    .flat_map(|i| {
                        let at = place(first) + (i / heads) * token + (i % heads) * head;
                        rounded[at..at + 64].to_vec()
                    })
                    .collect()
            };
            let (q, k, v) = (gather(4, 0), gather(2, 4), gather(2, 6));
            let expected =
                pair.cpu.step(&steps, &[LayerInput { k: &k, v: &v, q: &q, ..Default::default() }]).unwrap().1;
            let raw = decode(&read_buffer(&out), Dtype::F32);
            let got: Vec<f32> = (0..n * 4)
                .flat_map(|i| raw[8 + (i / 4) * 100 + (i % 4) * 100 * n..][..64].to_vec())
                .collect();
            pair.check(0, &got, &expected[0]);
            // Nothing but the rows was written.
            let written = raw.iter().filter(|x| !x.is_nan()).count();
            assert_eq!(written, n * 4 * 64);
            pair.check_state(s);
        }
    }
}

#[test]
fn caches_are_independent_and_can_change_threads() {
    fn send_and_sync<T: Send + Sync>(_: &T) {}
    let mut a = Pair::new(&config());
    let mut b = Pair::new(&config());
    send_and_sync(&a.gpu);
    let (s, t) = (a.create_sequence(), b.create_sequence());
    let same_device = crate::support::same_device();
    std::thread::scope(|scope| {
        for (pair, sequence, tokens) in [(&mut a, s, 250), (&mut b, t, 130)] {
            scope.spawn(move || {
                same_device();
                pair.fill(sequence, tokens);
            });
        }
    });
    a.step(&[SequenceStep::decode(s)]);
    b.step(&[SequenceStep::decode(t)]);
    a.check_state(s);
    b.check_state(t);
}

#[test]
fn a_second_device_in_one_process() {
    let (device, queue) = crate::support::new_device(wgpu::Limits::default());
    let mut gpu = crate::support::new_cache(&device, &queue, &config()).unwrap();
    let mut cpu = CpuCache::with_id(&config(), gpu.id()).unwrap();
    let s = gpu.create_sequence().unwrap();
    cpu.create_sequence().unwrap();
    let data: Vec<f32> = (0..100 * 128).map(|i| (i % 71) as f32 - 35.0).collect();
    use wgpu::util::DeviceExt;
    let make = || {
        device.create_buffer_init(&wgpu::util::BufferInitDescriptor {
            label: None,
            contents: bytemuck::cast_slice(&data),
            usage: wgpu::BufferUsages::STORAGE,
        })
    };
    let (k, v) = (make(), make());
    let view = |b| TensorView::new(b, Dtype::F32);
    let binding = gpu.bind(&LayerIo::append(view(&k), view(&v))).unwrap();
    let mut encoder = device.create_command_encoder(&Default::default());
    let steps = [SequenceStep::append(s, 100)];
    let mut step = gpu.begin_step(&mut encoder, &steps).unwrap();
    step.layer(&mut encoder, 0, &binding).unwrap();
    step.layer(&mut encoder, 1, &binding).unwrap();
    step.finish().unwrap();
    queue.submit([encoder.finish()]);
    let input = LayerInput { k: &data, v: &data, q: &[], ..Default::default() };
    cpu.step(&steps, &[input, input]).unwrap();
    assert_eq!(gpu.submit_and_read_state_blocking(1, s).unwrap(), cpu.state(1, s).unwrap());
}

#[test]
fn removed_sequences_give_their_pages_back() {
    let mut pair = Pair::new(&CacheConfig::new(1, 2, 2, 64).with_capacity(600).with_max_sequences(2));
    for _ in 0..5 {
        let s = pair.create_sequence();
        pair.fill(s, 600);
        pair.step(&[SequenceStep::attend(s, 1)]);
        pair.check_state(s);
        pair.gpu.remove_sequence(s).unwrap();
        pair.cpu.remove_sequence(s).unwrap();
        assert!(matches!(pair.gpu.tokens(s), Err(Error::UnknownSequence(_))));
    }
}

/// What is reported, what was allocated, and what the calculator says beforehand are the same bytes.
#[test]
fn reported_bytes_are_the_buffers_bytes() {
    for (layers, tokens, max_step) in [(1, 1, 8), (2, 600, 512), (3, 4096, 100)] {
        let config = CacheConfig::new(layers, 4, 2, 80).with_max_step(max_step).with_capacity(tokens);
        let gpu = crate::support::new_cache(&device().0, &device().1, &config).unwrap();
        let memory = gpu.memory();
        let uploads = crate::support::upload_bytes(&gpu);
        assert_eq!(memory.total(), uploads + gpu.buffers().iter().map(|b| b.size()).sum::<u64>());
        let predicted = kivi_wgpu::cache_bytes(&config, tokens).unwrap();
        assert_eq!(memory.total(), predicted.allocated());
    }
}
