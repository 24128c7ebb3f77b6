// Where codes lie in words.

// The bit of its word where code `j` of a plane begins: `bit_of` of src/format/bits.rs.
fn code_bit(width: u32, j: u32) -> u32 {
    if (width == 1u) {
        return 8u * (j % 4u) + 2u * (j / 4u % 4u) + j / 16u % 2u;
    }
    let in_word = j % (32u / width);
    return 8u * (in_word % 4u) + width * (in_word / 4u);
}
