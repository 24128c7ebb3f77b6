//! Elements of a packed block.

use super::{CodePart, Dtype, Param, TensorLayout, dequantize, widen};

impl TensorLayout {
    /// The code of an element in a head's part of a block and its parameter, or its 16 bits.
    pub(crate) fn read(&self, words: &[u32], token: u32, channel: u32) -> (u32, Option<Param>) {
        let part = |part: CodePart| {
            let word = words[part.word as usize];
            ((word >> part.shift) & ((1 << part.width) - 1)) << part.code_shift
        };
        let code = self.parts(token, channel).map(part).sum();
        let param = self.format.bits.is_quantized().then(|| {
            let (word, shift) = self.param(self.group_of(token, channel));
            self.format.param(words[word as usize] >> shift)
        });
        (code, param)
    }

    /// The value of an element in a head's part of a block, rounded to f32 once, as it was packed: it may be
    /// rotated. Elements that are not quantized have the type `sixteen_bit`, see
    /// [`Shape::sixteen_bit_format`](crate::Shape::sixteen_bit_format). `words` are as many as
    /// [`BlockLayout::head_words`](super::BlockLayout::head_words), `token` is below the group, `channel`
    /// below head_dim.
    pub fn element(&self, words: &[u32], token: u32, channel: u32, sixteen_bit: Dtype) -> f32 {
        match self.read(words, token, channel) {
            (code, Some(param)) => dequantize(param, code),
            (bits, None) => widen(bits, sixteen_bit),
        }
    }
}
