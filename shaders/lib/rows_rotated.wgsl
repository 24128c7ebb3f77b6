// Rotated values, for pack_values.wgsl: PACK_TOKENS rows at a time. lib/rotation.wgsl comes before.

// f32 bits of `channel` of a block's token `token`, one of those that were loaded last.
fn value_bits(slots: u32, head: u32, token: u32, channel: u32) -> u32 {
    return sh_rows[(token % PACK_TOKENS) * HEAD_DIM + channel];
}

// Loads and rotates the rows of the tokens from `begin` on; they enter as f32 do. Ends with a barrier.
fn load_rows(slots: u32, head: u32, begin: u32, local: u32) {
    for (var i = local; i < ROTATED_ROWS * HEAD_DIM; i += ROTATION_WORKGROUP) {
        let bits = token_bits(plan[slots + begin + i / HEAD_DIM], 1u, head, i % HEAD_DIM);
        // Below 2^-97, zero: no sum of what is left is subnormal, which some GPUs flush.
        sh_rows[i] = select(bits, 0u, (bits & 0x7fffffffu) < 0x0f000000u);
    }
    butterflies(ROTATION_SCALE, local);
    for (var i = local; i < ROTATED_ROWS * HEAD_DIM; i += ROTATION_WORKGROUP) {
        sh_rows[i] = enter(F32, sh_rows[i]);
    }
    workgroupBarrier();
}
