// A bias is added.
@group(0) @binding(4) var<storage, read> bias: array<f32>;

fn finish(at: u32, row: u32, sum: f32) {
    output[at] = sum + bias[row];
}
