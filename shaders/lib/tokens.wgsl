// Reads single elements of unpacked tokens: sink slots and rings, or the staging buffer. Layout of both: keys
// `[slot][kv head][row word]`, then values likewise.
//
// Constants: RING_SLOTS, ROW_WORDS, STAGING_BIT, STAGING_SLOTS, TOKEN_WORDS, WINDOW_FORMAT.

@group(0) @binding(2) var<storage, read> ring: array<u32>;
@group(0) @binding(3) var<storage, read> staging: array<u32>;

// f32 bits of `channel` of a token's key (`tensor` = 0) or value (1).
fn token_bits(slot: u32, tensor: u32, head: u32, channel: u32) -> u32 {
    let at = head * ROW_WORDS + element_word(WINDOW_FORMAT, channel);
    var word = 0u;
    if ((slot & STAGING_BIT) != 0u) {
        word = staging[((slot & ~STAGING_BIT) + tensor * STAGING_SLOTS) * TOKEN_WORDS + at];
    } else {
        word = ring[(slot + tensor * RING_SLOTS) * TOKEN_WORDS + at];
    }
    return element_bits(WINDOW_FORMAT, word, channel);
}
