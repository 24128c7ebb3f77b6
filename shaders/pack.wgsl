// Keys or values of whole blocks: quantized over groups of tokens or of channels, or kept in 16 bits. Twin:
// src/oracle/pack.rs.
//
// | binding | what | access |
// |---|---|---|
// | 0, 1 of group 0 | params, plan: (first slot, block) per block, slot lists | read |
// | 2, 3 | unpacked tokens, or rotated rows | read |
// | 4 | slab | write |
//
// Grid: x, z blocks, PACK_BATCHES workgroups for each, which divide its groups among them; y KV heads.
//
// Constants: BLOCK_WORDS, GROUP, HEAD_DIM, HEAD_WORDS, PACKED_FORMAT, PACK_BATCHES, PACK_BITS, PACK_CHANNELS,
// PACK_CODES, PACK_LOW_BITS, PACK_LOW_WORDS, PACK_PER_TOKEN, PACK_ROW_GROUPS, PACK_ROW_WORDS, PACK_TENSOR,
// PACK_TOKENS, PACK_WORKGROUP.
// Records: PackBlock.

@group(0) @binding(4) var<storage, read_write> slab: array<u32>;

// Where the codes of row word `word` of a token go.
fn code_word(token: u32, word: u32) -> u32 {
    if (PACK_TENSOR == 0u) {
        return PACK_CODES + word * GROUP + token;
    }
    return PACK_CODES + token * PACK_ROW_WORDS + word;
}

// The `i`-th of the words of `tokens` tokens in the order in which they lie in memory: (token, row word).
fn nth_word(i: u32, tokens: u32) -> vec2<u32> {
    if (PACK_TENSOR == 0u) {
        return vec2<u32>(i % tokens, i / tokens);
    }
    return vec2<u32>(i / PACK_ROW_WORDS, i % PACK_ROW_WORDS);
}

@compute @workgroup_size(PACK_WORKGROUP)
fn pack(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let item = work_item(workgroup) / PACK_BATCHES;
    if (item >= params.count) {
        return;
    }
    let head = workgroup.y;
    let slots = first_row(item);
    let first = pack_block_at(params.first + PACK_BLOCK_WORDS * item).block * BLOCK_WORDS + head * HEAD_WORDS;

    if (PACK_BITS == 16u) {
        for (var i = local; i < PACK_ROW_WORDS * GROUP; i += PACK_WORKGROUP) {
            let at = nth_word(i, GROUP);
            slab[first + code_word(at.x, at.y)] = enter(PACKED_FORMAT, row_bits(slots, head, at.x, 2u * at.y))
                | (enter(PACKED_FORMAT, row_bits(slots, head, at.x, 2u * at.y + 1u)) << 16u);
        }
        return;
    }

    // The groups of this workgroup: of all channels of some tokens, or of all tokens in some channels.
    let batch = work_item(workgroup) % PACK_BATCHES;
    let token = select(0u, batch * PACK_TOKENS, PACK_PER_TOKEN);
    let channel = select(batch * PACK_CHANNELS, 0u, PACK_PER_TOKEN);
    let end_channel = min(channel + PACK_CHANNELS, HEAD_DIM);
    let begin = select(channel, token * PACK_ROW_GROUPS, PACK_PER_TOKEN);
    let end = select(end_channel, (token + PACK_TOKENS) * PACK_ROW_GROUPS, PACK_PER_TOKEN);
    load_rows(slots, head, token, local);
    fit_groups(slots, head, begin, end, local);
    store_params(first, begin, end, local);

    // Codes: the words that begin in these channels.
    for (var i = local; i < PACK_ROW_WORDS * PACK_TOKENS; i += PACK_WORKGROUP) {
        let at = nth_word(i, PACK_TOKENS);
        let t = token + at.x;
        let part = plane_word(PACK_BITS, PACK_LOW_BITS, PACK_LOW_WORDS, at.y);
        if (part.channel < channel || part.channel >= end_channel) {
            continue;
        }
        var word = 0u;
        for (var j = 0u; j < part.codes; j++) {
            let c = part.channel + j;
            if (c < HEAD_DIM) {
                let code = code_of(sh_param[group_of(t, c) - begin], row_bits(slots, head, t, c));
                word |= ((code >> part.code_shift) & part.mask) << (j * part.width);
            }
        }
        slab[first + code_word(t, at.y)] = word;
    }
}
