// A product is the result.
fn finish(at: u32, row: u32, sum: f32) {
    output[at] = sum;
}
