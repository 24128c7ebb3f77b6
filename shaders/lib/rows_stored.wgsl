// Elements that rotate_rows.wgsl has rotated and stored, for pack.wgsl: f32 bits, [block of the
// pass][token][head][channel].
//
// Constants: GROUP, HEAD_DIM, KV_HEADS.

@group(0) @binding(2) var<storage, read> rotated: array<u32>;

// What `row_bits` needs to know of a block: the number of its first row.
fn first_row(item: u32) -> u32 {
    return item * GROUP;
}

// f32 bits of `channel` of a block's token `token`.
fn row_bits(first: u32, head: u32, token: u32, channel: u32) -> u32 {
    return rotated[((first + token) * KV_HEADS + head) * HEAD_DIM + channel];
}

fn load_rows(first: u32, head: u32, begin: u32, local: u32) {
}
