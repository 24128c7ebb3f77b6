// Values of whole blocks: quantized per token, over groups of channels, or kept in 16 bits. Twin: src/oracle/pack_values.rs.
//
// | binding | what | access |
// |---|---|---|
// | 0, 1 of group 0 | params, plan: (first slot, block) per block, slot lists | read |
// | 2, 3 | unpacked tokens | read |
// | 4 | slab | write |
//
// Grid: x, z blocks, PACK_BATCHES workgroups for each; y KV heads.

@group(0) @binding(4) var<storage, read_write> slab: array<u32>;

// A group is some channels of a token; the last one of a token may be short.
fn group_size(g: u32) -> u32 {
    return min(VALUE_GROUP, HEAD_DIM - (g % VALUE_GROUPS) * VALUE_GROUP);
}

fn group_bits(slots: u32, head: u32, g: u32, t: u32) -> u32 {
    return value_bits(slots, head, g / VALUE_GROUPS, (g % VALUE_GROUPS) * VALUE_GROUP + t);
}

fn param_word(g: u32) -> u32 {
    return VALUE_PARAMS + g;
}

// Codes of PACK_TOKENS tokens from `begin` on, [token][row word].
fn pack_tokens(slots: u32, head: u32, first: u32, begin: u32, local: u32) {
    for (var i = local; i < VALUE_ROW_WORDS * PACK_TOKENS; i += PACK_WORKGROUP) {
        let token = begin + i / VALUE_ROW_WORDS;
        let part = plane_word(VALUE_BITS, VALUE_LOW_BITS, VALUE_LOW_WORDS, i % VALUE_ROW_WORDS);
        var word = 0u;
        for (var j = 0u; j < part.codes; j++) {
            let channel = part.channel + j;
            if (channel < HEAD_DIM) {
                let param = sh_param[(token - begin) * VALUE_GROUPS + channel / VALUE_GROUP];
                let code = code_of(VALUE_BITS, param, value_bits(slots, head, token, channel));
                word |= ((code >> part.code_shift) & part.mask) << (j * part.width);
            }
        }
        slab[first + VALUE_CODES + begin * VALUE_ROW_WORDS + i] = word;
    }
}

@compute @workgroup_size(PACK_WORKGROUP)
fn pack_values(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let item = work_item(group) / PACK_BATCHES;
    if (item >= params.count) {
        return;
    }
    let head = group.y;
    let slots = params.slots + plan[params.first + 2u * item];
    let first = plan[params.first + 2u * item + 1u] * BLOCK_WORDS + head * HEAD_WORDS;

    if (VALUE_BITS == 16u) {
        for (var i = local; i < VALUE_ROW_WORDS * GROUP; i += PACK_WORKGROUP) {
            let slot = plan[slots + i / VALUE_ROW_WORDS];
            slab[first + VALUE_CODES + i] = sixteen_bits(slot, 1u, head, i % VALUE_ROW_WORDS);
        }
        return;
    }

    let token = (work_item(group) % PACK_BATCHES) * PACK_TOKENS;
    load_rows(slots, head, token, local);
    fit_groups(slots, head, first, token * VALUE_GROUPS, (token + PACK_TOKENS) * VALUE_GROUPS, local);
    pack_tokens(slots, head, first, token, local);
}
