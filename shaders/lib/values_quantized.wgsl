// Weighted sums of a packed page whose values are codes. Scale and minimum are folded out of the inner loop:
//   sum_t p_t v_t = sum_t (p_t s_t) c_t + sum_t p_t m_t

// 16 codes of one token, one vector per part as above.
fn chunk_codes(at: u32) -> Parts {
    let w0 = slab[at];
    if (VALUE_BITS == 2u) {
        return Parts(value_codes(w0), value_codes(w0 >> 2u), value_codes(w0 >> 4u), value_codes(w0 >> 6u));
    }
    let w1 = slab[at + 1u];
    if (VALUE_BITS == 4u) {
        return Parts(value_codes(w0), value_codes(w0 >> 4u), value_codes(w1), value_codes(w1 >> 4u));
    }
    return Parts(value_codes(w0), value_codes(w1), value_codes(slab[at + 2u]), value_codes(slab[at + 3u]));
}

// Adds one token with weights `p` of the two rows.
fn add_token(sums: ptr<function, Sums>, zero: ptr<function, vec2<f32>>, first: u32, token: u32, chunk: u32, p: vec2<f32>) {
    let group = min(16u * chunk / VALUE_GROUP, VALUE_GROUPS - 1u);
    let param = unpack2x16float(slab[first + VALUE_PARAMS + token * VALUE_GROUPS + group]);
    let codes = chunk_codes(first + VALUE_CODES + token * VALUE_ROW_WORDS + chunk * (VALUE_BITS / 2u));
    let scaled = p * param.x;
    *zero = fma(p, vec2<f32>(param.y), *zero);
    (*sums).weights += p;
    (*sums).a0 = fma(vec4<f32>(scaled.x), codes.p0, (*sums).a0);
    (*sums).a1 = fma(vec4<f32>(scaled.x), codes.p1, (*sums).a1);
    (*sums).a2 = fma(vec4<f32>(scaled.x), codes.p2, (*sums).a2);
    (*sums).a3 = fma(vec4<f32>(scaled.x), codes.p3, (*sums).a3);
    if (VALUE_ROWS > 1u) {
        (*sums).b0 = fma(vec4<f32>(scaled.y), codes.p0, (*sums).b0);
        (*sums).b1 = fma(vec4<f32>(scaled.y), codes.p1, (*sums).b1);
        (*sums).b2 = fma(vec4<f32>(scaled.y), codes.p2, (*sums).b2);
        (*sums).b3 = fma(vec4<f32>(scaled.y), codes.p3, (*sums).b3);
    }
}

fn tile_values(split: Split, head: u32, chunk: u32, row: u32, begin: u32, end: u32) -> Sums {
    var sums: Sums;
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
    let a = natural(Parts(sums.a0, sums.a1, sums.a2, sums.a3), zero.x);
    let b = natural(Parts(sums.b0, sums.b1, sums.b2, sums.b3), zero.y);
    return Sums(a.p0, a.p1, a.p2, a.p3, b.p0, b.p1, b.p2, b.p3, sums.weights);
}
