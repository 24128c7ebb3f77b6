// Logits of a packed page whose keys are kept in 16 bits.

const BIAS_LANES: u32 = 0u;

fn query_channel(v: u32, i: u32) -> u32 {
    return 4u * v + i;
}

fn bias_part(split: Split, head: u32, quad: u32, row: u32) -> vec4<f32> {
    return vec4<f32>();
}

fn prepare_queries(split: Split, head: u32, quad: u32, row: u32, local: u32) -> vec4<f32> {
    return vec4<f32>();
}

fn tile_logits(split: Split, head: u32, quad: u32, row: u32, query_unit: vec4<f32>) -> Logits {
    var logits: Logits;
    let token = 4u * quad;
    if (token >= split.tokens) {
        return logits;
    }
    let at = (head_words(split, head, token) + token % GROUP) / 4u;
    for (var v = 0u; v < HEAD_DIM / 4u; v++) {
        // Four tokens' words of channels 4v, 4v + 1 and 4v + 2, 4v + 3.
        let low = four_pairs(slab4[at + 2u * v * (GROUP / 4u)]);
        let high = four_pairs(slab4[at + (2u * v + 1u) * (GROUP / 4u)]);
        logits.r0 = add_products(logits.r0, sh[row * QUERY_VECS + v], low.first, low.second, high.first, high.second);
        if (KEY_ROWS > 1u) {
            logits.r1 =
                add_products(logits.r1, sh[(row + 1u) * QUERY_VECS + v], low.first, low.second, high.first, high.second);
        }
        if (KEY_ROWS > 2u) {
            logits.r2 =
                add_products(logits.r2, sh[(row + 2u) * QUERY_VECS + v], low.first, low.second, high.first, high.second);
            logits.r3 =
                add_products(logits.r3, sh[(row + 3u) * QUERY_VECS + v], low.first, low.second, high.first, high.second);
        }
    }
    return logits;
}
