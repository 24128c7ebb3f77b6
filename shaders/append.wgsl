// New tokens enter the cache: sanitized, rounded once to the window format, written to their slots.
// Twin: src/oracle/append.rs, src/format/entry.rs.
//
// | binding | what | access |
// |---|---|---|
// | 0, 1 of group 0 | params, plan: (row, slot) per token | read |
// | 2 | sink slots and rings | write |
// | 3 | staging | write |
// | 0 of group 1 | io | read |
// | 1, 2 | host's keys and values | read |
//
// Grid: x, z tokens; y 64 words of the token's keys and values. One invocation writes one word.
//
// Constants: F32, RING_SLOTS, ROW_WORDS, STAGING_BIT, STAGING_SLOTS, TOKEN_WORDS, WINDOW_FORMAT.
// Records: TokenWrite.

@group(0) @binding(2) var<storage, read_write> ring: array<u32>;
@group(0) @binding(3) var<storage, read_write> staging: array<u32>;
@group(1) @binding(0) var<storage, read> io: Io;
@group(1) @binding(1) var<storage, read> host_keys: array<u32>;
@group(1) @binding(2) var<storage, read> host_values: array<u32>;

fn entered(is_value: bool, row: u32, head: u32, channel: u32) -> u32 {
    if (is_value) {
        let index = io.v.offset + row * io.v.token_stride + head * io.v.head_stride + channel;
        return enter(WINDOW_FORMAT, element_bits(io.v.dtype, host_values[element_word(io.v.dtype, index)], index));
    }
    let index = io.k.offset + row * io.k.token_stride + head * io.k.head_stride + channel;
    return enter(WINDOW_FORMAT, element_bits(io.k.dtype, host_keys[element_word(io.k.dtype, index)], index));
}

@compute @workgroup_size(64)
fn append(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let item = work_item(workgroup);
    let word = workgroup.y * 64u + local;
    if (item >= params.count || word >= 2u * TOKEN_WORDS) {
        return;
    }
    let write = token_write_at(params.first + TOKEN_WRITE_WORDS * item);
    let is_value = word >= TOKEN_WORDS;
    let in_token = select(word, word - TOKEN_WORDS, is_value);
    let head = in_token / ROW_WORDS;
    let in_row = in_token % ROW_WORDS;
    var bits = 0u;
    if (WINDOW_FORMAT == F32) {
        bits = entered(is_value, write.row, head, in_row);
    } else {
        bits = entered(is_value, write.row, head, 2u * in_row)
            | (entered(is_value, write.row, head, 2u * in_row + 1u) << 16u);
    }
    if ((write.slot & STAGING_BIT) != 0u) {
        let token = (write.slot & ~STAGING_BIT) + select(0u, STAGING_SLOTS, is_value);
        staging[token * TOKEN_WORDS + in_token] = bits;
    } else {
        let token = write.slot + select(0u, RING_SLOTS, is_value);
        ring[token * TOKEN_WORDS + in_token] = bits;
    }
}
