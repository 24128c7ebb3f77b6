// Logits of a packed page whose keys are codes, in f32. lib/keys_quantized.wgsl comes before.
//
// Constants: GROUP, KEY_LOW_WORDS, KEY_PARTS, KEY_SLICES.
// Records: Split.

fn logit_part(logits: ptr<function, Logits>, codes: vec4<u32>, scale: vec4<f32>, row: u32, v: u32) {
    let q0 = query(row, v) * scale;
    let q1 = query(row + 1u, v) * scale;
    let q2 = query(row + 2u, v) * scale;
    let q3 = query(row + 3u, v) * scale;
    add_rows(logits, key_channels(codes), q0, q1, q2, q3);
}

// Adds the products of the slice's words.
fn add_logits(logits: ptr<function, Logits>, split: Split, head: u32, quad: u32, slice: u32, row: u32, query_unit: vec4<f32>) {
    let token = 4u * quad;
    if (token >= split.tokens) {
        return;
    }
    let first = head_words(split, head, token);
    let at = (first + token % GROUP) / 4u;
    for (var word = slice; word < KEY_LOW_WORDS; word += KEY_SLICES) {
        let words = slab4[at + word * (GROUP / 4u)];
        let high = high_bits(at, word);
        let scale = word_scales(first, word);
        let v = word * KEY_PARTS;
        var part = Logits();
        logit_part(&part, key_part(words, high, 0u), scale.p0, row, v);
        if (KEY_PARTS > 1u) {
            logit_part(&part, key_part(words, high, 1u), scale.p1, row, v + 1u);
        }
        if (KEY_PARTS > 2u) {
            logit_part(&part, key_part(words, high, 2u), scale.p2, row, v + 2u);
            logit_part(&part, key_part(words, high, 3u), scale.p3, row, v + 3u);
        }
        (*logits).r0 += part.r0;
        (*logits).r1 += part.r1;
        (*logits).r2 += part.r2;
        (*logits).r3 += part.r3;
    }
}
