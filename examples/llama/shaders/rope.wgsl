// Turns pairs of channels of queries and keys by an angle that grows with the position (Su et al., 2021), in
// place. Sines and cosines come from a table: a GPU's own are exact only near zero.
//
// | binding | what |
// |---|---|
// | 0 | table, f32 [position][HEAD_DIM / 2] of (cosine, sine) |
// | 1 | positions, u32 [token] |
// | 2 | qkv, f32 [token][query heads, KV heads, KV heads][HEAD_DIM] |
// Grid: HEADS * HEAD_DIM / 2 / 64, tokens; HEADS counts heads of queries and keys.

@group(0) @binding(0) var<storage, read> table: array<vec2<f32>>;
@group(0) @binding(1) var<storage, read> positions: array<u32>;
@group(0) @binding(2) var<storage, read_write> qkv: array<f32>;

@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    let head = id.x / (HEAD_DIM / 2u);
    let pair = id.x % (HEAD_DIM / 2u);
    if (head >= HEADS) {
        return;
    }
    let turn = table[positions[id.y] * (HEAD_DIM / 2u) + pair];
    let first = id.y * QKV_STRIDE + head * HEAD_DIM;
    let a = first + PAIR_STRIDE * pair;
    let b = a + PAIR_DISTANCE;
    let x = qkv[a];
    let y = qkv[b];
    qkv[a] = x * turn.x - y * turn.y;
    qkv[b] = x * turn.y + y * turn.x;
}
