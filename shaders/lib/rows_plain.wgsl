// Elements as they are, for pack.wgsl.
//
// Constants: PACK_TENSOR.

// What `row_bits` needs to know of a block: where its list of slots begins.
fn first_row(item: u32) -> u32 {
    return params.slots + plan[params.first + 2u * item];
}

// f32 bits of `channel` of a block's token `token`.
fn row_bits(slots: u32, head: u32, token: u32, channel: u32) -> u32 {
    return token_bits(plan[slots + token], PACK_TENSOR, head, channel);
}

fn load_rows(slots: u32, head: u32, begin: u32, local: u32) {
}
