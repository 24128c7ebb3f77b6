// Packed pages for lib/decode.wgsl whose groups have an axis for comparison: dequantized four channels of a
// token at a time. Slower than folding the parameters out, and short. lib/vectors_packed.wgsl comes before.
//
// Constants: SHARES.
// Records: Split.

const KEYS_PREPARED: bool = false;
const VALUES_PREPARED: bool = false;

fn key_operands(split: Split, head: u32, first: u32, local: u32) {
}

fn value_operands(split: Split, head: u32, first: u32, local: u32) {
}

// The products of a quad of tokens, from token `token` of the split on, in the slice's channels.
fn packed_logits(split: Split, head: u32, token: u32, in_tile: u32, slice: u32) -> Lines {
    var sums = Lines();
    if (token < split.tokens) {
        for (var v = slice; v < CHANNEL_QUADS; v += SLICES) {
            let x = by_channels(
                key_vector(split, head, token, v),
                key_vector(split, head, token + 1u, v),
                key_vector(split, head, token + 2u, v),
                key_vector(split, head, token + 3u, v));
            add_part(&sums, x, v, KEY_VECS);
        }
    }
    return sums;
}

// Adds the weighted values of four channels, of the tile's tokens that fall to the share, to the sums so far.
fn add_packed(so_far: Lines, split: Split, head: u32, first: u32, quad: u32, share: u32) -> Lines {
    var sums = so_far;
    for (var n = share; n < QUADS; n += SHARES) {
        let token = first + 4u * n;
        if (token < split.tokens) {
            let x = Parts(
                value_vector(split, head, token, quad),
                value_vector(split, head, token + 1u, quad),
                value_vector(split, head, token + 2u, quad),
                value_vector(split, head, token + 3u, quad));
            add_part(&sums, x, SH_WEIGHTS + n, QUADS);
        }
    }
    return sums;
}
