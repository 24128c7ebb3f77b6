// Unpacked tokens for lib/decode.wgsl: sinks, residual window, and the step's own new tokens.
// lib/vectors_unpacked.wgsl comes before.
//
// Constants: SHARES.
// Records: Split.

// The products of a quad of tokens, from token `token` of the split on, in the slice's channels.
fn token_logits(split: Split, head: u32, token: u32, slice: u32) -> Lines {
    var sums = Lines();
    if (token < split.tokens) {
        for (var v = slice; v < CHANNEL_QUADS; v += SLICES) {
            let x = by_channels(
                token_vector(split, 0u, head, token, v),
                token_vector(split, 0u, head, token + 1u, v),
                token_vector(split, 0u, head, token + 2u, v),
                token_vector(split, 0u, head, token + 3u, v));
            add_part(&sums, x, v, KEY_VECS);
        }
    }
    return sums;
}

// Adds the weighted values of four channels, of the tile's tokens that fall to the share, to the sums so far.
fn add_tokens(so_far: Lines, split: Split, head: u32, first: u32, quad: u32, share: u32) -> Lines {
    var sums = so_far;
    for (var n = share; n < QUADS; n += SHARES) {
        let token = first + 4u * n;
        if (token < split.tokens) {
            let x = Parts(
                token_vector(split, 1u, head, token, quad),
                token_vector(split, 1u, head, token + 1u, quad),
                token_vector(split, 1u, head, token + 2u, quad),
                token_vector(split, 1u, head, token + 3u, quad));
            add_part(&sums, x, SH_WEIGHTS + n, QUADS);
        }
    }
    return sums;
}
