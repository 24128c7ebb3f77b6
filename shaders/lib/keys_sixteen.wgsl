// Logits of a packed page whose keys are kept in 16 bits. lib/keys_plain.wgsl comes before.
//
// Constants: GROUP, HEAD_DIM, KEY_SLICES, PACKED_FORMAT.
// Records: Split.

// Adds the products of the slice's channels.
fn add_logits(logits: ptr<function, Logits>, split: Split, head: u32, quad: u32, slice: u32, row: u32, query_unit: vec4<f32>) {
    let token = 4u * quad;
    if (token >= split.tokens) {
        return;
    }
    let at = (head_words(split, head, token) + token % GROUP) / 4u;
    for (var v = slice; v < HEAD_DIM / 4u; v += KEY_SLICES) {
        // Four tokens' words of channels 4v, 4v + 1 and 4v + 2, 4v + 3.
        let k = pair_channels(
            PACKED_FORMAT, slab4[at + 2u * v * (GROUP / 4u)], slab4[at + (2u * v + 1u) * (GROUP / 4u)]);
        add_vector(logits, k, row, v);
    }
}
