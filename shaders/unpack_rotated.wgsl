// Packed keys or values that are rotated return to the window: dequantized, rotated back, then through the
// entry function. Others go through unpack.wgsl. Twin: src/oracle/unpack.rs.
//
// | binding | what | access |
// |---|---|---|
// | 0, 1 of group 0 | params, plan: (block, token, slot) per token | read |
// | 2 | slab | read |
// | 3 | sink slots and rings | write |
//
// Grid: x, z tokens; y KV heads.
//
// Constants: BLOCK_WORDS, F32, HEAD_DIM, HEAD_WORDS, RING_SLOTS, ROTATED_TENSOR, ROW_WORDS, TOKEN_WORDS,
// UNROTATION_SCALE, WINDOW_FORMAT.
// Records: TokenUnpack.

@group(0) @binding(2) var<storage, read> slab: array<u32>;
@group(0) @binding(3) var<storage, read_write> ring: array<u32>;

const ROTATED_ROWS: u32 = 1u;
const ROTATION_WORKGROUP: u32 = 64u;

fn rotated_element(first: u32, token: u32, channel: u32) -> u32 {
    if (ROTATED_TENSOR == 0u) {
        return key_element(first, token, channel);
    }
    return value_element(first, token, channel);
}

@compute @workgroup_size(ROTATION_WORKGROUP)
fn unpack_rotated(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let item = work_item(workgroup);
    if (item >= params.count) {
        return;
    }
    let unpack = token_unpack_at(params.first + TOKEN_UNPACK_WORDS * item);
    let head = workgroup.y;
    let first = unpack.block * BLOCK_WORDS + head * HEAD_WORDS;
    for (var channel = local; channel < HEAD_DIM; channel += ROTATION_WORKGROUP) {
        sh_rows[channel] = rotated_element(first, unpack.token, channel);
    }
    butterflies(UNROTATION_SCALE, local);
    let row = (unpack.slot + ROTATED_TENSOR * RING_SLOTS) * TOKEN_WORDS + head * ROW_WORDS;
    for (var word = local; word < ROW_WORDS; word += ROTATION_WORKGROUP) {
        if (WINDOW_FORMAT == F32) {
            ring[row + word] = enter(WINDOW_FORMAT, sh_rows[word]);
        } else {
            ring[row + word] = enter(WINDOW_FORMAT, sh_rows[2u * word])
                | (enter(WINDOW_FORMAT, sh_rows[2u * word + 1u]) << 16u);
        }
    }
}
