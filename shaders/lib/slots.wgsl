// Unpacked tokens by slot: sink slots and rings, or the staging buffer.
//
// Constants: RING_SLOTS, ROW_WORDS, STAGING_BIT, STAGING_SLOTS, TOKEN_WORDS.
// Records: Split.

@group(0) @binding(3) var<storage, read> ring4: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read> staging4: array<vec4<u32>>;

const TOKEN_VECS: u32 = TOKEN_WORDS / 4u;
const ROW_VECS: u32 = ROW_WORDS / 4u;

// Slot of a token of the split. Past the last one it is the last: stale rows may hold NaN, and 0 * NaN is
// NaN.
fn slot_of(split: Split, token: u32) -> u32 {
    return plan[params.slots + split.source + min(token, split.tokens - 1u)];
}

// Four words of a token's key (`tensor` = 0) or value (1).
fn fetch(slot: u32, tensor: u32, head: u32, v: u32) -> vec4<u32> {
    let at = head * ROW_VECS + v;
    if ((slot & STAGING_BIT) != 0u) {
        return staging4[((slot & ~STAGING_BIT) + tensor * STAGING_SLOTS) * TOKEN_VECS + at];
    }
    return ring4[(slot + tensor * RING_SLOTS) * TOKEN_VECS + at];
}
