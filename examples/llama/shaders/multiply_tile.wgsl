// output[token][row] = Σ weights[row][column] * input[token][column], for many tokens: an invocation owns a
// row and 16 tokens, so each weight is unpacked once for 16 products. Inputs are the same for a whole
// workgroup: they go through scalar loads or a broadcast. Grid: ROWS / 64, tokens / 16. Buffers have room for
// whole tiles of tokens.

/// Inputs of a token, in vec4.
const TOKEN = COLUMNS / 4u;

fn products(w: Eight, at: u32) -> vec4<f32> {
    return vec4<f32>(
        product(w, at),
        product(w, at + TOKEN),
        product(w, at + 2u * TOKEN),
        product(w, at + 3u * TOKEN),
    );
}

struct Sums { a: vec4<f32>, b: vec4<f32>, c: vec4<f32>, d: vec4<f32> }

fn add(sums: Sums, w: Eight, at: u32) -> Sums {
    return Sums(
        sums.a + products(w, at),
        sums.b + products(w, at + 4u * TOKEN),
        sums.c + products(w, at + 8u * TOKEN),
        sums.d + products(w, at + 12u * TOKEN),
    );
}

fn finish_four(token: u32, row: u32, sums: vec4<f32>) {
    finish_row(token, row, sums.x);
    finish_row(token + 1u, row, sums.y);
    finish_row(token + 2u, row, sums.z);
    finish_row(token + 3u, row, sums.w);
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let row = min(group.x * 64u + local, ROWS - 1u);
    var sums = Sums();
    for (var block = 0u; block < COLUMNS / 32u; block++) {
        let w = block_of(row, block);
        let at = group.y * 16u * TOKEN + block * 8u;
        sums = add(sums, part_0(w), at);
        sums = add(sums, part_1(w), at + 1u);
        sums = add(sums, part_2(w), at + 2u);
        sums = add(sums, part_3(w), at + 3u);
    }
    if (group.x * 64u + local < ROWS) {
        let token = group.y * 16u;
        finish_four(token, row, sums.a);
        finish_four(token + 4u, row, sums.b);
        finish_four(token + 8u, row, sums.c);
        finish_four(token + 12u, row, sums.d);
    }
}
