// Weights in f16: a block of 32 columns is four vec4, one per part. All rows of a part lie side by side, so
// that neighbouring invocations, which own neighbouring rows, read neighbouring words.

@group(0) @binding(2) var<storage, read> halves: array<vec4<u32>>;

struct Eight { low: vec4<f32>, high: vec4<f32> }
struct Block { a: vec4<u32>, b: vec4<u32>, c: vec4<u32>, d: vec4<u32> }

fn block_of(row: u32, block: u32) -> Block {
    let at = block * 4u * ROWS + row;
    return Block(halves[at], halves[at + ROWS], halves[at + 2u * ROWS], halves[at + 3u * ROWS]);
}

fn part_of(words: vec4<u32>) -> Eight {
    return Eight(
        vec4<f32>(unpack2x16float(words.x), unpack2x16float(words.y)),
        vec4<f32>(unpack2x16float(words.z), unpack2x16float(words.w)),
    );
}

fn part_0(b: Block) -> Eight { return part_of(b.a); }
fn part_1(b: Block) -> Eight { return part_of(b.b); }
fn part_2(b: Block) -> Eight { return part_of(b.c); }
fn part_3(b: Block) -> Eight { return part_of(b.d); }
