// Logits of a packed page whose keys are kept in 16 bits. lib/keys_plain.wgsl comes before.

fn tile_logits(split: Split, head: u32, quad: u32, row: u32, query_unit: vec4<f32>) -> Logits {
    var logits: Logits;
    let token = 4u * quad;
    if (token >= split.tokens) {
        return logits;
    }
    let at = (head_words(split, head, token) + token % GROUP) / 4u;
    for (var v = 0u; v < HEAD_DIM / 4u; v++) {
        // Four tokens' words of channels 4v, 4v + 1 and 4v + 2, 4v + 3.
        let k = pair_channels(slab4[at + 2u * v * (GROUP / 4u)], slab4[at + (2u * v + 1u) * (GROUP / 4u)]);
        add_rows(&logits, k, query(row, v), query(row + 1u, v), query(row + 2u, v), query(row + 3u, v));
    }
    return logits;
}
