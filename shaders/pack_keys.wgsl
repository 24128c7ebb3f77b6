// Keys of whole blocks: quantized per channel, over the block's tokens, or kept in 16 bits. Twin: src/oracle/pack_keys.rs.
//
// | binding | what | access |
// |---|---|---|
// | 0, 1 of group 0 | params, plan: (first slot, block) per block, slot lists | read |
// | 2, 3 | unpacked tokens | read |
// | 4 | slab | write |
//
// Grid: x, z blocks, PACK_BATCHES workgroups for each; y KV heads.

@group(0) @binding(4) var<storage, read_write> slab: array<u32>;

// A group is a channel, over the block's tokens.
fn group_size(g: u32) -> u32 {
    return GROUP;
}

fn group_bits(slots: u32, head: u32, g: u32, t: u32) -> u32 {
    return token_bits(plan[slots + t], 0u, head, g);
}

fn param_word(g: u32) -> u32 {
    return KEY_PARAMS + g;
}

@compute @workgroup_size(PACK_WORKGROUP)
fn pack_keys(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let item = work_item(group) / PACK_BATCHES;
    if (item >= params.count) {
        return;
    }
    let head = group.y;
    let slots = params.slots + plan[params.first + 2u * item];
    let first = plan[params.first + 2u * item + 1u] * BLOCK_WORDS + head * HEAD_WORDS;

    if (KEY_BITS == 16u) {
        for (var i = local; i < KEY_ROW_WORDS * GROUP; i += PACK_WORKGROUP) {
            slab[first + i] = sixteen_bits(plan[slots + i % GROUP], 0u, head, i / GROUP);
        }
        return;
    }

    let begin = (work_item(group) % PACK_BATCHES) * PACK_CHANNELS;
    let end = min(begin + PACK_CHANNELS, HEAD_DIM);
    fit_groups(slots, head, first, begin, end, local);

    // Codes, [row word][token]: of the words that begin in this workgroup's channels.
    for (var i = local; i < KEY_ROW_WORDS * GROUP; i += PACK_WORKGROUP) {
        let slot = plan[slots + i % GROUP];
        let part = plane_word(KEY_BITS, KEY_LOW_BITS, KEY_LOW_WORDS, i / GROUP);
        if (part.channel < begin || part.channel >= end) {
            continue;
        }
        var word = 0u;
        for (var j = 0u; j < part.codes; j++) {
            let channel = part.channel + j;
            if (channel < HEAD_DIM) {
                let code = code_of(KEY_BITS, sh_param[channel - begin], token_bits(slot, 0u, head, channel));
                word |= ((code >> part.code_shift) & part.mask) << (j * part.width);
            }
        }
        slab[first + i] = word;
    }
}
