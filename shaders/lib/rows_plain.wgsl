// Values as they are, for pack_values.wgsl.

// f32 bits of `channel` of a block's token `token`.
fn value_bits(slots: u32, head: u32, token: u32, channel: u32) -> u32 {
    return token_bits(plan[slots + token], 1u, head, channel);
}

fn load_rows(slots: u32, head: u32, begin: u32, local: u32) {
}
