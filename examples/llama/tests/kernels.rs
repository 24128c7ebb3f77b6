//! The model's kernels against plain loops on the CPU, without a model.

use half::f16;
use llama::generate::{Sampler, Sampling};
use llama::gguf::Weights;
use llama::gpu::Gpu;
use llama::products::{Epilogue, Matrix, Products};
use llama::score::Scorer;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// Random weights, and what they are in f32, `[row][column]`.
fn weights(random: &mut StdRng, four: bool, rows: usize, columns: usize) -> (Weights, Vec<f32>) {
    let half = |x: f32| f16::from_f32(x);
    let (mut words, mut floats) = (Vec::new(), vec![0.0; rows * columns]);
    if !four {
        for at in (0..rows * columns).step_by(2) {
            let pair = [0, 1].map(|_| half(random.random_range(-1.0..1.0)));
            (floats[at], floats[at + 1]) = (pair[0].to_f32(), pair[1].to_f32());
            words.push(u32::from(pair[0].to_bits()) | u32::from(pair[1].to_bits()) << 16);
        }
        return (Weights::Sixteen(words), floats);
    }
    for block in 0..rows * columns / 32 {
        let (scale, minimum) = (half(random.random_range(0.01..0.1)), half(random.random_range(-1.0..0.0)));
        words.push(u32::from(scale.to_bits()) | u32::from(minimum.to_bits()) << 16);
        let bytes: [u8; 16] = random.random();
        for (byte, code) in bytes.into_iter().enumerate() {
            let value = |code: u8| f32::from(code) * scale.to_f32() + minimum.to_f32();
            floats[block * 32 + byte] = value(code & 15);
            floats[block * 32 + byte + 16] = value(code >> 4);
        }
        words.extend(bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])));
    }
    (Weights::Four(words), floats)
}

fn floats(random: &mut StdRng, count: usize) -> Vec<f32> {
    (0..count).map(|_| random.random_range(-1.0..1.0)).collect()
}

/// All kernels, both kinds of weights, whole and in parts, all epilogues, rows and tokens that fill no tile.
#[test]
fn products() {
    let gpu = Gpu::open(None).unwrap();
    let random = &mut StdRng::seed_from_u64(1);
    let (rows, columns) = (84, 96);
    let mut both = [("chosen", Products::new(&gpu)), ("portable", Products::portable(&gpu))];
    for (four, parts) in [(true, 1), (false, 1), (true, 3), (false, 2)] {
        let (stored, values) = weights(random, four, rows, columns);
        let most_rows = (rows as u32).div_ceil(parts);
        let matrix = Matrix::in_parts(&gpu, "matrix", &stored, columns as u32, most_rows).unwrap();
        for tokens in [1, 3, 5, 17] {
            let input = floats(random, 32 * columns);
            let before = floats(random, 32 * rows);
            let bias = floats(random, rows);
            for (name, products) in &mut both {
                for epilogue in 0..3 {
                    let from = gpu.filled("input", &input).unwrap();
                    let to = gpu.filled("output", &before).unwrap();
                    let finish = match epilogue {
                        0 => Epilogue::Store,
                        1 => Epilogue::Bias(gpu.filled("bias", &bias).unwrap()),
                        _ => Epilogue::Add,
                    };
                    let product = products.bind(&matrix, &from, &to, finish);
                    let mut encoder = gpu.encoder();
                    product.dispatch(&mut encoder.begin_compute_pass(&Default::default()), tokens as u32);
                    let got: Vec<f32> =
                        gpu.submit_and_read(encoder, &to, 0..(tokens * rows * 4) as u64).wait(&gpu).unwrap();
                    for (at, got) in got.into_iter().enumerate() {
                        let (token, row) = (at / rows, at % rows);
                        let sum: f64 = (0..columns)
                            .map(|c| {
                                f64::from(values[row * columns + c]) * f64::from(input[token * columns + c])
                            })
                            .sum();
                        let expected = sum
                            + match epilogue {
                                0 => 0.0,
                                1 => f64::from(bias[row]),
                                _ => f64::from(before[at]),
                            };
                        assert!(
                            (f64::from(got) - expected).abs() < 2e-5,
                            "{name}, four bits {four}, {parts} parts, {tokens} tokens, epilogue {epilogue}, row {row}: {got}, {expected}"
                        );
                    }
                }
            }
        }
    }
}

/// Rows by their numbers, of a matrix in parts.
#[test]
fn embeddings() {
    let gpu = Gpu::open(None).unwrap();
    let random = &mut StdRng::seed_from_u64(2);
    let (rows, columns) = (84, 96);
    for four in [true, false] {
        let (stored, values) = weights(random, four, rows, columns);
        let matrix = Matrix::in_parts(&gpu, "matrix", &stored, columns as u32, 30).unwrap();
        let tokens = [0, 29, 30, 59, 60, 83, 7, 30u32];
        let numbers = gpu.filled("tokens", &tokens).unwrap();
        let to = gpu.storage("output", (tokens.len() * columns * 4) as u64).unwrap();
        let gather = Products::new(&gpu).gather(&matrix, &numbers, &to);
        let mut encoder = gpu.encoder();
        gather.dispatch(&mut encoder.begin_compute_pass(&Default::default()), tokens.len() as u32);
        let got: Vec<f32> = gpu.submit_and_read(encoder, &to, 0..to.size()).wait(&gpu).unwrap();
        for (token, got) in tokens.iter().zip(got.chunks_exact(columns)) {
            let row = &values[*token as usize * columns..][..columns];
            assert!(got.iter().zip(row).all(|(got, expected)| (got - expected).abs() < 1e-6), "row {token}");
        }
    }
}

