//! Where everything lies in a packed block.

use super::{Bits, PAGE_TOKENS};

/// Sizes and offsets, in words, of a block: `group` tokens, keys and values of all KV heads of a layer.
///
/// A block is, for each KV head in order: key codes `[row word][token]`, key parameters `[channel]`,
/// value codes `[token][row word]`, value parameters `[token][channel group]`. Tensors in 16 bits have elements in the place of codes and no
/// parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlockLayout {
    /// Elements of one head's row.
    pub head_dim: u32,
    /// KV heads of a layer.
    pub kv_heads: u32,
    /// Tokens in a block, and in a group of keys.
    pub group: u32,
    /// Channels in a group of values.
    pub value_group: u32,
    /// Width of a key code.
    pub key_bits: Bits,
    /// Width of a value code.
    pub value_bits: Bits,
}

impl BlockLayout {
    /// Words of one token's key codes.
    pub fn key_row_words(&self) -> u32 {
        self.key_bits.row_words(self.head_dim)
    }

    /// Words of one token's value codes.
    pub fn value_row_words(&self) -> u32 {
        self.value_bits.row_words(self.head_dim)
    }

    /// Parameters of one head's keys.
    pub fn key_params(&self) -> u32 {
        if self.key_bits.is_quantized() { self.head_dim } else { 0 }
    }

    /// Channel groups of one token's values, each with a parameter; the last may be short. None if values are not quantized.
    pub fn value_groups(&self) -> u32 {
        if self.value_bits.is_quantized() { self.head_dim.div_ceil(self.value_group) } else { 0 }
    }

    /// Word of row word `word` of `token`'s keys, within its head.
    pub fn key_code(&self, word: u32, token: u32) -> u32 {
        word * self.group + token
    }

    /// Word of the key parameter of `channel`, within its head.
    pub fn key_param(&self, channel: u32) -> u32 {
        self.key_row_words() * self.group + channel
    }

    /// Word of row word `word` of `token`'s values, within its head.
    pub fn value_code(&self, token: u32, word: u32) -> u32 {
        self.key_param(self.key_params()) + token * self.value_row_words() + word
    }

    /// Word of the value parameter of `token` and `channel_group`, within its head.
    pub fn value_param(&self, token: u32, channel_group: u32) -> u32 {
        self.value_code(self.group, 0) + token * self.value_groups() + channel_group
    }

    /// Words of one KV head that hold codes.
    pub fn code_words(&self) -> u32 {
        (self.key_row_words() + self.value_row_words()) * self.group
    }

    /// Words of one KV head.
    pub fn head_words(&self) -> u32 {
        self.value_param(self.group, 0)
    }

    /// Words of a block.
    pub fn block_words(&self) -> u32 {
        self.kv_heads * self.head_words()
    }

    /// Blocks in a page.
    pub fn blocks_per_page(&self) -> u32 {
        PAGE_TOKENS / self.group
    }

    /// Words of a page.
    pub fn page_words(&self) -> u64 {
        u64::from(self.block_words()) * u64::from(self.blocks_per_page())
    }

    /// Bits per cached element in packed form: codes, parameters and padding.
    pub fn format_bits(&self) -> f64 {
        let elements = 2 * self.kv_heads * self.group * self.head_dim;
        32.0 * f64::from(self.block_words()) / f64::from(elements)
    }

    /// Bits per cached element of the codes alone: the figure that leaves parameters and padding out.
    pub fn code_bits(&self) -> f64 {
        f64::from(self.key_bits.get() + self.value_bits.get()) / 2.0
    }
}
