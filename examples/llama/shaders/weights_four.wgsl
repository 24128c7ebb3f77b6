// Weights in 4 bits: a block of 32 columns is a vec4 of codes, and scale and minimum in f16. All rows of a
// block lie side by side, so that neighbouring invocations, which own neighbouring rows, read neighbouring
// words.

@group(0) @binding(2) var<storage, read> codes: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> scales: array<u32>;

struct Eight { low: vec4<f32>, high: vec4<f32> }
struct Block { codes: vec4<u32>, scale: vec2<f32> }

fn block_of(row: u32, block: u32) -> Block {
    let at = block * ROWS + row;
    return Block(codes[at], unpack2x16float(scales[at]));
}

fn part_of(word: u32, scale: vec2<f32>) -> Eight {
    let low = vec4<f32>(unpack4xU8(word & 0x0f0f0f0fu));
    let high = vec4<f32>(unpack4xU8((word >> 4u) & 0x0f0f0f0fu));
    return Eight(low * scale.x + scale.y, high * scale.x + scale.y);
}

fn part_0(b: Block) -> Eight { return part_of(b.codes.x, b.scale); }
fn part_1(b: Block) -> Eight { return part_of(b.codes.y, b.scale); }
fn part_2(b: Block) -> Eight { return part_of(b.codes.z, b.scale); }
fn part_3(b: Block) -> Eight { return part_of(b.codes.w, b.scale); }
