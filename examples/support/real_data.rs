//! Queries, keys and values of a real model, with reference outputs (`tests/data/*.safetensors`).

use half::f16;
use safetensors::{Dtype, SafeTensors};
use std::collections::HashMap;
use std::path::Path;

/// The tensors of one layer of a model over one text.
pub struct RealData {
    /// Model and layer, for people.
    #[allow(dead_code)]
    pub name: String,
    pub query_heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Positions of `k` and `v`.
    pub tokens: usize,
    /// The newest positions, those of `q`.
    pub queries: usize,
    /// `[token][kv head][head_dim]`
    pub k: Vec<f32>,
    /// `[token][kv head][head_dim]`
    pub v: Vec<f32>,
    /// `[query][query head][head_dim]`
    pub q: Vec<f32>,
    outputs: HashMap<String, Vec<f32>>,
    metadata: HashMap<String, String>,
}

impl RealData {
    pub fn load(path: &Path) -> Result<RealData, Box<dyn std::error::Error>> {
        let bytes = std::fs::read(path).map_err(|e| format!("{}: {e}", path.display()))?;
        let (_, header) = SafeTensors::read_metadata(&bytes)?;
        let metadata = header.metadata().clone().unwrap_or_default();
        let file = SafeTensors::deserialize(&bytes)?;
        let (k, kv_shape) = token_major(&file, "k")?;
        let (v, _) = token_major(&file, "v")?;
        let (q, q_shape) = token_major(&file, "q")?;
        let mut outputs = HashMap::new();
        for name in file.names() {
            if name.starts_with("out.") || name.starts_with("exact.") {
                outputs.insert(name.to_string(), token_major(&file, name)?.0);
            }
        }
        let text = |key: &str| metadata.get(key).cloned().unwrap_or_default();
        Ok(RealData {
            name: format!("{} layer {}", text("model"), text("layer")),
            query_heads: q_shape[0],
            kv_heads: kv_shape[0],
            head_dim: kv_shape[2],
            tokens: kv_shape[1],
            queries: q_shape[1],
            k,
            v,
            q,
            outputs,
            metadata,
        })
    }

    /// Reference output `name`, `[query][query head][head_dim]`.
    #[allow(dead_code)]
    pub fn output(&self, name: &str) -> Option<&[f32]> {
        self.outputs.get(name).map(Vec::as_slice)
    }

    /// A JSON object of the file's metadata, flat and simple enough to be searched as text.
    #[allow(dead_code)]
    pub fn metadata(&self, key: &str) -> &str {
        self.metadata.get(key).map_or("", String::as_str)
    }

    /// Elements of one token's keys of all heads.
    #[allow(dead_code)]
    pub fn token_len(&self) -> usize {
        self.kv_heads * self.head_dim
    }
}

/// Reads `[heads, tokens, head_dim]` into f32 `[tokens, heads, head_dim]`, and its shape as stored.
fn token_major(
    file: &SafeTensors<'_>,
    name: &str,
) -> Result<(Vec<f32>, [usize; 3]), Box<dyn std::error::Error>> {
    let tensor = file.tensor(name)?;
    let &[heads, tokens, dim] = tensor.shape() else {
        return Err(format!("{name} has {} dimensions, not 3", tensor.shape().len()).into());
    };
    let data: Vec<f32> = match tensor.dtype() {
        Dtype::F32 => {
            tensor.data().chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
        }
        Dtype::F16 => {
            tensor.data().chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32()).collect()
        }
        other => return Err(format!("{name} is {other:?}, not f16 or f32").into()),
    };
    let mut out = Vec::with_capacity(data.len());
    for token in 0..tokens {
        for head in 0..heads {
            out.extend_from_slice(&data[(head * tokens + token) * dim..][..dim]);
        }
    }
    Ok((out, [heads, tokens, dim]))
}

/// ‖a − b‖ / ‖b‖ over whole tensors.
#[allow(dead_code)]
pub fn relative_error(a: &[f32], b: &[f32]) -> f64 {
    let square = |x: f64| x * x;
    let difference: f64 = a.iter().zip(b).map(|(a, b)| square(f64::from(*a) - f64::from(*b))).sum();
    let norm: f64 = b.iter().map(|b| square(f64::from(*b))).sum();
    (difference / norm).sqrt()
}
