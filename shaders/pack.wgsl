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
// PACK_CODES, PACK_LINES, PACK_LINE_WORDS, PACK_LOW_BITS, PACK_LOW_WORDS, PACK_PER_TOKEN, PACK_ROW_GROUPS,
// PACK_TENSOR, PACK_TOKENS, PACK_WORKGROUP.
// Records: PackBlock.

@group(0) @binding(4) var<storage, read_write> slab: array<u32>;

// Codes of a line, which is a token's channels if keys are packed, and a channel's tokens if values are.
const LINE_CODES: u32 = select(GROUP, HEAD_DIM, PACK_TENSOR == 0u);

// (token, channel) of code `code` of line `line`.
fn element_of(line: u32, code: u32) -> vec2<u32> {
    return select(vec2<u32>(code, line), vec2<u32>(line, code), PACK_TENSOR == 0u);
}

fn sixteen_bits(slots: u32, head: u32, line: u32, code: u32) -> u32 {
    let at = element_of(line, code);
    return enter(PACKED_FORMAT, row_bits(slots, head, at.x, at.y));
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
        for (var i = local; i < PACK_LINE_WORDS * PACK_LINES; i += PACK_WORKGROUP) {
            let line = i % PACK_LINES;
            let code = 2u * (i / PACK_LINES);
            slab[first + PACK_CODES + i] =
                sixteen_bits(slots, head, line, code) | (sixteen_bits(slots, head, line, code + 1u) << 16u);
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

    // Codes: of these lines, the words that begin with these codes.
    let start = element_of(token, channel);
    let stop = element_of(token + PACK_TOKENS, end_channel);
    let lines = stop.x - start.x;
    for (var i = local; i < PACK_LINE_WORDS * lines; i += PACK_WORKGROUP) {
        let line = start.x + i % lines;
        let part = plane_word(PACK_BITS, PACK_LOW_BITS, PACK_LOW_WORDS, i / lines);
        if (part.first < start.y || part.first >= stop.y) {
            continue;
        }
        var word = 0u;
        for (var j = 0u; j < part.codes; j++) {
            let at = element_of(line, part.first + j);
            if (part.first + j < LINE_CODES) {
                let code = code_of(sh_param[group_of(at.x, at.y) - begin], row_bits(slots, head, at.x, at.y));
                word |= ((code >> part.code_shift) & part.mask) << code_bit(part.width, j);
            }
        }
        slab[first + PACK_CODES + (i / lines) * PACK_LINES + line] = word;
    }
}
