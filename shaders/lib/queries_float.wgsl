// Queries as they are, for lib/decode.wgsl.
//
// Records: Split.

fn prepare_queries(split: Split, head: u32, quad: u32, slice: u32, row: u32, local: u32) -> vec4<f32> {
    return vec4<f32>();
}
