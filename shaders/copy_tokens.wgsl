// Unpacked tokens are copied to the slots of another sequence. Twin: src/oracle/copy_tokens.rs.
//
// | binding | what | access |
// |---|---|---|
// | 0, 1 of group 0 | params, plan: (from slot, to slot) per token | read |
// | 2 | sink slots and rings; no slot is both read and written | read, write |
//
// Grid: x, z tokens; y 64 words of the token's keys and values.
//
// Constants: RING_SLOTS, TOKEN_WORDS.
// Records: TokenCopy.

@group(0) @binding(2) var<storage, read_write> ring: array<u32>;

@compute @workgroup_size(64)
fn copy_tokens(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let item = work_item(workgroup);
    let word = workgroup.y * 64u + local;
    if (item >= params.count || word >= 2u * TOKEN_WORDS) {
        return;
    }
    let is_value = word >= TOKEN_WORDS;
    let in_token = select(word, word - TOKEN_WORDS, is_value);
    let base = select(0u, RING_SLOTS, is_value);
    let copy = token_copy_at(params.first + TOKEN_COPY_WORDS * item);
    let source_word = (base + copy.source) * TOKEN_WORDS;
    let target_word = (base + copy.destination) * TOKEN_WORDS;
    ring[target_word + in_token] = ring[source_word + in_token];
}
