// Values of whole blocks: quantized per token, over groups of channels, or kept in 16 bits. Twin: src/oracle/pack_values.rs.
//
// | binding | what | access |
// |---|---|---|
// | 0, 1 of group 0 | params, plan: (first slot, block) per block, slot lists | read |
// | 2, 3 | unpacked tokens | read |
// | 4 | slab | write |
//
// Grid: x, z blocks; y KV heads.

@group(0) @binding(4) var<storage, read_write> slab: array<u32>;

const VALUE_WORKGROUP: u32 = 128u;

var<workgroup> sh_param: array<u32, VALUE_PARAM_COUNT>;

@compute @workgroup_size(VALUE_WORKGROUP)
fn pack_values(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let item = work_item(group);
    if (item >= params.count) {
        return;
    }
    let head = group.y;
    let slots = params.slots + plan[params.first + 2u * item];
    let first = plan[params.first + 2u * item + 1u] * BLOCK_WORDS + head * HEAD_WORDS;

    if (VALUE_BITS == 16u) {
        for (var i = local; i < VALUE_ROW_WORDS * GROUP; i += VALUE_WORKGROUP) {
            let slot = plan[slots + i / VALUE_ROW_WORDS];
            slab[first + VALUE_CODES + i] = sixteen_bits(slot, 1u, head, i % VALUE_ROW_WORDS);
        }
        return;
    }

    // Minimum and maximum along the channels of each token's groups; the last group may be short.
    for (var i = local; i < VALUE_PARAM_COUNT; i += VALUE_WORKGROUP) {
        let slot = plan[slots + i / VALUE_GROUPS];
        let begin = (i % VALUE_GROUPS) * VALUE_GROUP;
        let end = min(begin + VALUE_GROUP, HEAD_DIM);
        var low = 0xffffffffu;
        var high = 0u;
        for (var channel = begin; channel < end; channel++) {
            let key = order_key(token_bits(slot, 1u, head, channel));
            low = min(low, key);
            high = max(high, key);
        }
        let param = group_param(VALUE_BITS, low, high);
        sh_param[i] = param;
        slab[first + VALUE_PARAMS + i] = param;
    }
    workgroupBarrier();

    // Codes, [token][row word].
    for (var i = local; i < VALUE_ROW_WORDS * GROUP; i += VALUE_WORKGROUP) {
        let token = i / VALUE_ROW_WORDS;
        let slot = plan[slots + token];
        let channel = (i % VALUE_ROW_WORDS) * VALUE_CODES_PER_WORD;
        var word = 0u;
        for (var j = 0u; j < VALUE_CODES_PER_WORD; j++) {
            if (channel + j < HEAD_DIM) {
                let x = token_bits(slot, 1u, head, channel + j);
                let param = sh_param[token * VALUE_GROUPS + (channel + j) / VALUE_GROUP];
                word |= code_of(VALUE_BITS, param, x) << (j * VALUE_BITS);
            }
        }
        slab[first + VALUE_CODES + i] = word;
    }
}
