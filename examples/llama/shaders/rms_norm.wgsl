// output[i] = input[rows[i]] / rms(input[rows[i]]) * scale (Zhang and Sennrich, 2019).
//
// | binding | what |
// |---|---|
// | 0 | scale, f32 [COLUMNS] |
// | 1 | input, f32 [row][COLUMNS] |
// | 2 | output, f32 [i][COLUMNS] |
// | 3 | rows, u32: which rows to take |
// Grid: number of outputs.

@group(0) @binding(0) var<storage, read> scale: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read> input: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> output: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> rows: array<u32>;

var<workgroup> sh_squares: array<f32, 64>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let first = rows[group.x] * (COLUMNS / 4u);
    var squares = 0.0;
    for (var i = local; i < COLUMNS / 4u; i += 64u) {
        let x = input[first + i];
        squares += dot(x, x);
    }
    sh_squares[local] = squares;
    workgroupBarrier();
    for (var half = 32u; half > 0u; half /= 2u) {
        if (local < half) {
            sh_squares[local] += sh_squares[local + half];
        }
        workgroupBarrier();
    }
    let factor = inverseSqrt(sh_squares[0] / f32(COLUMNS) + EPSILON);
    for (var i = local; i < COLUMNS / 4u; i += 64u) {
        output[group.x * (COLUMNS / 4u) + i] = input[first + i] * factor * scale[i];
    }
}
