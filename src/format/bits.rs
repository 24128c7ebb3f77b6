//! Widths of packed elements and the planes that they are stored in.

/// Width of a packed element: of its code, or 16 bits without quantization.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Bits {
    /// 4 levels.
    Two,
    /// 8 levels, in planes of the two low bits and the high bit.
    Three,
    /// 16 levels.
    Four,
    /// 256 levels.
    Eight,
    /// Not quantized: elements as they are in the residual window (f16 if the window is f32), without
    /// parameters. The honest baseline, and the choice where quantization costs too much.
    Sixteen,
}

/// Where a part of one code lies in its line: bits `[code_shift, +width)` of the code are bits `[shift,
/// +width)` of `word`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CodePart {
    /// Word of the line.
    pub word: u32,
    /// Bit of the word.
    pub shift: u32,
    /// Number of bits.
    pub width: u32,
    /// Bit of the code.
    pub code_shift: u32,
}

impl Bits {
    /// All widths.
    pub const ALL: &'static [Bits] = &[Bits::Two, Bits::Three, Bits::Four, Bits::Eight, Bits::Sixteen];
    /// The widths of codes.
    pub const QUANTIZED: &'static [Bits] = &[Bits::Two, Bits::Three, Bits::Four, Bits::Eight];

    /// The width in bits.
    pub const fn get(self) -> u32 {
        match self {
            Bits::Two => 2,
            Bits::Three => 3,
            Bits::Four => 4,
            Bits::Eight => 8,
            Bits::Sixteen => 16,
        }
    }

    /// The width with this many bits, if the format has it.
    pub fn from_u32(bits: u32) -> Option<Bits> {
        Bits::ALL.iter().copied().find(|b| b.get() == bits)
    }

    /// Whether elements are codes with a scale and a minimum per group.
    pub const fn is_quantized(self) -> bool {
        !matches!(self, Bits::Sixteen)
    }

    /// The largest code, `2^b - 1`.
    pub const fn max_code(self) -> u32 {
        (1 << self.get()) - 1
    }

    /// Widths of the planes of a line, lowest code bits first. A width that is not a power of two is split
    /// here.
    pub const fn planes(self) -> &'static [u32] {
        match self {
            Bits::Two => &[2],
            Bits::Three => &[2, 1],
            Bits::Four => &[4],
            Bits::Eight => &[8],
            Bits::Sixteen => &[16],
        }
    }

    /// Width of the plane of the lowest code bits.
    pub const fn low_bits(self) -> u32 {
        self.planes()[0]
    }

    /// Words of that plane of a line of `codes` codes.
    pub fn low_words(self, codes: u32) -> u32 {
        (codes * self.low_bits()).div_ceil(32)
    }

    /// Words of a line of `codes` codes.
    pub fn line_words(self, codes: u32) -> u32 {
        self.planes().iter().map(|p| (codes * p).div_ceil(32)).sum()
    }

    /// Where code `j` of a line of `codes` codes lies.
    pub fn parts(self, codes: u32, j: u32) -> impl Iterator<Item = CodePart> {
        let mut first_word = 0;
        let mut code_shift = 0;
        self.planes().iter().map(move |&width| {
            let part =
                CodePart { word: first_word + width * j / 32, shift: bit_of(width, j), width, code_shift };
            first_word += (codes * width).div_ceil(32);
            code_shift += width;
            part
        })
    }
}

/// The bit of its word where code `j` of a plane begins.
///
/// Four neighbouring codes lie in the four bytes of a word at the same bit of each, so that one shift and one
/// mask give them as bytes (for integer dot products), as two pairs of halves, or one by one. The single bits
/// of two neighbouring words of 16 codes share a word, each pair at the bits where 2-bit codes lie: so they
/// meet those with one shift for all 16.
fn bit_of(width: u32, j: u32) -> u32 {
    match width {
        16 => 16 * (j % 2),
        1 => 8 * (j % 4) + 2 * (j / 4 % 4) + j / 16 % 2,
        _ => {
            let in_word = j % (32 / width);
            8 * (in_word % 4) + width * (in_word / 4)
        }
    }
}
