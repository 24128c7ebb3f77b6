//! Products of weights and activations: which kernel multiplies what.

use crate::gguf::Weights;
use crate::gpu::Gpu;
use crate::kernel::Kernel;
use anyhow::Result;
use kivi_wgpu::wgpu;
use std::collections::HashMap;

/// Up to so many tokens, they are multiplied one by one; beyond, by tiles of tokens.
const FEW: u32 = 4;

/// How a kernel divides its work.
#[derive(Clone, Copy)]
struct Tile {
    rows: u32,
    tokens: u32,
}

/// Rows of weights on the GPU: in as many parts as bindings need.
pub struct Matrix {
    parts: Vec<Rows>,
    rows: u32,
    columns: u32,
}

/// Some rows of a matrix.
struct Rows {
    weights: wgpu::Buffer,
    /// Scales and minima of weights in 4 bits.
    scales: Option<wgpu::Buffer>,
    first: u32,
    rows: u32,
}

impl Matrix {
    /// Of rows of so many columns.
    pub fn upload(gpu: &Gpu, label: &str, weights: &Weights, columns: u32) -> Result<Matrix> {
        let bytes = match weights {
            Weights::Four(_) => columns / 2,
            Weights::Sixteen(_) => 2 * columns,
        };
        let rows = gpu.largest_buffer() / u64::from(bytes);
        Matrix::in_parts(gpu, label, weights, columns, rows.clamp(1, u64::from(u32::MAX)) as u32)
    }

    /// In parts of so many rows, for adapters whose bindings are small.
    pub fn in_parts(
        gpu: &Gpu,
        label: &str,
        weights: &Weights,
        columns: u32,
        most_rows: u32,
    ) -> Result<Matrix> {
        let (words, block) = match weights {
            Weights::Four(words) => (words, 5),
            Weights::Sixteen(words) => (words, 16),
        };
        let row = columns as usize / 32 * block;
        let rows = (words.len() / row) as u32;
        let mut parts = Vec::new();
        for first in (0..rows).step_by(most_rows as usize) {
            let end = rows.min(first.saturating_add(most_rows));
            let words = &words[first as usize * row..end as usize * row];
            let (weights, scales) = match weights {
                Weights::Four(_) => {
                    let (codes, scales) = turn_four(words, columns);
                    (gpu.filled(label, &codes)?, Some(gpu.filled("scales", &scales)?))
                }
                Weights::Sixteen(_) => (gpu.filled(label, &turn_sixteen(words, columns))?, None),
            };
            parts.push(Rows { weights, scales, first, rows: end - first });
        }
        Ok(Matrix { parts, rows, columns })
    }

    pub fn rows(&self) -> u32 {
        self.rows
    }

    fn constants(&self, part: &Rows) -> [(&'static str, String); 4] {
        let constants = [
            ("ROWS", part.rows),
            ("COLUMNS", self.columns),
            ("FIRST_ROW", part.first),
            ("ALL_ROWS", self.rows),
        ];
        constants.map(|(name, value)| (name, format!("{value}u")))
    }
}

impl Rows {
    /// Its buffers and their bindings.
    fn buffers(&self) -> impl Iterator<Item = (u32, &wgpu::Buffer)> {
        [(2, &self.weights)].into_iter().chain(self.scales.iter().map(|scales| (3, scales)))
    }

    fn piece(&self) -> &'static str {
        if self.scales.is_some() {
            include_str!("../shaders/weights_four.wgsl")
        } else {
            include_str!("../shaders/weights_sixteen.wgsl")
        }
    }
}

/// Codes and scales of rows, turned so that neighbouring rows are neighbours in memory
/// (shaders/weights_four.wgsl).
fn turn_four(words: &[u32], columns: u32) -> (Vec<[u32; 4]>, Vec<u32>) {
    let blocks = columns as usize / 32;
    let rows = words.len() / (blocks * 5);
    let (mut codes, mut scales) = (vec![[0; 4]; rows * blocks], vec![0; rows * blocks]);
    for (index, block) in words.chunks_exact(5).enumerate() {
        let at = index % blocks * rows + index / blocks;
        scales[at] = block[0];
        codes[at].copy_from_slice(&block[1..]);
    }
    (codes, scales)
}

/// Weights of rows, turned likewise (shaders/weights_sixteen.wgsl).
fn turn_sixteen(words: &[u32], columns: u32) -> Vec<[u32; 4]> {
    let blocks = columns as usize / 32;
    let rows = words.len() / (blocks * 16);
    let mut parts = vec![[0; 4]; rows * blocks * 4];
    for (index, block) in words.chunks_exact(16).enumerate() {
        for part in 0..4 {
            // A word has two columns.
            let (low, high) = (2 * part, 2 * part + 8);
            let at = (index % blocks * 4 + part) * rows + index / blocks;
            parts[at] = [block[low], block[low + 1], block[high], block[high + 1]];
        }
    }
    parts
}

