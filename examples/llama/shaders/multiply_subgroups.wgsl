// output[token][row] = Σ weights[row][column] * input[token][column], for software adapters whose subgroups have 8 invocations. There a load costs as much as
// dozens of sums: an invocation owns OWN rows and TOKENS tokens, each invocation of a subgroup loads another four of a block's 32 inputs, and shuffles hand them
// round.
// Grid: ROWS / 64, tokens / TOKENS. Buffers have room for whole tiles of tokens.

/// Rows that an invocation owns, and how far apart they are.
const OWN = 4u;
const APART = 16u;

/// Four rows of four columns.
struct Square { x: vec4<f32>, y: vec4<f32>, z: vec4<f32>, w: vec4<f32> }
/// Four rows of a part: columns 4 p … 4 p + 3, and those 16 further on.
struct Part { low: Square, high: Square }

fn square(a: vec4<f32>, b: vec4<f32>, c: vec4<f32>, d: vec4<f32>) -> Square {
    return Square(
        vec4<f32>(a.x, b.x, c.x, d.x),
        vec4<f32>(a.y, b.y, c.y, d.y),
        vec4<f32>(a.z, b.z, c.z, d.z),
        vec4<f32>(a.w, b.w, c.w, d.w),
    );
}

fn part(a: Eight, b: Eight, c: Eight, d: Eight) -> Part {
    return Part(square(a.low, b.low, c.low, d.low), square(a.high, b.high, c.high, d.high));
}

fn add_square(sums: vec4<f32>, w: Square, x: vec4<f32>) -> vec4<f32> {
    return sums + w.x * x.x + w.y * x.y + w.z * x.z + w.w * x.w;
}

/// The sums of four rows, of which invocation i of the subgroup holds columns 4 i … 4 i + 3 of the block's input.
fn add(sums: vec4<f32>, p0: Part, p1: Part, p2: Part, p3: Part, x: vec4<f32>) -> vec4<f32> {
    var s = add_square(sums, p0.low, subgroupShuffle(x, 0u));
    s = add_square(s, p1.low, subgroupShuffle(x, 1u));
    s = add_square(s, p2.low, subgroupShuffle(x, 2u));
    s = add_square(s, p3.low, subgroupShuffle(x, 3u));
    s = add_square(s, p0.high, subgroupShuffle(x, 4u));
    s = add_square(s, p1.high, subgroupShuffle(x, 5u));
    s = add_square(s, p2.high, subgroupShuffle(x, 6u));
    return add_square(s, p3.high, subgroupShuffle(x, 7u));
}

fn finish_rows(token: u32, row: u32, sums: vec4<f32>) {
    for (var i = 0u; i < OWN; i++) {
        if (row + i * APART < ROWS) {
            finish(token * ROWS + row + i * APART, row + i * APART, sums[i]);
        }
    }
}

@compute @workgroup_size(16)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
    @builtin(subgroup_invocation_id) lane: u32,
) {
    let row = group.x * OWN * APART + local;
    let token = group.y * TOKENS;
    var s0 = vec4<f32>();
    var s1 = vec4<f32>();
    var s2 = vec4<f32>();
    var s3 = vec4<f32>();
    var s4 = vec4<f32>();
    var s5 = vec4<f32>();
    var s6 = vec4<f32>();
    var s7 = vec4<f32>();
    for (var block = 0u; block < COLUMNS / 32u; block++) {
        let a = block_of(min(row, ROWS - 1u), block);
        let b = block_of(min(row + APART, ROWS - 1u), block);
        let c = block_of(min(row + 2u * APART, ROWS - 1u), block);
        let d = block_of(min(row + 3u * APART, ROWS - 1u), block);
        let p0 = part(part_0(a), part_0(b), part_0(c), part_0(d));
        let p1 = part(part_1(a), part_1(b), part_1(c), part_1(d));
        let p2 = part(part_2(a), part_2(b), part_2(c), part_2(d));
        let p3 = part(part_3(a), part_3(b), part_3(c), part_3(d));
        let at = token * (COLUMNS / 4u) + block * 8u + lane;
        s0 = add(s0, p0, p1, p2, p3, input[at]);
        if (TOKENS > 1u) {
            s1 = add(s1, p0, p1, p2, p3, input[at + COLUMNS / 4u]);
            s2 = add(s2, p0, p1, p2, p3, input[at + 2u * (COLUMNS / 4u)]);
            s3 = add(s3, p0, p1, p2, p3, input[at + 3u * (COLUMNS / 4u)]);
            s4 = add(s4, p0, p1, p2, p3, input[at + 4u * (COLUMNS / 4u)]);
            s5 = add(s5, p0, p1, p2, p3, input[at + 5u * (COLUMNS / 4u)]);
            s6 = add(s6, p0, p1, p2, p3, input[at + 6u * (COLUMNS / 4u)]);
            s7 = add(s7, p0, p1, p2, p3, input[at + 7u * (COLUMNS / 4u)]);
        }
    }
    finish_rows(token, row, s0);
    if (TOKENS > 1u) {
        finish_rows(token + 1u, row, s1);
        finish_rows(token + 2u, row, s2);
        finish_rows(token + 3u, row, s3);
        finish_rows(token + 4u, row, s4);
        finish_rows(token + 5u, row, s5);
        finish_rows(token + 6u, row, s6);
        finish_rows(token + 7u, row, s7);
    }
}
