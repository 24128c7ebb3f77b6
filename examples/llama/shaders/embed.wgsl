// output[token] = the embedding of tokens[token].
//
// | binding | what |
// |---|---|
// | 0 | tokens, u32 |
// | 1 | output, f32 [token][COLUMNS] |
// | 2, 3 | embeddings (weights_*.wgsl), a row per token of the vocabulary, from FIRST_ROW on |
// Grid: COLUMNS / 32 / 16, tokens.

@group(0) @binding(0) var<storage, read> tokens: array<u32>;
@group(0) @binding(1) var<storage, read_write> output: array<vec4<f32>>;

fn store(at: u32, w: Eight) {
    output[at] = w.low;
    output[at + 4u] = w.high;
}

@compute @workgroup_size(16)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    // Of this part of the matrix, or a number beyond it.
    let row = tokens[id.y] - FIRST_ROW;
    if (id.x >= COLUMNS / 32u || row >= ROWS) {
        return;
    }
    let w = block_of(row, id.x);
    let at = id.y * (COLUMNS / 4u) + id.x * 8u;
    store(at, part_0(w));
    store(at + 1u, part_1(w));
    store(at + 2u, part_2(w));
    store(at + 3u, part_3(w));
}
