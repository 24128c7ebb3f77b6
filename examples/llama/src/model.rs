//! A Llama or Qwen2 model on the GPU: weights, kernels and the recording of a step. The cache is the
//! library's.

use crate::gguf::Gguf;
use crate::gpu::Gpu;
use crate::kernel::Kernel;
use crate::loader::{Activations, Layer, Loader};
use crate::products::{Gather, Product};
use crate::profile::{Part, Profile, Segments};
use crate::room::Room;
use crate::shape::{RopePairs, Shape};
use anyhow::{Result, bail};
use kivi_wgpu::{
    CacheConfig, Dtype, KvCache, KvCacheOptions, LayerBinding, LayerIo, SequenceId, SequenceStep, TensorView,
    wgpu,
};

/// Tokens that a cache is made for at first; it grows.
const FIRST_CAPACITY: u32 = 4096;

/// Weights, activations and kernels. Any number of caches can be used with it.
pub struct Model {
    pub gpu: Gpu,
    pub shape: Shape,
    pub room: Room,
    embed: Gather,
    layers: Vec<Layer>,
    rope: Kernel,
    swiglu: Kernel,
    final_norm: Kernel,
    head: Product,
    /// u32 per token of a step; kernels that sample write here, and the next step goes on from there.
    pub tokens: wgpu::Buffer,
    positions: wgpu::Buffer,
    /// Which rows of a step get logits.
    logit_rows: wgpu::Buffer,
    /// f32 `[token][query heads, KV heads, KV heads][head_dim]`
    pub qkv: wgpu::Buffer,
    attended: wgpu::Buffer,
    /// f32 `[row][vocabulary]`
    pub logits: wgpu::Buffer,
}

/// A cache that is bound to a model's activations.
pub struct Context {
    pub cache: KvCache,
    io: LayerBinding,
}

/// What a step does to a sequence.
#[derive(Debug, Clone, Copy)]
pub struct Input<'a> {
    pub sequence: SequenceId,
    /// The next tokens; `None`: the one that the GPU has sampled for this row.
    pub tokens: Option<&'a [u32]>,
}

/// Which tokens of a step get logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    Nothing,
    /// The last of each sequence.
    Last,
    All,
}

impl Model {
    /// Uploads the weights of a file whose model has this shape; `progress` is told how many of how many
    /// layers are there.
    pub fn load(
        gpu: Gpu,
        mut file: Gguf,
        shape: Shape,
        room: Room,
        mut progress: impl FnMut(u32, u32),
    ) -> Result<Model> {
        let activations = Activations::new(&gpu, &shape, room)?;
        let mut loader = Loader::new(&gpu, &shape, &mut file, &activations);
        let mut layers = Vec::with_capacity(shape.layers as usize);
        for index in 0..shape.layers {
            layers.push(loader.layer(index)?);
            // Uploads are copies on their way: after this, the memory that they are staged in is free again.
            gpu.submit(gpu.encoder());
            gpu.wait()?;
            progress(index + 1, shape.layers);
        }
        let (embed, head) = loader.vocabulary()?;
        let final_norm = loader.norm("output_norm.weight", &activations.logit_rows)?;
        let Activations { positions, qkv, gated, activated, .. } = &activations;
        let rope = rope(&gpu, &shape, room.context, shape.qkv(), positions, qkv)?;
        let swiglu = gpu.pipeline(
            "swiglu",
            &[("COLUMNS", format!("{}u", shape.feed_forward))],
            &[include_str!("../shaders/swiglu.wgsl")],
        );
        let swiglu = Kernel::new(&gpu, &swiglu, &[gated, activated]);
        let Activations { tokens, positions, logit_rows, qkv, attended, logits, .. } = activations;
        Ok(Model {
            gpu,
            shape,
            room,
            embed,
            layers,
            rope,
            swiglu,
            final_norm,
            head,
            tokens,
            positions,
            logit_rows,
            qkv,
            attended,
            logits,
        })
    }

    /// A configuration of the cache for this model: the formats are still to choose.
    pub fn cache_config(&self) -> CacheConfig {
        cache_config(&self.shape, self.room)
    }

    /// An empty cache, bound to the activations: three views of the fused queries, keys and values.
    pub fn context(&self, config: &CacheConfig) -> Result<Context> {
        let options = KvCacheOptions::default();
        let (device, queue) = (&self.gpu.device, &self.gpu.queue);
        let cache = KvCache::with_options_blocking(device, queue, config, &options)?;
        let Shape { query_heads, kv_heads, head_dim, .. } = self.shape;
        let stride = self.shape.qkv();
        let part = |head: u32| {
            TensorView::new(&self.qkv, Dtype::F32)
                .with_offset(u64::from(head * head_dim) * 4)
                .with_strides(stride, head_dim)
        };
        let (q, k, v) = (part(0), part(query_heads), part(query_heads + kv_heads));
        let io = cache.bind(&LayerIo::new(k, v, q, TensorView::new(&self.attended, Dtype::F32)))?;
        Ok(Context { cache, io })
    }

    /// An empty cache with an empty sequence.
    pub fn context_with_sequence(&self, config: &CacheConfig) -> Result<(Context, SequenceId)> {
        let mut context = self.context(config)?;
        let sequence = context.cache.create_sequence()?;
        Ok((context, sequence))
    }

