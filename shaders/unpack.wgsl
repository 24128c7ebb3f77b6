// Packed tokens return to the window: dequantized, then through the entry function. Those that are rotated go
// through unpack_rotated.wgsl. Twin: src/oracle/unpack.rs.
//
// | binding | what | access |
// |---|---|---|
// | 0, 1 of group 0 | params, plan: (block, token, slot) per token | read |
// | 2 | slab | read |
// | 3 | sink slots and rings | write |
//
// Grid: x, z tokens; y 64 words of the token's keys and values, without those that are rotated. One
// invocation writes one word.
//
// Constants: BLOCK_WORDS, F32, HEAD_WORDS, KEYS_ROTATED, RING_SLOTS, ROW_WORDS, TOKEN_WORDS, VALUES_ROTATED,
// WINDOW_FORMAT.
// Records: TokenUnpack.

@group(0) @binding(2) var<storage, read> slab: array<u32>;
@group(0) @binding(3) var<storage, read_write> ring: array<u32>;

fn packed_element(is_value: bool, first: u32, token: u32, channel: u32) -> u32 {
    if (is_value) {
        return value_element(first, token, channel);
    }
    return key_element(first, token, channel);
}

@compute @workgroup_size(64)
fn unpack(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let item = work_item(workgroup);
    let word = workgroup.y * 64u + local + select(0u, TOKEN_WORDS, KEYS_ROTATED);
    if (item >= params.count || word >= select(2u, 1u, VALUES_ROTATED) * TOKEN_WORDS) {
        return;
    }
    let unpack = token_unpack_at(params.first + TOKEN_UNPACK_WORDS * item);
    let is_value = word >= TOKEN_WORDS;
    let in_token = select(word, word - TOKEN_WORDS, is_value);
    let first = unpack.block * BLOCK_WORDS + (in_token / ROW_WORDS) * HEAD_WORDS;
    let in_row = in_token % ROW_WORDS;
    var bits = 0u;
    if (WINDOW_FORMAT == F32) {
        bits = enter(WINDOW_FORMAT, packed_element(is_value, first, unpack.token, in_row));
    } else {
        bits = enter(WINDOW_FORMAT, packed_element(is_value, first, unpack.token, 2u * in_row))
            | (enter(WINDOW_FORMAT, packed_element(is_value, first, unpack.token, 2u * in_row + 1u)) << 16u);
    }
    ring[(unpack.slot + select(0u, RING_SLOTS, is_value)) * TOKEN_WORDS + in_token] = bits;
}
