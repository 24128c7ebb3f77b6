// Logits of a packed page whose keys are codes, in f32. lib/keys_quantized.wgsl comes before.

fn prepare_queries(split: Split, head: u32, quad: u32, row: u32, local: u32) -> vec4<f32> {
    return vec4<f32>();
}

fn logit_part(logits: ptr<function, Logits>, words: vec4<u32>, scale: vec4<f32>, row: u32, v: u32) {
    let c0 = key_codes(words.x);
    let c1 = key_codes(words.y);
    let c2 = key_codes(words.z);
    let c3 = key_codes(words.w);
    let t0 = vec4<f32>(c0.x, c1.x, c2.x, c3.x);
    let t1 = vec4<f32>(c0.y, c1.y, c2.y, c3.y);
    let t2 = vec4<f32>(c0.z, c1.z, c2.z, c3.z);
    let t3 = vec4<f32>(c0.w, c1.w, c2.w, c3.w);
    (*logits).r0 = add_products((*logits).r0, sh[row * QUERY_VECS + v] * scale, t0, t1, t2, t3);
    if (KEY_ROWS > 1u) {
        (*logits).r1 = add_products((*logits).r1, sh[(row + 1u) * QUERY_VECS + v] * scale, t0, t1, t2, t3);
    }
    if (KEY_ROWS > 2u) {
        (*logits).r2 = add_products((*logits).r2, sh[(row + 2u) * QUERY_VECS + v] * scale, t0, t1, t2, t3);
        (*logits).r3 = add_products((*logits).r3, sh[(row + 3u) * QUERY_VECS + v] * scale, t0, t1, t2, t3);
    }
}

fn tile_logits(split: Split, head: u32, quad: u32, row: u32, query_unit: vec4<f32>) -> Logits {
    var logits: Logits;
    let token = 4u * quad;
    if (token >= split.tokens) {
        return logits;
    }
    let first = head_words(split, head, token);
    let at = (first + token % GROUP) / 4u;
    for (var word = 0u; word < KEY_ROW_WORDS; word++) {
        let words = slab4[at + word * (GROUP / 4u)];
        let scale = word_scales(first, word);
        let v = word * KEY_PARTS;
        var part: Logits;
        logit_part(&part, words, scale.p0, row, v);
        if (KEY_PARTS > 1u) {
            logit_part(&part, words >> vec4<u32>(KEY_BITS), scale.p1, row, v + 1u);
        }
        if (KEY_PARTS > 2u) {
            logit_part(&part, words >> vec4<u32>(2u * KEY_BITS), scale.p2, row, v + 2u);
            logit_part(&part, words >> vec4<u32>(3u * KEY_BITS), scale.p3, row, v + 3u);
        }
        logits.r0 += part.r0;
        logits.r1 += part.r1;
        logits.r2 += part.r2;
        logits.r3 += part.r3;
    }
    return logits;
}
