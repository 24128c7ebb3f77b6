// Keys or values that are about to be packed, rotated and stored for pack.wgsl. Twin:
// src/format/rotation.rs.
//
// | binding | what | access |
// |---|---|---|
// | 0, 1 of group 0 | params, plan: (first slot, block) per block, slot lists | read |
// | 2, 3 | unpacked tokens | read |
// | 4 | rotated rows: f32, [block of the pass][token][head][channel] | write |
//
// Grid: x, z tokens of the blocks; y KV heads.
//
// Constants: F32, GROUP, HEAD_DIM, KV_HEADS, ROTATED_TENSOR, ROTATION_SCALE.
// Records: PackBlock.

@group(0) @binding(4) var<storage, read_write> rotated: array<u32>;

const ROTATED_ROWS: u32 = 1u;
const ROTATION_WORKGROUP: u32 = 64u;

@compute @workgroup_size(ROTATION_WORKGROUP)
fn rotate_rows(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let item = work_item(workgroup);
    if (item >= params.count) {
        return;
    }
    let head = workgroup.y;
    let block = pack_block_at(params.first + PACK_BLOCK_WORDS * (item / GROUP));
    let slot = plan[params.slots + block.first_slot + item % GROUP];
    for (var channel = local; channel < HEAD_DIM; channel += ROTATION_WORKGROUP) {
        sh_rows[channel] = rotatable(token_bits(slot, ROTATED_TENSOR, head, channel));
    }
    butterflies(ROTATION_SCALE, local);
    let first = (item * KV_HEADS + head) * HEAD_DIM;
    for (var channel = local; channel < HEAD_DIM; channel += ROTATION_WORKGROUP) {
        rotated[first + channel] = enter(F32, sh_rows[channel]);
    }
}
