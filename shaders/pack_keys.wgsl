// Keys of whole blocks: quantized per channel, over the block's tokens, or kept in 16 bits. Twin: src/oracle/pack_keys.rs.
//
// | binding | what | access |
// |---|---|---|
// | 0, 1 of group 0 | params, plan: (first slot, block) per block, slot lists | read |
// | 2, 3 | unpacked tokens | read |
// | 4 | slab | write |
//
// Grid: x, z blocks; y KV heads.

@group(0) @binding(4) var<storage, read_write> slab: array<u32>;

const KEY_WORKGROUP: u32 = 128u;

var<workgroup> sh_param: array<u32, HEAD_DIM>;

@compute @workgroup_size(KEY_WORKGROUP)
fn pack_keys(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let item = work_item(group);
    if (item >= params.count) {
        return;
    }
    let head = group.y;
    let slots = params.slots + plan[params.first + 2u * item];
    let first = plan[params.first + 2u * item + 1u] * BLOCK_WORDS + head * HEAD_WORDS;

    if (KEY_BITS == 16u) {
        for (var i = local; i < KEY_ROW_WORDS * GROUP; i += KEY_WORKGROUP) {
            slab[first + i] = sixteen_bits(plan[slots + i % GROUP], 0u, head, i / GROUP);
        }
        return;
    }

    // A channel's minimum and maximum along the sequence.
    for (var channel = local; channel < HEAD_DIM; channel += KEY_WORKGROUP) {
        var low = 0xffffffffu;
        var high = 0u;
        for (var t = 0u; t < GROUP; t++) {
            let key = order_key(token_bits(plan[slots + t], 0u, head, channel));
            low = min(low, key);
            high = max(high, key);
        }
        let param = group_param(KEY_BITS, low, high);
        sh_param[channel] = param;
        slab[first + KEY_PARAMS + channel] = param;
    }
    workgroupBarrier();

    // Codes, [row word][token].
    for (var i = local; i < KEY_ROW_WORDS * GROUP; i += KEY_WORKGROUP) {
        let slot = plan[slots + i % GROUP];
        let channel = (i / GROUP) * KEY_CODES_PER_WORD;
        var word = 0u;
        for (var j = 0u; j < KEY_CODES_PER_WORD; j++) {
            if (channel + j < HEAD_DIM) {
                let x = token_bits(slot, 0u, head, channel + j);
                word |= code_of(KEY_BITS, sh_param[channel + j], x) << (j * KEY_BITS);
            }
        }
        slab[first + i] = word;
    }
}
