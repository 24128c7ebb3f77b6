// Weighted sums of a packed page whose values are kept in 16 bits.
//
// Constants: GROUP, PACKED_FORMAT, VALUE_CODES, VALUE_ROWS, VALUE_ROW_WORDS.
// Records: Split.

// Adds one token with weights `p` of the two rows. A chunk that reaches past the row reads its neighbour;
// those sums are not written.
fn add_token(sums: ptr<function, Sums>, first: u32, token: u32, chunk: u32, p: vec2<f32>) {
    let at = (first + VALUE_CODES + token * VALUE_ROW_WORDS) / 4u + 2u * chunk;
    (*sums).weights += p;
    add_weighted(sums, sixteen_channels(PACKED_FORMAT, slab4[at], slab4[at + 1u]), p);
}

fn tile_values(split: Split, head: u32, chunk: u32, row: u32, begin: u32, end: u32) -> Sums {
    var sums = Sums();
    for (var quad = begin; quad < end; quad++) {
        let first = head_words(split, head, 4u * quad);
        let token = (4u * quad) % GROUP;
        let a = sh[row * QUADS + quad];
        var b = vec4<f32>();
        if (VALUE_ROWS > 1u) {
            b = sh[(row + 1u) * QUADS + quad];
        }
        add_token(&sums, first, token, chunk, vec2<f32>(a.x, b.x));
        add_token(&sums, first, token + 1u, chunk, vec2<f32>(a.y, b.y));
        add_token(&sums, first, token + 2u, chunk, vec2<f32>(a.z, b.z));
        add_token(&sums, first, token + 3u, chunk, vec2<f32>(a.w, b.w));
    }
    return sums;
}
