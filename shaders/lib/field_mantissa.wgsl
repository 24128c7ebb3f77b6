// Codes become floats on GPUs.

// The field that begins at bit `bit` of each line's bits, of which those of no other field are left. They
// become the low end of a mantissa above 2^(23 - bit): a difference costs less than a shift and a conversion,
// which runs at a fraction of the rate of sums on NVIDIA's GPUs.
fn field(bits: vec4<u32>, bit: u32) -> vec4<f32> {
    let power = (150u - bit) << 23u;
    return bitcast<vec4<f32>>(bits | vec4<u32>(power)) - vec4<f32>(bitcast<f32>(power));
}

fn field_unit(bit: u32) -> f32 {
    return 1.0;
}
