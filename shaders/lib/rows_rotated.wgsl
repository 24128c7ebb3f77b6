// Rotated elements, for pack.wgsl: PACK_TOKENS rows at a time. lib/rotation.wgsl comes before.
//
// Constants: F32, HEAD_DIM, PACK_TENSOR, PACK_TOKENS, PACK_WORKGROUP, ROTATION_SCALE.
// Records: PackBlock.

const ROTATED_ROWS: u32 = PACK_TOKENS;
const ROTATION_WORKGROUP: u32 = PACK_WORKGROUP;

// What `load_rows` needs to know of a block: where its list of slots begins.
fn first_row(item: u32) -> u32 {
    return params.slots + pack_block_at(params.first + PACK_BLOCK_WORDS * item).first_slot;
}

// f32 bits of `channel` of a block's token `token`, one of those that were loaded last.
fn row_bits(slots: u32, head: u32, token: u32, channel: u32) -> u32 {
    return sh_rows[(token % PACK_TOKENS) * HEAD_DIM + channel];
}

// Loads and rotates the rows of the tokens from `begin` on. Ends with a barrier.
fn load_rows(slots: u32, head: u32, begin: u32, local: u32) {
    for (var i = local; i < ROTATED_ROWS * HEAD_DIM; i += ROTATION_WORKGROUP) {
        sh_rows[i] = rotatable(token_bits(plan[slots + begin + i / HEAD_DIM], PACK_TENSOR, head, i % HEAD_DIM));
    }
    butterflies(ROTATION_SCALE, local);
    for (var i = local; i < ROTATED_ROWS * HEAD_DIM; i += ROTATION_WORKGROUP) {
        sh_rows[i] = enter(F32, sh_rows[i]);
    }
    workgroupBarrier();
}
