// Packed pages for lib/decode.wgsl, by their codes. Scales go into the operands and minima into offsets, once
// for all the lines that share them, so that an invocation unpacks a word once for all rows:
//   q . k_t = sum_d (q_d s_d) c_td + sum_d q_d m_d
//   sum_t p_t v_t = sum_t (p_t s_t) c_t + sum_t p_t m_t
//
// Operands of keys are [block][row][vector of channels], of values [channel group][row][quad of tokens].
// lib/lines.wgsl comes before.
//
// Constants: CHANNEL_GROUP, GROUP, HEAD_DIM, KEY_BITS, KEY_COMPACT, KEY_LOW_BITS, KEY_LOW_WORDS, KEY_PARAMS,
// ROWS, SHARES, TILE_TOKENS, VALUE_BITS, VALUE_CODES, VALUE_COMPACT, VALUE_GROUPS, VALUE_LOW_BITS,
// VALUE_LOW_WORDS, VALUE_PARAMS, WORKGROUP.
// Records: Split.

const KEYS_PREPARED: bool = KEY_BITS < 16u;
const VALUES_PREPARED: bool = VALUE_BITS < 16u;
// Blocks that a tile's tokens lie in.
const TILE_BLOCKS: u32 = (TILE_TOKENS + GROUP - 1u) / GROUP;

fn offset_of(at: u32) -> f32 {
    return (sh_offsets[at] + sh_offsets[at + 1u]) + (sh_offsets[at + 2u] + sh_offsets[at + 3u]);
}

// The offsets of four vectors of operands.
fn unit_offsets(at: u32, row_stride: u32) -> Scalars {
    var sums = Scalars();
    sums.low.x = offset_of(at);
    if (ROWS > 1u) {
        sums.low.y = offset_of(at + row_stride);
    }
    if (ROWS > 2u) {
        sums.low.z = offset_of(at + 2u * row_stride);
        sums.low.w = offset_of(at + 3u * row_stride);
    }
    if (ROWS > 4u) {
        sums.high.x = offset_of(at + 4u * row_stride);
        sums.high.y = offset_of(at + 5u * row_stride);
        sums.high.z = offset_of(at + 6u * row_stride);
        sums.high.w = offset_of(at + 7u * row_stride);
    }
    return sums;
}

// Adds 16 codes of each line times the operands from vector `v` of theirs on.
fn add_unit(sums: ptr<function, Lines>, words: Words, bits: u32, v: u32, row_stride: u32) {
    // Before the codes, which cancel them: those of several units together are larger.
    *sums = shifted(*sums, unit_offsets(v, row_stride));
    add_part(sums, part(words, 0u, bits), SH_OPERANDS + v, row_stride);
    add_part(sums, part(words, 1u, bits), SH_OPERANDS + v + 1u, row_stride);
    add_part(sums, part(words, 2u, bits), SH_OPERANDS + v + 2u, row_stride);
    add_part(sums, part(words, 3u, bits), SH_OPERANDS + v + 3u, row_stride);
}

// The queries times the scales of the tile's blocks, and their products with the minima.
fn key_operands(split: Split, head: u32, first: u32, local: u32) {
    for (var i = local; i < TILE_BLOCKS * KEY_VECS; i += WORKGROUP) {
        let block = i / KEY_VECS;
        let v = i % KEY_VECS;
        // Past the last token it is the last block, past the last channel the last parameters: what is there
        // may be no number, and is multiplied by zero or not seen.
        let at = head_words(split, head, min(first + block * GROUP, split.tokens - 1u));
        let p = four_params((at + KEY_PARAMS) / 4u, min(v, CHANNEL_QUADS - 1u), KEY_COMPACT);
        let scale = scales(p, KEY_COMPACT);
        let low = minima(p, KEY_COMPACT);
        let place = block * ROWS * KEY_VECS + v;
        for (var row = 0u; row < ROWS; row++) {
            let q = sh[row * KEY_VECS + v];
            sh[SH_OPERANDS + place + row * KEY_VECS] = q * scale;
            sh_offsets[place + row * KEY_VECS] = dot(q, low);
        }
    }
}

