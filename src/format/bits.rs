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

/// Where a part of one code lies in its row: bits `[code_shift, +width)` of the code are bits `[shift,
/// +width)` of `word`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CodePart {
    /// Row word.
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

    /// Widths of the planes of a row, lowest code bits first. A width that is not a power of two is split
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

    /// Words of that plane of one row.
    pub fn low_words(self, head_dim: u32) -> u32 {
        (head_dim * self.low_bits()).div_ceil(32)
    }

    /// Words of one row of `head_dim` codes.
    pub fn row_words(self, head_dim: u32) -> u32 {
        self.planes().iter().map(|p| (head_dim * p).div_ceil(32)).sum()
    }

    /// Where code `j` of a row of `head_dim` codes lies.
    pub fn parts(self, head_dim: u32, j: u32) -> impl Iterator<Item = CodePart> {
        let mut first_word = 0;
        let mut code_shift = 0;
        self.planes().iter().map(move |&width| {
            let bit = width * j;
            let part = CodePart { word: first_word + bit / 32, shift: bit % 32, width, code_shift };
            first_word += (head_dim * width).div_ceil(32);
            code_shift += width;
            part
        })
    }
}
