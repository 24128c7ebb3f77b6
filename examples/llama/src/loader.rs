//! Weights go to the GPU, each with the kernel that reads it.

use crate::gguf::Gguf;
use crate::gpu::Gpu;
use crate::kernel::Kernel;
use crate::products::{Epilogue, Gather, Matrix, Product, Products};
use crate::room::Room;
use crate::shape::Shape;
use anyhow::{Result, bail};
use kivi_wgpu::wgpu;

/// The kernels of one layer.
pub struct Layer {
    pub attention_norm: Kernel,
    pub qkv: Product,
    pub output: Product,
    pub feed_forward_norm: Kernel,
    pub gate_up: Product,
    pub down: Product,
}

/// The buffers that a step goes through.
pub struct Activations {
    /// u32 per token of a step.
    pub tokens: wgpu::Buffer,
    pub positions: wgpu::Buffer,
    /// Which rows of a step get logits.
    pub logit_rows: wgpu::Buffer,
    /// All rows, in order.
    every: wgpu::Buffer,
    stream: wgpu::Buffer,
    normed: wgpu::Buffer,
    /// f32 `[token][query heads, KV heads, KV heads][head_dim]`
    pub qkv: wgpu::Buffer,
    pub attended: wgpu::Buffer,
    pub gated: wgpu::Buffer,
    pub activated: wgpu::Buffer,
    /// f32 `[row][vocabulary]`
    pub logits: wgpu::Buffer,
}

impl Activations {
    pub fn new(gpu: &Gpu, shape: &Shape, room: Room) -> Result<Activations> {
        // The kernel that multiplies takes tokens by 16.
        let padded = |rows: u32| u64::from(rows.next_multiple_of(16));
        let floats = |columns: u32, rows: u32| padded(rows) * u64::from(columns) * 4;
        let every: Vec<u32> = (0..room.tokens.next_multiple_of(16)).collect();
        let queries = shape.query_heads * shape.head_dim;
        Ok(Activations {
            tokens: gpu.storage("tokens", padded(room.tokens) * 4)?,
            positions: gpu.storage("positions", padded(room.tokens) * 4)?,
            logit_rows: gpu.storage("rows of logits", padded(room.logits) * 4)?,
            every: gpu.filled("every row", &every)?,
            stream: gpu.storage("residual stream", floats(shape.hidden, room.tokens))?,
            normed: gpu.storage("norm", floats(shape.hidden, room.tokens.max(room.logits)))?,
            qkv: gpu.storage("qkv", floats(shape.qkv(), room.tokens))?,
            attended: gpu.storage("attention output", floats(queries, room.tokens))?,
            gated: gpu.storage("gate and up", floats(2 * shape.feed_forward, room.tokens))?,
            activated: gpu.storage("swiglu", floats(shape.feed_forward, room.tokens))?,
            logits: gpu.storage("logits", floats(shape.vocabulary, room.logits))?,
        })
    }
}

/// Reads a file's weights and binds them.
pub struct Loader<'a> {
    gpu: &'a Gpu,
    shape: &'a Shape,
    file: &'a mut Gguf,
    activations: &'a Activations,
    norm: wgpu::ComputePipeline,
    products: Products<'a>,
}

impl<'a> Loader<'a> {
    pub fn new(
        gpu: &'a Gpu,
        shape: &'a Shape,
        file: &'a mut Gguf,
        activations: &'a Activations,
    ) -> Loader<'a> {
        let norm = gpu.pipeline(
            "rms_norm",
            &[("COLUMNS", format!("{}u", shape.hidden)), ("EPSILON", format!("{:e}f", shape.epsilon))],
            &[include_str!("../shaders/rms_norm.wgsl")],
        );
        Loader { gpu, shape, file, activations, norm, products: Products::new(gpu) }
    }

    /// The norm of the residual stream's rows in `rows`.
    pub fn norm(&mut self, name: &str, rows: &wgpu::Buffer) -> Result<Kernel> {
        let scale = self.gpu.filled(name, &self.file.floats(name, self.shape.hidden)?)?;
        let Activations { stream, normed, .. } = self.activations;
        Ok(Kernel::new(self.gpu, &self.norm, &[&scale, stream, normed, rows]))
    }

    fn matrix(&mut self, names: &[String], [rows, columns]: [u32; 2]) -> Result<Matrix> {
        let matrix = Matrix::upload(self.gpu, &names[0], &self.file.rows(names, columns)?, columns)?;
        if matrix.rows() != rows {
            bail!("{} has {} rows instead of {rows}", names.join(" and "), matrix.rows());
        }
        Ok(matrix)
    }

    /// The matrices with these names, one below the other, times what is in `from`.
    fn product(
        &mut self,
        names: &[String],
        size: [u32; 2],
        from: &wgpu::Buffer,
        to: &wgpu::Buffer,
        epilogue: Epilogue,
    ) -> Result<Product> {
        let matrix = self.matrix(names, size)?;
        Ok(self.products.bind(&matrix, from, to, epilogue))
    }

    /// What is added to queries, keys and values, if the model has it.
    fn bias(&mut self, index: u32) -> Result<Epilogue> {
        let names = ["q", "k", "v"].map(|name| format!("blk.{index}.attn_{name}.bias"));
        if !self.file.has(&names[0]) {
            return Ok(Epilogue::Store);
        }
        let Shape { query_heads, kv_heads, head_dim, .. } = *self.shape;
        let mut all = Vec::new();
        for (name, heads) in names.iter().zip([query_heads, kv_heads, kv_heads]) {
            all.extend(self.file.floats(name, heads * head_dim)?);
        }
        Ok(Epilogue::Bias(self.gpu.filled("bias", &all)?))
    }

    /// The layer number `index`.
    pub fn layer(&mut self, index: u32) -> Result<Layer> {
        let of = |name: &str| format!("blk.{index}.{name}.weight");
        let three = ["attn_q", "attn_k", "attn_v"].map(of);
        let two = ["ffn_gate", "ffn_up"].map(of);
        let (hidden, wide) = (self.shape.hidden, self.shape.feed_forward);
        let queries = self.shape.query_heads * self.shape.head_dim;
        let Activations { every, stream, normed, qkv, attended, gated, activated, .. } = self.activations;
        let bias = self.bias(index)?;
        let add = Epilogue::Add;
        Ok(Layer {
            attention_norm: self.norm(&of("attn_norm"), every)?,
            qkv: self.product(&three, [self.shape.qkv(), hidden], normed, qkv, bias)?,
            output: self.product(&[of("attn_output")], [hidden, queries], attended, stream, add)?,
            feed_forward_norm: self.norm(&of("ffn_norm"), every)?,
            gate_up: self.product(&two, [2 * wide, hidden], normed, gated, Epilogue::Store)?,
            down: self.product(&[of("ffn_down")], [hidden, wide], activated, stream, Epilogue::Add)?,
        })
    }

    /// Embeddings of tokens, and the product that gives logits: often the same matrix.
    pub fn vocabulary(&mut self) -> Result<(Gather, Product)> {
        let size = [self.shape.vocabulary, self.shape.hidden];
        let Activations { tokens, stream, normed, logits, .. } = self.activations;
        let embeddings = self.matrix(&["token_embd.weight".to_string()], size)?;
        let own = "output.weight";
        let head = match self.file.has(own) {
            true => self.product(&[own.to_string()], size, normed, logits, Epilogue::Store)?,
            false => self.products.bind(&embeddings, normed, logits, Epilogue::Store),
        };
        Ok((self.products.gather(&embeddings, tokens, stream), head))
    }
}