// The weights times the scales of each channel group, and their products with the minima.
fn value_operands(split: Split, head: u32, first: u32, local: u32) {
    for (var i = local; i < QUADS * VALUE_GROUPS; i += WORKGROUP) {
        let quad = i / VALUE_GROUPS;
        let group = i % VALUE_GROUPS;
        let token = first + 4u * quad;
        // What lies behind the last token may be no number; `add_packed` leaves it out.
        if (token < split.tokens) {
            let at = head_words(split, head, token) + VALUE_PARAMS;
            let n = (token % GROUP) * VALUE_GROUPS + group;
            let p0 = param_at(at, n, VALUE_COMPACT);
            let p1 = param_at(at, n + VALUE_GROUPS, VALUE_COMPACT);
            let p2 = param_at(at, n + 2u * VALUE_GROUPS, VALUE_COMPACT);
            let p3 = param_at(at, n + 3u * VALUE_GROUPS, VALUE_COMPACT);
            let scale = vec4<f32>(p0.x, p1.x, p2.x, p3.x);
            let low = vec4<f32>(p0.y, p1.y, p2.y, p3.y);
            let place = group * ROWS * QUADS + quad;
            for (var row = 0u; row < ROWS; row++) {
                let p = sh[SH_WEIGHTS + row * QUADS + quad];
                sh[SH_OPERANDS + place + row * QUADS] = p * scale;
                sh_offsets[place + row * QUADS] = dot(p, low);
            }
        }
    }
}

// The products of a quad of tokens, from token `token` of the split on, in the slice's channels.
fn packed_logits(split: Split, head: u32, token: u32, in_tile: u32, slice: u32) -> Lines {
    var sums = Lines();
    if (token >= split.tokens) {
        return sums;
    }
    let at = (head_words(split, head, token) + token % GROUP) / 4u;
    let operands = (in_tile / GROUP) * ROWS * KEY_VECS;
    for (var unit = slice; unit < KEY_UNITS; unit += SLICES) {
        if (KEY_BITS == 16u) {
            let words = load_words(at, GROUP / 4u, KEY_BITS, KEY_LOW_BITS, KEY_LOW_WORDS, unit);
            add_part(&sums, part(words, 0u, KEY_BITS), 4u * unit, KEY_VECS);
            add_part(&sums, part(words, 1u, KEY_BITS), 4u * unit + 1u, KEY_VECS);
            // What lies behind the row's channels may be no number.
            if (16u * unit + 8u < HEAD_DIM) {
                let more = load_words(at + GROUP, GROUP / 4u, KEY_BITS, KEY_LOW_BITS, KEY_LOW_WORDS, unit);
                add_part(&sums, part(more, 0u, KEY_BITS), 4u * unit + 2u, KEY_VECS);
                add_part(&sums, part(more, 1u, KEY_BITS), 4u * unit + 3u, KEY_VECS);
            }
        } else {
            let words = load_words(at, GROUP / 4u, KEY_BITS, KEY_LOW_BITS, KEY_LOW_WORDS, unit);
            let v = operands + 4u * unit;
            add_unit(&sums, words, KEY_BITS, v, KEY_VECS);
        }
    }
    return sums;
}

// Adds the weighted values of four channels, of the tile's tokens that fall to the share, to the sums so far.
fn add_packed(so_far: Lines, split: Split, head: u32, first: u32, quad: u32, share: u32) -> Lines {
    var sums = so_far;
    let operands = min(4u * quad / CHANNEL_GROUP, VALUE_GROUPS - 1u) * ROWS * QUADS;
    for (var unit = share; unit < TOKEN_UNITS; unit += SHARES) {
        let token = first + 16u * unit;
        if (token >= split.tokens) {
            break;
        }
        let at = (head_words(split, head, token) + VALUE_CODES) / 4u + quad;
        let in_block = (token % GROUP) / 16u;
        let words = load_words(at, CHANNEL_QUADS, VALUE_BITS, VALUE_LOW_BITS, VALUE_LOW_WORDS, in_block);
        if (VALUE_BITS == 16u) {
            let v = SH_WEIGHTS + 4u * unit;
            let behind = at + 4u * CHANNEL_QUADS;
            let more = load_words(behind, CHANNEL_QUADS, VALUE_BITS, VALUE_LOW_BITS, VALUE_LOW_WORDS, in_block);
            add_part(&sums, part(words, 0u, VALUE_BITS), v, QUADS);
            add_part(&sums, part(words, 1u, VALUE_BITS), v + 1u, QUADS);
            add_part(&sums, part(more, 0u, VALUE_BITS), v + 2u, QUADS);
            add_part(&sums, part(more, 1u, VALUE_BITS), v + 3u, QUADS);
        } else {
            let v = operands + 4u * unit;
            add_unit(&sums, words, VALUE_BITS, v, QUADS);
        }
    }
    return sums;
}
