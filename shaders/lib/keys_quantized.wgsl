// Parameters of a packed page whose keys are codes. Scale and minimum are folded out of the inner loop:
//   q . k_t = sum_d (q_d s_d) c_td + sum_d q_d m_d
// The first sum is `add_logits` of lib/keys_float.wgsl or lib/keys_dot.wgsl, the second is here.
//
// Constants: GROUP, HEAD_DIM, KEY_CODES_PER_WORD, KEY_COMPACT, KEY_LOW_WORDS, KEY_PARAMS, KEY_PARTS,
// KEY_ROWS, KEY_SLICES, QUERY_VECS.
// Records: Split.

// Invocations of a row group that share a block, and so its bias: those of its tokens, in all slices.
const BLOCK_LANES: u32 = GROUP / 4u * KEY_SLICES;
// Those of them that have words to add to the bias.
const BIAS_PARTS: u32 = min(BLOCK_LANES, KEY_LOW_WORDS);

fn lane_of(quad: u32, slice: u32) -> u32 {
    return quad % (GROUP / 4u) + slice * (GROUP / 4u);
}

// The invocation that is lane `lane` of the same block and row group as invocation `local` of slice 0.
fn block_lane(local: u32, lane: u32) -> u32 {
    let first = local - local % (GROUP / 4u);
    return first + lane % (GROUP / 4u) + lane / (GROUP / 4u) * QUADS;
}

// Running dot products of up to four rows' queries with one vector.
struct Dots {
    r0: vec4<f32>,
    r1: vec4<f32>,
    r2: vec4<f32>,
    r3: vec4<f32>,
}

// Adds vector `v` of the queries of the rows from `row` on.
fn add_dots(sum: ptr<function, Dots>, row: u32, v: u32, k: vec4<f32>) {
    (*sum).r0 = fma(sh[row * QUERY_VECS + v], k, (*sum).r0);
    if (KEY_ROWS > 1u) {
        (*sum).r1 = fma(sh[(row + 1u) * QUERY_VECS + v], k, (*sum).r1);
    }
    if (KEY_ROWS > 2u) {
        (*sum).r2 = fma(sh[(row + 2u) * QUERY_VECS + v], k, (*sum).r2);
        (*sum).r3 = fma(sh[(row + 3u) * QUERY_VECS + v], k, (*sum).r3);
    }
}

fn finish_dots(s: Dots) -> vec4<f32> {
    let low = vec4<f32>(s.r0.x, s.r1.x, s.r2.x, s.r3.x) + vec4<f32>(s.r0.y, s.r1.y, s.r2.y, s.r3.y);
    let high = vec4<f32>(s.r0.z, s.r1.z, s.r2.z, s.r3.z) + vec4<f32>(s.r0.w, s.r1.w, s.r2.w, s.r3.w);
    return low + high;
}

// Four key parameters from channel 4 * `v` on. The last word of a row may reach past the channels: its codes
// are zero, but what lies behind the parameters could decode to NaN.
fn key_params(first: u32, v: u32) -> vec4<u32> {
    return four_params((first + KEY_PARAMS) / 4u, min(v, HEAD_DIM / 4u - 1u), KEY_COMPACT);
}

// The channel whose code is byte `i` of part `v % KEY_PARTS` of word `v / KEY_PARTS` of the low plane.
fn query_channel(v: u32, i: u32) -> u32 {
    return (v / KEY_PARTS) * KEY_CODES_PER_WORD + v % KEY_PARTS + KEY_PARTS * i;
}

fn word_scales(first: u32, word: u32) -> Parts {
    let v = word * KEY_PARTS;
    let n0 = scales(key_params(first, v), KEY_COMPACT);
    var n1 = vec4<f32>();
    var n2 = vec4<f32>();
    var n3 = vec4<f32>();
    if (KEY_PARTS > 1u) {
        n1 = scales(key_params(first, v + 1u), KEY_COMPACT);
    }
    if (KEY_PARTS > 2u) {
        n2 = scales(key_params(first, v + 2u), KEY_COMPACT);
        n3 = scales(key_params(first, v + 3u), KEY_COMPACT);
    }
    return permute(n0, n1, n2, n3);
}

fn word_minima(first: u32, word: u32) -> Parts {
    let v = word * KEY_PARTS;
    let n0 = minima(key_params(first, v), KEY_COMPACT);
    var n1 = vec4<f32>();
    var n2 = vec4<f32>();
    var n3 = vec4<f32>();
    if (KEY_PARTS > 1u) {
        n1 = minima(key_params(first, v + 1u), KEY_COMPACT);
    }
    if (KEY_PARTS > 2u) {
        n2 = minima(key_params(first, v + 2u), KEY_COMPACT);
        n3 = minima(key_params(first, v + 3u), KEY_COMPACT);
    }
    return permute(n0, n1, n2, n3);
}

// This invocation's share of sum_d q_d m_d of its block: the words that fall to it.
fn bias_part(split: Split, head: u32, quad: u32, slice: u32, row: u32) -> vec4<f32> {
    var part = Dots();
    if (4u * quad < split.tokens) {
        let first = head_words(split, head, 4u * quad);
        for (var word = lane_of(quad, slice); word < KEY_LOW_WORDS; word += BLOCK_LANES) {
            let m = word_minima(first, word);
            let v = word * KEY_PARTS;
            add_dots(&part, row, v, m.p0);
            if (KEY_PARTS > 1u) {
                add_dots(&part, row, v + 1u, m.p1);
            }
            if (KEY_PARTS > 2u) {
                add_dots(&part, row, v + 2u, m.p2);
                add_dots(&part, row, v + 3u, m.p3);
            }
        }
    }
    return finish_dots(part);
}
