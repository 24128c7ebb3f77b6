// Weighted sums of a packed page whose values are quantized per channel: dequantized four channels at a time.
// Slower than folding the parameters out, and short: such values exist for comparison.
// lib/vectors_packed.wgsl comes before.
//
// Constants: VALUE_ROWS.
// Records: Split.

// Adds one token with weights `p` of the two rows. A chunk that reaches past the row reads what is behind it;
// those sums are not written.
fn add_token(sums: ptr<function, Sums>, split: Split, head: u32, token: u32, chunk: u32, p: vec2<f32>) {
    let v = 4u * chunk;
    (*sums).weights += p;
    add_weighted(sums, Parts(
        value_vector(split, head, token, v),
        value_vector(split, head, token, v + 1u),
        value_vector(split, head, token, v + 2u),
        value_vector(split, head, token, v + 3u)), p);
}

fn tile_values(split: Split, head: u32, chunk: u32, row: u32, begin: u32, end: u32) -> Sums {
    var sums = Sums();
    for (var quad = begin; quad < end; quad++) {
        let a = sh[row * QUADS + quad];
        var b = vec4<f32>();
        if (VALUE_ROWS > 1u) {
            b = sh[(row + 1u) * QUADS + quad];
        }
        add_token(&sums, split, head, 4u * quad, chunk, vec2<f32>(a.x, b.x));
        add_token(&sums, split, head, 4u * quad + 1u, chunk, vec2<f32>(a.y, b.y));
        add_token(&sums, split, head, 4u * quad + 2u, chunk, vec2<f32>(a.z, b.z));
        add_token(&sums, split, head, 4u * quad + 3u, chunk, vec2<f32>(a.w, b.w));
    }
    return sums;
}