/// Candidates by plain sorting.
fn candidates(logits: &[f32], sampling: &Sampling) -> Vec<usize> {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
    if sampling.top_k > 0 {
        order.truncate(sampling.top_k as usize);
    }
    let weight = |&i: &usize| f64::from((logits[i] - logits[order[0]]) / sampling.temperature).exp();
    let all: f64 = order.iter().map(weight).sum();
    let mut held = 0.0;
    let count = order
        .iter()
        .take_while(|i| {
            let before = held;
            held += weight(i);
            before < f64::from(sampling.top_p) * all
        })
        .count();
    order.truncate(count.max(1));
    order
}

/// Draws come from the candidates only, all of them come, and as often as their probability says.
#[test]
fn sampling() {
    let gpu = Gpu::open(None).unwrap();
    let random = &mut StdRng::seed_from_u64(2);
    let (vocabulary, rows) = (1000, 4000);
    let one: Vec<f32> = floats(random, vocabulary).iter().map(|x| 6.0 * x).collect();
    let logits = gpu.filled("logits", &one.repeat(rows)).unwrap();
    let tokens = gpu.storage("tokens", rows as u64 * 4).unwrap();
    let sampler = Sampler::over(&gpu, vocabulary as u32, &logits, &tokens).unwrap();
    let mut draw = |sampling: Sampling| -> Vec<u32> {
        let choices: Vec<Sampling> =
            (0..rows).map(|_| Sampling { seed: random.random(), ..sampling }).collect();
        sampler.submit(&gpu, gpu.encoder(), &choices).wait(&gpu).unwrap()
    };
    let best = candidates(&one, &Sampling { temperature: 1.0, ..Sampling::GREEDY })[0] as u32;
    assert!(draw(Sampling::GREEDY).iter().all(|&token| token == best));
    for (temperature, top_k, top_p) in
        [(1.0, 5, 1.0), (0.5, 0, 0.4), (2.0, 40, 0.5), (1.0, 1, 1.0), (3.0, 0, 1.0), (1.0, 0, 0.0)]
    {
        let sampling = Sampling { temperature, top_k, top_p, seed: 0 };
        let drawn = draw(sampling);
        let allowed = candidates(&one, &sampling);
        let weights: Vec<f64> = allowed.iter().map(|&i| f64::from(one[i] / temperature).exp()).collect();
        let all: f64 = weights.iter().sum();
        assert!(drawn.iter().all(|&token| allowed.contains(&(token as usize))), "{sampling:?}");
        for (&token, weight) in allowed.iter().zip(weights) {
            let p = weight / all;
            let count = drawn.iter().filter(|&&t| t as usize == token).count() as f64;
            let deviation = (rows as f64 * p * (1.0 - p)).sqrt();
            assert!(
                (count - rows as f64 * p).abs() <= 5.0 * deviation + 1.0,
                "{sampling:?}: {token} {count} times, p = {p}"
            );
        }
    }
}

/// Losses, divergences and ranks of random rows, against f64.
#[test]
fn scores() {
    let gpu = Gpu::open(None).unwrap();
    let random = &mut StdRng::seed_from_u64(3);
    let (vocabulary, rows) = (2000, 6);
    let scaled = |x: Vec<f32>| -> Vec<f32> { x.into_iter().map(|x| 20.0 * x).collect() };
    let reference = scaled(floats(random, vocabulary * rows));
    let other: Vec<f32> = reference.iter().map(|x| x + random.random_range(-0.5..0.5)).collect();
    let targets: Vec<u32> = (0..rows).map(|_| random.random_range(0..vocabulary as u32)).collect();
    let logits = gpu.filled("logits", &reference).unwrap();
    let scorer = Scorer::new(&gpu, vocabulary as u32, &logits).unwrap();
    let own = scorer.submit(&gpu, gpu.encoder(), &targets, true).unwrap();
    gpu.queue.write_buffer(&logits, 0, bytemuck::cast_slice(&other));
    let scores = scorer.submit(&gpu, gpu.encoder(), &targets, false).unwrap();
    let log_softmax = |row: &[f32]| -> Vec<f64> {
        let sum: f64 = row.iter().map(|&x| f64::from(x).exp()).sum();
        row.iter().map(|&x| f64::from(x) - sum.ln()).collect()
    };
    let top = |row: &[f64]| (0..vocabulary).max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap();
    for row in 0..rows {
        let at = row * vocabulary..(row + 1) * vocabulary;
        let (p, q) = (log_softmax(&reference[at.clone()]), log_softmax(&other[at]));
        let target = targets[row] as usize;
        assert!((f64::from(own[row].loss) + p[target]).abs() < 1e-4);
        assert!(own[row].divergence.abs() < 1e-5 && own[row].agrees == 1.0);
        assert!((f64::from(scores[row].loss) + q[target]).abs() < 1e-4);
        let divergence: f64 = p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum();
        assert!((f64::from(scores[row].divergence) - divergence).abs() < 1e-5 + 1e-4 * divergence);
        assert_eq!(scores[row].agrees == 1.0, top(&p) == top(&q));
        assert_eq!(scores[row].right == 1.0, top(&q) == target);
    }
}
