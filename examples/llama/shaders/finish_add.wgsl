// A product is added to the residual stream.
fn finish(at: u32, row: u32, sum: f32) {
    output[at] += sum;
}
