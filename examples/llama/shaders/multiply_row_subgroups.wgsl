// output[token][row] = Σ weights[row][column] * input[token][column], for few tokens, by subgroups.wgsl: an
// invocation owns 4 rows. Grid: ROWS / 64, tokens.

@compute @workgroup_size(16)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
    @builtin(subgroup_invocation_id) lane: u32,
) {
    let row = group.x * 4u * APART + local;
    var sums = vec4<f32>();
    for (var block = 0u; block < COLUMNS / 32u; block++) {
        sums = add(sums, rows_of(row, block), input[group.y * (COLUMNS / 4u) + block * 8u + lane]);
    }
    finish_rows(group.y, row, sums);
}
