//! Keys, values and queries of any length that can be made again at any position.

/// Noise with the outliers of real models: a few key channels of large magnitude and a steady sign, a few
/// large value tokens.
pub struct Synthetic {
    pub tokens: usize,
    pub query_heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
}

impl Synthetic {
    /// 32 query heads, 8 KV heads, head_dim 128, as in 8B-class models.
    pub fn new(tokens: usize) -> Synthetic {
        Synthetic { tokens, query_heads: 32, kv_heads: 8, head_dim: 128 }
    }

    /// Roughly normal noise that depends only on its arguments.
    fn noise(stream: u64, index: u64) -> f32 {
        let mut z = index.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ stream.wrapping_mul(0xd1b5_4a32_d192_ed03);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        // The sum of four uniform numbers.
        let sum: u64 = (0..4).map(|i| (z >> (16 * i)) & 0xffff).sum();
        (sum as f32 / 65536.0 - 2.0) * 1.73
    }

    pub fn keys_values(&self, first: usize, n: usize) -> (Vec<f32>, Vec<f32>) {
        let row = self.kv_heads * self.head_dim;
        let range = first * row..(first + n) * row;
        let k = range
            .clone()
            .map(|i| {
                let x = Self::noise(1, i as u64);
                if i % 41 == 7 { 12.0 + 2.0 * x } else { x }
            })
            .collect();
        let v = range
            .map(|i| Self::noise(2, i as u64) * if (i / row).is_multiple_of(509) { 20.0 } else { 1.0 })
            .collect();
        (k, v)
    }

    /// A query that looks for one earlier token per head, as a retrieval head does: its logit stands out
    /// among the noise of the others.
    pub fn query(&self, position: usize) -> Vec<f32> {
        let mut query = Vec::with_capacity(self.query_heads * self.head_dim);
        for head in 0..self.query_heads {
            let wanted = (position + 1) * (2 * head + 1) / (2 * self.query_heads + 1);
            let kv_head = head * self.kv_heads / self.query_heads;
            let first = (wanted * self.kv_heads + kv_head) * self.head_dim;
            query.extend((first..first + self.head_dim).map(|i| 2.0 * Self::noise(1, i as u64)));
        }
        query
    }
}
