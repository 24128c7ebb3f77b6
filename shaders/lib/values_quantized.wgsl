// Weighted sums of a packed page whose values are codes. Scale and minimum are folded out of the inner loop:
//   sum_t p_t v_t = sum_t (p_t s_t) c_t + sum_t p_t m_t
//
// Constants: CHANNEL_GROUP, GROUP, VALUE_CODES, VALUE_COMPACT, VALUE_GROUPS, VALUE_PARAMS, VALUE_ROWS,
// VALUE_ROW_WORDS.
// Records: Split.

// Adds one token with weights `p` of the two rows.
fn add_token(sums: ptr<function, Sums>, zero: ptr<function, vec2<f32>>, first: u32, token: u32, chunk: u32, p: vec2<f32>) {
    let group = min(16u * chunk / CHANNEL_GROUP, VALUE_GROUPS - 1u);
    let param = param_at(first + VALUE_PARAMS, token * VALUE_GROUPS + group, VALUE_COMPACT);
    let words = chunk_words(first + VALUE_CODES + token * VALUE_ROW_WORDS, chunk);
    *zero = fma(p, vec2<f32>(param.y), *zero);
    (*sums).weights += p;
    add_weighted(sums, value_parts(words), p * param.x);
}

fn tile_values(split: Split, head: u32, chunk: u32, row: u32, begin: u32, end: u32) -> Sums {
    var sums = Sums();
    var zero = vec2<f32>();
    for (var quad = begin; quad < end; quad++) {
        let first = head_words(split, head, 4u * quad);
        let token = (4u * quad) % GROUP;
        let a = sh[row * QUADS + quad];
        var b = vec4<f32>();
        if (VALUE_ROWS > 1u) {
            b = sh[(row + 1u) * QUADS + quad];
        }
        add_token(&sums, &zero, first, token, chunk, vec2<f32>(a.x, b.x));
        add_token(&sums, &zero, first, token + 1u, chunk, vec2<f32>(a.y, b.y));
        add_token(&sums, &zero, first, token + 2u, chunk, vec2<f32>(a.z, b.z));
        add_token(&sums, &zero, first, token + 3u, chunk, vec2<f32>(a.w, b.w));
    }
    return Sums(natural(sums.a, zero.x), natural(sums.b, zero.y), sums.weights);
}
