// output[token][row] = Σ weights[row][column] * input[token][column], for many tokens, by subgroups.wgsl: an
// invocation owns 8 rows and 8 tokens. Grid: ROWS / 128, tokens / 8. Buffers have room for whole tiles of
// tokens.

/// Inputs of a token, in vec4.
const TOKEN = COLUMNS / 4u;

/// Eight rows.
struct Sums { a: vec4<f32>, b: vec4<f32> }

fn finish_eight(token: u32, row: u32, sums: Sums) {
    finish_rows(token, row, sums.a);
    finish_rows(token, row + 4u * APART, sums.b);
}

@compute @workgroup_size(16)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
    @builtin(subgroup_invocation_id) lane: u32,
) {
    let row = group.x * 8u * APART + local;
    let token = group.y * 8u;
    var s0 = Sums();
    var s1 = Sums();
    var s2 = Sums();
    var s3 = Sums();
    var s4 = Sums();
    var s5 = Sums();
    var s6 = Sums();
    var s7 = Sums();
    for (var block = 0u; block < COLUMNS / 32u; block++) {
        let a = rows_of(row, block);
        let b = rows_of(row + 4u * APART, block);
        let at = token * TOKEN + block * 8u + lane;
        let x0 = input[at + 0u * TOKEN];
        s0 = Sums(add(s0.a, a, x0), add(s0.b, b, x0));
        let x1 = input[at + 1u * TOKEN];
        s1 = Sums(add(s1.a, a, x1), add(s1.b, b, x1));
        let x2 = input[at + 2u * TOKEN];
        s2 = Sums(add(s2.a, a, x2), add(s2.b, b, x2));
        let x3 = input[at + 3u * TOKEN];
        s3 = Sums(add(s3.a, a, x3), add(s3.b, b, x3));
        let x4 = input[at + 4u * TOKEN];
        s4 = Sums(add(s4.a, a, x4), add(s4.b, b, x4));
        let x5 = input[at + 5u * TOKEN];
        s5 = Sums(add(s5.a, a, x5), add(s5.b, b, x5));
        let x6 = input[at + 6u * TOKEN];
        s6 = Sums(add(s6.a, a, x6), add(s6.b, b, x6));
        let x7 = input[at + 7u * TOKEN];
        s7 = Sums(add(s7.a, a, x7), add(s7.b, b, x7));
    }
    finish_eight(token + 0u, row, s0);
    finish_eight(token + 1u, row, s1);
    finish_eight(token + 2u, row, s2);
    finish_eight(token + 3u, row, s3);
    finish_eight(token + 4u, row, s4);
    finish_eight(token + 5u, row, s5);
    finish_eight(token + 6u, row, s6);
    finish_eight(token + 7u, row, s7);
}
