// Rotation of rows in workgroup memory, bit for bit: see src/format/rotation.rs, its twin. The pass file says
// how many rows there are (ROTATED_ROWS) and with how many invocations (ROTATION_WORKGROUP).
//
// Constants: HEAD_DIM, ROTATION_SIZE.

// f32 bits, [row][channel].
var<workgroup> sh_rows: array<u32, ROTATED_ROWS * HEAD_DIM>;

// Below 2^-97, zero: no sum of what is left is subnormal, which some GPUs flush.
fn rotatable(bits: u32) -> u32 {
    return select(bits, 0u, (bits & 0x7fffffffu) < 0x0f000000u);
}

// Adds and subtracts pairs at distances 1, 2, 4 …, each step through workgroup memory so that no compiler
// reorders the sums; then multiplies by a power of two. Begins and ends with a barrier.
fn butterflies(scale: f32, local: u32) {
    for (var stride = 1u; stride < ROTATION_SIZE; stride *= 2u) {
        workgroupBarrier();
        for (var i = local; i < ROTATED_ROWS * HEAD_DIM / 2u; i += ROTATION_WORKGROUP) {
            // The pairs are numbered by their first element's index without the bit of the stride.
            let low = i % stride;
            let a = 2u * (i - low) + low;
            let x = bitcast<f32>(sh_rows[a]);
            let y = bitcast<f32>(sh_rows[a + stride]);
            sh_rows[a] = bitcast<u32>(x + y);
            sh_rows[a + stride] = bitcast<u32>(x - y);
        }
    }
    workgroupBarrier();
    for (var i = local; i < ROTATED_ROWS * HEAD_DIM; i += ROTATION_WORKGROUP) {
        sh_rows[i] = bitcast<u32>(bitcast<f32>(sh_rows[i]) * scale);
    }
    workgroupBarrier();
}
