// output = silu(gate) * up (Shazeer, 2020).
//
// | binding | what |
// |---|---|
// | 0 | input, f32 [token][gate, up][COLUMNS] |
// | 1 | output, f32 [token][COLUMNS] |
// Grid: COLUMNS / 4 / 64, tokens.

@group(0) @binding(0) var<storage, read> input: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read_write> output: array<vec4<f32>>;

@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    if (id.x < COLUMNS / 4u) {
        let at = id.y * (COLUMNS / 2u) + id.x;
        // exp(88) is the last power that f32 holds.
        let gate = max(input[at], vec4<f32>(-88.0));
        output[id.y * (COLUMNS / 4u) + id.x] = gate / (1.0 + exp(-gate)) * input[at + COLUMNS / 4u];
    }
}
