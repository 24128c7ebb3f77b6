// Codes become floats on processors, where a conversion costs as much as any other operation.

// The field that begins at bit `bit` of each line's bits, of which those of no other field are left, where it
// lies: a code counts as 2^bit. No field reaches the sign.
fn field(bits: vec4<u32>, bit: u32) -> vec4<f32> {
    return vec4<f32>(vec4<i32>(bits));
}

// What makes a code of it: 2^-bit.
fn field_unit(bit: u32) -> f32 {
    return bitcast<f32>((127u - bit) << 23u);
}
