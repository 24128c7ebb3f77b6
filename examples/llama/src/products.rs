//! Products of weights and activations: which kernel multiplies what.

use crate::gguf::Weights;
use crate::gpu::Gpu;
use crate::model::Kernel;
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

/// Rows of weights on the GPU.
pub struct Matrix {
    weights: wgpu::Buffer,
    /// Scales and minima of weights in 4 bits.
    scales: Option<wgpu::Buffer>,
    rows: u32,
    columns: u32,
}

impl Matrix {
    /// Of rows of so many columns, turned so that neighbouring rows are neighbours in memory (shaders/weights_*.wgsl).
    pub fn upload(gpu: &Gpu, label: &str, weights: &Weights, columns: u32) -> Result<Matrix> {
        let blocks = columns as usize / 32;
        let (rows, weights, scales) = match weights {
            Weights::Four(words) => {
                let rows = words.len() / (blocks * 5);
                let (mut codes, mut scales) = (vec![[0; 4]; rows * blocks], vec![0; rows * blocks]);
                for (index, block) in words.chunks_exact(5).enumerate() {
                    let at = index % blocks * rows + index / blocks;
                    scales[at] = block[0];
                    codes[at].copy_from_slice(&block[1..]);
                }
                (rows, gpu.filled(label, &codes)?, Some(gpu.filled("scales", &scales)?))
            }
            Weights::Sixteen(words) => {
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
                (rows, gpu.filled(label, &parts)?, None)
            }
        };
        Ok(Matrix { weights, scales, rows: rows as u32, columns })
    }

    pub fn rows(&self) -> u32 {
        self.rows
    }

    /// Its buffers and their bindings.
    fn buffers(&self) -> impl Iterator<Item = (u32, &wgpu::Buffer)> {
        [(2, &self.weights)].into_iter().chain(self.scales.iter().map(|scales| (3, scales)))
    }

    fn constants(&self) -> [(&'static str, String); 2] {
        [("ROWS", format!("{}u", self.rows)), ("COLUMNS", format!("{}u", self.columns))]
    }

    fn piece(&self) -> &'static str {
        if self.scales.is_some() {
            include_str!("../shaders/weights_four.wgsl")
        } else {
            include_str!("../shaders/weights_sixteen.wgsl")
        }
    }
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
    few: (Kernel, Tile),
    many: (Kernel, Tile),
    rows: u32,
}

impl Product {
    pub fn rows(&self) -> u32 {
        self.rows
    }

    pub fn dispatch(&self, pass: &mut wgpu::ComputePass<'_>, tokens: u32) {
        let (kernel, tile) = if tokens <= FEW { &self.few } else { &self.many };
        kernel.dispatch(pass, self.rows.div_ceil(tile.rows), tokens.div_ceil(tile.tokens));
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
        let mut buffers = vec![(0, from), (1, to)];
        buffers.extend(matrix.buffers());
        if let Epilogue::Bias(bias) = &epilogue {
            buffers.push((4, bias));
        }
        let mut kernel = |main: &[&str], rows_at_once, tokens| {
            let Matrix { rows, columns, scales, .. } = matrix;
            let bits = if scales.is_some() { 4 } else { 16 };
            let label = format!("{rows} rows of {columns} in {bits} bits, {tokens} tokens, {finish}");
            let pipeline = self.pipelines.entry(label).or_insert_with_key(|label| {
                let mut pieces = vec![include_str!("../shaders/products.wgsl"), matrix.piece(), source];
                pieces.extend(main);
                self.gpu.pipeline(label, &matrix.constants(), &pieces)
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
        Product { few, many, rows: matrix.rows }
    }

    /// `to[token] = row tokens[token] of the matrix`.
    pub fn gather(&self, matrix: &Matrix, tokens: &wgpu::Buffer, to: &wgpu::Buffer) -> Kernel {
        let pieces = [matrix.piece(), include_str!("../shaders/embed.wgsl")];
        let pipeline = self.gpu.pipeline("embed", &matrix.constants(), &pieces);
        let buffers: Vec<_> = [(0, tokens), (1, to)].into_iter().chain(matrix.buffers()).collect();
        Kernel::numbered(self.gpu, &pipeline, &buffers)
    }
}
