// Queries of a layer whose keys are rotated, rotated likewise but for the scale, so that products are those
// of unrotated rows; and beside them as they are, for unpacked tokens. Twin: src/oracle/attend_packed.rs,
// which rotates the keys back.
//
// | binding | what | access |
// |---|---|---|
// | 0, 1 of group 0 | params, plan | read |
// | 2 | queries: f32, [query][query head][rotated, then not][channel] | write |
// | 0, 1 of group 1 | io, host's queries | read |
//
// Grid: x, z queries and the query heads of a KV head; y KV heads.
//
// Constants: HEADS_PER_KV, HEAD_DIM, KV_HEADS, UNROTATION_SCALE.

@group(0) @binding(2) var<storage, read_write> rotated: array<u32>;
@group(1) @binding(0) var<storage, read> io: Io;
@group(1) @binding(1) var<storage, read> host_queries: array<u32>;

const ROTATED_ROWS: u32 = 1u;
const ROTATION_WORKGROUP: u32 = 64u;

// Per invocation: whether a channel that it has loaded is no number.
var<workgroup> sh_bad: array<u32, ROTATION_WORKGROUP>;

@compute @workgroup_size(ROTATION_WORKGROUP)
fn rotate_queries(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let item = work_item(workgroup);
    if (item >= params.count) {
        return;
    }
    let query = item / HEADS_PER_KV;
    let head = workgroup.y * HEADS_PER_KV + item % HEADS_PER_KV;
    let at = io.q.offset + query * io.q.token_stride + head * io.q.head_stride;
    let first = 2u * (query * KV_HEADS * HEADS_PER_KV + head) * HEAD_DIM;
    var bad = 0u;
    for (var channel = local; channel < HEAD_DIM; channel += ROTATION_WORKGROUP) {
        let word = host_queries[element_word(io.q.dtype, at + channel)];
        let bits = finite_or_nan(element_bits(io.q.dtype, word, at + channel));
        bad |= select(0u, 1u, bits == QUIET_NAN);
        sh_rows[channel] = bits;
        rotated[first + HEAD_DIM + channel] = bits;
    }
    sh_bad[local] = bad;
    butterflies(UNROTATION_SCALE, local);
    // A part of a row that is no number is the whole row, by integers: sums of NaN are not dependable under
    // fast math.
    for (var i = 0u; i < ROTATION_WORKGROUP; i++) {
        bad |= sh_bad[i];
    }
    for (var channel = local; channel < HEAD_DIM; channel += ROTATION_WORKGROUP) {
        rotated[first + channel] = select(sh_rows[channel], QUIET_NAN, bad != 0u);
    }
}
