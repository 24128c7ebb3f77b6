// Products for software adapters whose subgroups have 8 invocations. There a load of a word costs as much as
// dozens of sums: each invocation of a subgroup loads another four of a block's 32 inputs, and shuffles hand
// them round.

/// Invocations of a workgroup; the rows of one are so far apart.
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

/// The sums of four rows, of which invocation i of the subgroup holds columns 4 i … 4 i + 3 of the block's
/// input.
fn add(sums: vec4<f32>, w: Rows, x: vec4<f32>) -> vec4<f32> {
    var s = add_square(sums, w.p0.low, subgroupShuffle(x, 0u));
    s = add_square(s, w.p1.low, subgroupShuffle(x, 1u));
    s = add_square(s, w.p2.low, subgroupShuffle(x, 2u));
    s = add_square(s, w.p3.low, subgroupShuffle(x, 3u));
    s = add_square(s, w.p0.high, subgroupShuffle(x, 4u));
    s = add_square(s, w.p1.high, subgroupShuffle(x, 5u));
    s = add_square(s, w.p2.high, subgroupShuffle(x, 6u));
    return add_square(s, w.p3.high, subgroupShuffle(x, 7u));
}

/// The four rows from `row` on of a block, each the last one at most.
struct Rows { p0: Part, p1: Part, p2: Part, p3: Part }

fn rows_of(row: u32, block: u32) -> Rows {
    let a = block_of(min(row, ROWS - 1u), block);
    let b = block_of(min(row + APART, ROWS - 1u), block);
    let c = block_of(min(row + 2u * APART, ROWS - 1u), block);
    let d = block_of(min(row + 3u * APART, ROWS - 1u), block);
    return Rows(
        part(part_0(a), part_0(b), part_0(c), part_0(d)),
        part(part_1(a), part_1(b), part_1(c), part_1(d)),
        part(part_2(a), part_2(b), part_2(c), part_2(d)),
        part(part_3(a), part_3(b), part_3(c), part_3(d)),
    );
}

fn finish_rows(token: u32, row: u32, sums: vec4<f32>) {
    for (var i = 0u; i < 4u; i++) {
        if (row + i * APART < ROWS) {
            finish_row(token, row + i * APART, sums[i]);
        }
    }
}

