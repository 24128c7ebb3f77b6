// Packed blocks are copied to a page of another slab. Twin: src/oracle/copy_blocks.rs.
//
// | binding | what | access |
// |---|---|---|
// | 0, 1 of group 0 | params, plan: (from block, to block) per copy | read |
// | 2 | slab that is read | read |
// | 3 | slab that is written | write |
//
// Grid: x, z blocks; y COPY_WORDS words of the block.
//
// Constants: BLOCK_WORDS, COPY_WORDS.
// Records: BlockCopy.

@group(0) @binding(2) var<storage, read> source: array<u32>;
@group(0) @binding(3) var<storage, read_write> slab: array<u32>;

@compute @workgroup_size(256)
fn copy_blocks_across(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let item = work_item(workgroup);
    if (item >= params.count) {
        return;
    }
    let copy = block_copy_at(params.first + BLOCK_COPY_WORDS * item);
    let source_word = copy.source * BLOCK_WORDS;
    let target_word = copy.destination * BLOCK_WORDS;
    let end = min((workgroup.y + 1u) * COPY_WORDS, BLOCK_WORDS);
    for (var word = workgroup.y * COPY_WORDS + local; word < end; word += 256u) {
        slab[target_word + word] = source[source_word + word];
    }
}