    /// Records a step of some sequences through the whole model. Its inputs are written to the queue: submit
    /// `encoder` before the next step is recorded.
    ///
    /// Sequences lie one after the other, in tokens and in logits.
    pub fn step(
        &self,
        context: &mut Context,
        encoder: &mut wgpu::CommandEncoder,
        inputs: &[Input<'_>],
        wanted: Wanted,
        profile: Option<&mut Profile>,
    ) -> Result<()> {
        let (mut positions, mut logit_rows, mut steps) = (Vec::new(), Vec::new(), Vec::new());
        for input in inputs {
            let first = context.cache.tokens(input.sequence)?;
            let count = input.tokens.map_or(1, |tokens| tokens.len() as u32);
            let row = positions.len() as u32;
            if count == 0 || first + count > self.room.context || row + count > self.room.tokens {
                bail!(
                    "a step of {count} tokens from {first} on; there is room for {} and a context of {}",
                    self.room.tokens,
                    self.room.context
                );
            }
            if let Some(tokens) = input.tokens {
                self.gpu.queue.write_buffer(&self.tokens, u64::from(row) * 4, bytemuck::cast_slice(tokens));
            }
            positions.extend(first..first + count);
            match wanted {
                Wanted::Nothing => {}
                Wanted::Last => logit_rows.push(row + count - 1),
                Wanted::All => logit_rows.extend(row..row + count),
            }
            steps.push(SequenceStep::extend(input.sequence, count));
        }
        let (count, wanted) = (positions.len() as u32, logit_rows.len() as u32);
        if wanted > self.room.logits {
            bail!("{wanted} rows of logits; there is room for {}", self.room.logits);
        }
        self.gpu.queue.write_buffer(&self.positions, 0, bytemuck::cast_slice(&positions));
        self.gpu.queue.write_buffer(&self.logit_rows, 0, bytemuck::cast_slice(&logit_rows));

        let mut step = context.cache.begin_step(encoder, &steps)?;
        let mut segments = Segments::new(encoder, profile);
        let shape = &self.shape;
        self.embed.dispatch(segments.pass(Part::Model), count);
        let turned = (shape.query_heads + shape.kv_heads) * shape.head_dim / 2;
        for (index, layer) in self.layers.iter().enumerate() {
            let pass = segments.pass(Part::Model);
            layer.attention_norm.dispatch(pass, count, 1);
            layer.qkv.dispatch(pass, count);
            self.rope.dispatch(pass, turned.div_ceil(64), count);
            step.layer(segments.pass(Part::Cache), index as u32, &context.io)?;
            let pass = segments.pass(Part::Model);
            layer.output.dispatch(pass, count);
            layer.feed_forward_norm.dispatch(pass, count, 1);
            layer.gate_up.dispatch(pass, count);
            self.swiglu.dispatch(pass, (shape.feed_forward / 4).div_ceil(64), count);
            layer.down.dispatch(pass, count);
        }
        if wanted > 0 {
            let pass = segments.pass(Part::Head);
            self.final_norm.dispatch(pass, wanted, 1);
            self.head.dispatch(pass, wanted);
        }
        drop(segments);
        step.finish()?;
        Ok(())
    }
}

/// A configuration of the cache for a model of this shape: the formats are still to choose.
pub fn cache_config(shape: &Shape, room: Room) -> CacheConfig {
    CacheConfig::new(shape.layers, shape.query_heads, shape.kv_heads, shape.head_dim)
        .with_capacity(room.context.min(FIRST_CAPACITY))
        .with_max_step(room.tokens)
        .with_max_batch_tokens(room.tokens)
}

/// RoPE over the heads of queries and keys of the fused tensor.
fn rope(
    gpu: &Gpu,
    shape: &Shape,
    context: u32,
    stride: u32,
    positions: &wgpu::Buffer,
    qkv: &wgpu::Buffer,
) -> Result<Kernel> {
    let turn = |position: u32| {
        shape.frequencies.iter().map(move |frequency| {
            let (sine, cosine) = (f64::from(position) * f64::from(*frequency)).sin_cos();
            [cosine as f32, sine as f32]
        })
    };
    gpu.check("rope table", u64::from(context) * u64::from(shape.head_dim) * 4)?;
    let table: Vec<[f32; 2]> = (0..context).flat_map(turn).collect();
    let (pair_stride, distance) = match shape.rope_pairs {
        RopePairs::Neighbours => (2, 1),
        RopePairs::Halves => (1, shape.head_dim / 2),
    };
    let constants = [
        ("HEADS", shape.query_heads + shape.kv_heads),
        ("HEAD_DIM", shape.head_dim),
        ("QKV_STRIDE", stride),
        ("PAIR_STRIDE", pair_stride),
        ("PAIR_DISTANCE", distance),
    ];
    let constants = constants.map(|(name, value)| (name, format!("{value}u")));
    let pipeline = gpu.pipeline("rope", &constants, &[include_str!("../shaders/rope.wgsl")]);
    Ok(Kernel::new(gpu, &pipeline, &[&gpu.filled("rope table", &table)?, positions, qkv]))
}
