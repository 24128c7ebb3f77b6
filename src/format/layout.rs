//! Where everything lies in a packed block.

use super::{Axis, Bits, CodePart, PAGE_TOKENS, Tensor, TensorFormat};

/// Sizes and offsets, in words, of a block: `group` tokens, keys and values of all KV heads of a layer.
///
/// A block is, for each KV head in order: its keys, then its values, each of them codes, then parameters
/// ([`TensorLayout`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlockLayout {
    /// Elements of one head's row.
    pub head_dim: u32,
    /// KV heads of a layer.
    pub kv_heads: u32,
    /// Tokens in a block, and in a group of what is quantized per channel.
    pub group: u32,
    /// Channels in a group of what is quantized per token.
    pub channel_group: u32,
    /// How keys are packed.
    pub keys: TensorFormat,
    /// How values are packed.
    pub values: TensorFormat,
}

/// Where one head's keys or values lie in its part of a block: codes, then parameters.
///
/// A *line* of codes is what attention sums over: for keys the channels of a token, for values the tokens of
/// a channel. Lines lie side by side, `[word of the line][line]`, so that four neighbouring words are of four
/// tokens' keys, or of four channels of the values. Parameters are `[channel]` if quantized per channel, else
/// `[token][channel group]`. Compact parameters are two to a word, the first in the low half. Tensors in 16
/// bits have elements in the place of codes and no parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorLayout {
    /// Keys or values.
    pub tensor: Tensor,
    /// How it is packed.
    pub format: TensorFormat,
    /// What a group is.
    pub axis: Axis,
    /// Elements of a row.
    pub head_dim: u32,
    /// Tokens.
    pub group: u32,
    /// Channels in a group, if it is quantized per token.
    pub channel_group: u32,
    /// The first word, within the head's part of the block.
    pub first: u32,
}

impl TensorLayout {
    /// Lines of codes: tokens if they are keys, channels if they are values.
    pub fn lines(&self) -> u32 {
        match self.tensor {
            Tensor::Keys => self.group,
            Tensor::Values => self.head_dim,
        }
    }

    /// Codes of a line: channels if they are keys, tokens if they are values.
    pub fn line_codes(&self) -> u32 {
        match self.tensor {
            Tensor::Keys => self.head_dim,
            Tensor::Values => self.group,
        }
    }

    /// The line of an element, and which of its codes it is.
    pub fn place(&self, token: u32, channel: u32) -> (u32, u32) {
        match self.tensor {
            Tensor::Keys => (token, channel),
            Tensor::Values => (channel, token),
        }
    }

    /// Words of a line.
    pub fn line_words(&self) -> u32 {
        self.format.bits.line_words(self.line_codes())
    }

    /// Words of all codes.
    pub fn code_words(&self) -> u32 {
        self.line_words() * self.lines()
    }

    /// Groups of channels of one token, each with a parameter; the last may be short. One if it is quantized
    /// per channel.
    pub fn channel_groups(&self) -> u32 {
        match self.axis {
            Axis::PerChannel => 1,
            Axis::PerToken => self.head_dim.div_ceil(self.channel_group),
        }
    }

    /// Tokens whose codes begin and end with words: a multiple of these is packed on its own.
    pub(crate) fn whole_tokens(&self) -> u32 {
        let codes = self.format.bits.planes().iter().map(|width| 32 / width).max().unwrap_or(1);
        match self.tensor {
            Tensor::Keys => 1,
            Tensor::Values => codes.min(self.group),
        }
    }

    /// Whether rows are rotated in a pass of their own before they are packed: what is packed together needs
    /// more rotated rows at a time than workgroup memory holds.
    pub(crate) fn rotates_apart(&self) -> bool {
        let fits =
            self.axis == Axis::PerToken && self.whole_tokens() * self.head_dim <= Self::ROTATED_AT_ONCE;
        self.format.rotated && !fits
    }

    /// Elements that workgroup memory holds while they are rotated.
    pub(crate) const ROTATED_AT_ONCE: u32 = 2048;

    /// Number of parameters.
    pub fn params(&self) -> u32 {
        match self.axis {
            _ if !self.format.bits.is_quantized() => 0,
            Axis::PerChannel => self.head_dim,
            Axis::PerToken => self.group * self.channel_groups(),
        }
    }

    /// Words of all parameters.
    pub fn param_words(&self) -> u32 {
        if self.format.compact { self.params().div_ceil(2) } else { self.params() }
    }

    /// Words of codes and parameters.
    pub fn words(&self) -> u32 {
        self.code_words() + self.param_words()
    }

    /// Where word `word` of a line is.
    pub fn code(&self, line: u32, word: u32) -> u32 {
        self.first + word * self.lines() + line
    }

    /// Where the parts of an element's code are.
    pub fn parts(&self, token: u32, channel: u32) -> impl Iterator<Item = CodePart> {
        let (line, code) = self.place(token, channel);
        let (first, lines) = (self.first, self.lines());
        let parts = self.format.bits.parts(self.line_codes(), code);
        parts.map(move |part| CodePart { word: first + part.word * lines + line, ..part })
    }

    /// The word where parameters begin.
    pub fn first_param(&self) -> u32 {
        self.first + self.code_words()
    }

    /// Word of parameter `param`, and by how much its bits are shifted there.
    pub fn param(&self, param: u32) -> (u32, u32) {
        match self.format.compact {
            true => (self.first_param() + param / 2, 16 * (param % 2)),
            false => (self.first_param() + param, 0),
        }
    }

    /// The elements, (token, channel), of the group of parameter `param`.
    pub fn elements(&self, param: u32) -> impl Iterator<Item = (u32, u32)> + use<> {
        let (tokens, channels) = match self.axis {
            Axis::PerChannel => (0..self.group, param..param + 1),
            Axis::PerToken => {
                let (token, first) = (param / self.channel_groups(), param % self.channel_groups());
                let first = first * self.channel_group;
                (token..token + 1, first..self.head_dim.min(first + self.channel_group))
            }
        };
        tokens.flat_map(move |token| channels.clone().map(move |channel| (token, channel)))
    }

    /// The parameter of an element.
    pub fn group_of(&self, token: u32, channel: u32) -> u32 {
        match self.axis {
            Axis::PerChannel => channel,
            Axis::PerToken => token * self.channel_groups() + channel / self.channel_group,
        }
    }
}

impl BlockLayout {
    /// One head's keys or values.
    pub fn tensor(&self, tensor: Tensor) -> TensorLayout {
        let &BlockLayout { head_dim, group, channel_group, .. } = self;
        let layout = |tensor, format: TensorFormat, first| {
            let axis = format.axis_of(tensor);
            TensorLayout { tensor, format, axis, head_dim, group, channel_group, first }
        };
        let keys = layout(Tensor::Keys, self.keys, 0);
        match tensor {
            Tensor::Keys => keys,
            Tensor::Values => layout(tensor, self.values, keys.words()),
        }
    }

    /// Words of one KV head that hold codes.
    pub fn code_words(&self) -> u32 {
        self.tensor(Tensor::Keys).code_words() + self.tensor(Tensor::Values).code_words()
    }

    /// Words of one KV head.
    pub fn head_words(&self) -> u32 {
        self.tensor(Tensor::Keys).words() + self.tensor(Tensor::Values).words()
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
        let width = |bits: Bits| f64::from(bits.get());
        (width(self.keys.bits) + width(self.values.bits)) / 2.0
    }
}
