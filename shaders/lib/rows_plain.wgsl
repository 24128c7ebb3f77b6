// Elements as they are, for pack.wgsl.
//
// Constants: PACK_TENSOR.
// Records: PackBlock.

// What `row_bits` needs to know of a block: where its list of slots begins.
fn first_row(item: u32) -> u32 {
    return params.slots + pack_block_at(params.first + PACK_BLOCK_WORDS * item).first_slot;
}

// f32 bits of `channel` of a block's token `token`.
fn row_bits(slots: u32, head: u32, token: u32, channel: u32) -> u32 {
    return token_bits(plan[slots + token], PACK_TENSOR, head, channel);
}

fn load_rows(slots: u32, head: u32, begin: u32, local: u32) {
}
