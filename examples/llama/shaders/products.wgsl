// What the matrix products share: the input, the output, and in which order the columns of a block of 32
// come: in four parts, of which part p has columns 4 p … 4 p + 3 and 16 + 4 p … 16 + 4 p + 3.
//
// | binding | what |
// |---|---|
// | 0 | input, f32 [token][COLUMNS] |
// | 1 | output, f32 [token][ALL_ROWS] |
// | 2 | weights (weights_*.wgsl) |
// | 3 | scales (weights_four.wgsl) |
// | 4 | bias (finish_bias.wgsl) |

@group(0) @binding(0) var<storage, read> input: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read_write> output: array<f32>;

/// Of eight columns and the inputs from `at` on.
fn product(w: Eight, at: u32) -> f32 {
    return dot(w.low, input[at]) + dot(w.high, input[at + 4u]);
}

/// Rows are counted within a part of the matrix; the part's first row is FIRST_ROW of ALL_ROWS.
fn finish_row(token: u32, row: u32, sum: f32) {
    finish(token * ALL_ROWS + FIRST_ROW + row, FIRST_ROW + row, sum);
}
