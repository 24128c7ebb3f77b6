// output[token][row] = Σ weights[row][column] * input[token][column], for few tokens: the columns are divided
// among SLICES invocations. Grid: ROWS / 32, tokens.

const SLICES = 8u;
var<workgroup> sh_sums: array<f32, 256>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let lane = local % 32u;
    let row = group.x * 32u + lane;
    var sum = 0.0;
    if (row < ROWS) {
        for (var block = local / 32u; block < COLUMNS / 32u; block += SLICES) {
            let w = block_of(row, block);
            let at = (group.y * COLUMNS + block * 32u) / 4u;
            sum += product(part_0(w), at) + product(part_1(w), at + 1u);
            sum += product(part_2(w), at + 2u) + product(part_3(w), at + 3u);
        }
    }
    sh_sums[local] = sum;
    workgroupBarrier();
    if (local < 32u && row < ROWS) {
        for (var slice = 1u; slice < SLICES; slice++) {
            sum += sh_sums[slice * 32u + lane];
        }
        finish_row(group.y, row, sum);
    }
}
