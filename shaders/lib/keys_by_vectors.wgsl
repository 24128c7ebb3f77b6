// Logits of a packed page whose keys are quantized per token: dequantized four channels at a time. Slower
// than folding the parameters out, and short: such keys exist for comparison. lib/vectors_packed.wgsl and
// lib/keys_plain.wgsl come before.
//
// Constants: HEAD_DIM, KEY_SLICES.
// Records: Split.

// Adds the products of the slice's channels.
fn add_logits(logits: ptr<function, Logits>, split: Split, head: u32, quad: u32, slice: u32, row: u32, query_unit: vec4<f32>) {
    let token = 4u * quad;
    if (token >= split.tokens) {
        return;
    }
    for (var v = slice; v < HEAD_DIM / 4u; v += KEY_SLICES) {
        let a = key_vector(split, head, token, v);
        let b = key_vector(split, head, token + 1u, v);
        let c = key_vector(split, head, token + 2u, v);
        let d = key_vector(split, head, token + 3u, v);
        let k = Parts(
            vec4<f32>(a.x, b.x, c.x, d.x), vec4<f32>(a.y, b.y, c.y, d.y), vec4<f32>(a.z, b.z, c.z, d.z), vec4<f32>(a.w, b.w, c.w, d.w));
        add_vector(logits, k, row, v);
    }
}