/// What becomes of a product.
pub enum Epilogue {
    Store,
    /// A bias per row is added.
    Bias(wgpu::Buffer),
    /// It is added to what is there.
    Add,
}

/// A matrix bound to input and output.
pub struct Product {
    parts: Vec<ProductRows>,
}

struct ProductRows {
    few: (Kernel, Tile),
    many: (Kernel, Tile),
    rows: u32,
}

impl Product {
    pub fn dispatch(&self, pass: &mut wgpu::ComputePass<'_>, tokens: u32) {
        for part in &self.parts {
            let (kernel, tile) = if tokens <= FEW { &part.few } else { &part.many };
            kernel.dispatch(pass, part.rows.div_ceil(tile.rows), tokens.div_ceil(tile.tokens));
        }
    }
}

/// Rows of a matrix by their numbers.
pub struct Gather {
    parts: Vec<Kernel>,
    columns: u32,
}

impl Gather {
    pub fn dispatch(&self, pass: &mut wgpu::ComputePass<'_>, tokens: u32) {
        self.parts.iter().for_each(|part| part.dispatch(pass, (self.columns / 32).div_ceil(16), tokens));
    }
}

/// Makes products; layers whose matrices have the same shape share pipelines.
pub struct Products<'a> {
    gpu: &'a Gpu,
    shuffles: bool,
    pipelines: HashMap<String, wgpu::ComputePipeline>,
}

impl<'a> Products<'a> {
    /// By the kernels that suit the adapter.
    pub fn new(gpu: &'a Gpu) -> Products<'a> {
        Products { gpu, shuffles: gpu.shuffles_eight(), pipelines: HashMap::new() }
    }

    /// By the kernels that run everywhere.
    pub fn portable(gpu: &'a Gpu) -> Products<'a> {
        Products { gpu, shuffles: false, pipelines: HashMap::new() }
    }

    /// `to[token][row] = matrix · from[token]`, with an epilogue.
    pub fn bind(
        &mut self,
        matrix: &Matrix,
        from: &wgpu::Buffer,
        to: &wgpu::Buffer,
        epilogue: Epilogue,
    ) -> Product {
        let (finish, source) = match &epilogue {
            Epilogue::Store => ("store", include_str!("../shaders/finish_store.wgsl")),
            Epilogue::Bias(_) => ("bias", include_str!("../shaders/finish_bias.wgsl")),
            Epilogue::Add => ("add", include_str!("../shaders/finish_add.wgsl")),
        };
        let parts = matrix.parts.iter().map(|part| {
            let mut buffers = vec![(0, from), (1, to)];
            buffers.extend(part.buffers());
            if let Epilogue::Bias(bias) = &epilogue {
                buffers.push((4, bias));
            }
            let mut kernel = |main: &[&str], rows_at_once, tokens| {
                let (Matrix { rows: all, columns, .. }, Rows { scales, first, rows, .. }) = (matrix, part);
                let bits = if scales.is_some() { 4 } else { 16 };
                let label = format!(
                    "{rows} of {all} rows from {first}, {columns} columns in {bits} bits, {tokens} tokens, {finish}"
                );
                let pipeline = self.pipelines.entry(label).or_insert_with_key(|label| {
                    let mut pieces = vec![include_str!("../shaders/products.wgsl"), part.piece(), source];
                    pieces.extend(main);
                    self.gpu.pipeline(label, &matrix.constants(part), &pieces)
                });
                (Kernel::numbered(self.gpu, pipeline, &buffers), Tile { rows: rows_at_once, tokens })
            };
            let (few, many) = if self.shuffles {
                let shared = include_str!("../shaders/subgroups.wgsl");
                let row = include_str!("../shaders/multiply_row_subgroups.wgsl");
                let tile = include_str!("../shaders/multiply_tile_subgroups.wgsl");
                (kernel(&[shared, row], 64, 1), kernel(&[shared, tile], 128, 8))
            } else {
                let row = include_str!("../shaders/multiply_row.wgsl");
                let tile = include_str!("../shaders/multiply_tile.wgsl");
                (kernel(&[row], 32, 1), kernel(&[tile], 64, 16))
            };
            ProductRows { few, many, rows: part.rows }
        });
        Product { parts: parts.collect() }
    }

    /// `to[token] = row tokens[token] of the matrix`.
    pub fn gather(&self, matrix: &Matrix, tokens: &wgpu::Buffer, to: &wgpu::Buffer) -> Gather {
        let parts = matrix.parts.iter().map(|part| {
            let pieces = [part.piece(), include_str!("../shaders/embed.wgsl")];
            let pipeline = self.gpu.pipeline("embed", &matrix.constants(part), &pieces);
            let buffers: Vec<_> = [(0, tokens), (1, to)].into_iter().chain(part.buffers()).collect();
            Kernel::numbered(self.gpu, &pipeline, &buffers)
        });
        Gather { parts: parts.collect(), columns: matrix.columns }
    }
}
