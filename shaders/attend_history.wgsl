// Decode attention over one packed page: dequantizes on the fly, writes a partial result per row. Twin: src/oracle/attend_history.rs.
//
// | binding | what | access |
// |---|---|---|
// | 0, 1 of group 0 | params, plan: splits, tiles | read |
// | 2, 3 | slab, as vec4 and as words | read |
// | 4 | partial results | write |
// | 0, 1 of group 1 | io, host's queries | read |
//
// Grid: x, z splits; y KV heads.
//
// Scale and minimum are folded out of the inner loops:
//   q . k_t = sum_d (q_d s_d) c_td + sum_d q_d m_d        sum_t p_t v_t = sum_t (p_t s_t) c_t + sum_t p_t m_t

@group(0) @binding(2) var<storage, read> slab4: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> slab: array<u32>;

// Invocations of a row group that share a block, and so its bias.
const BIAS_LANES: u32 = GROUP / 4u;

// Codes j, j + P, j + 2P, j + 3P of a word, with P = 8 / bits: shifting by j codes brings them to the bottom of its four bytes.
fn key_codes(word: u32) -> vec4<f32> {
    return vec4<f32>(unpack4xU8(word & KEY_BYTE_MASK));
}

fn value_codes(word: u32) -> vec4<f32> {
    return vec4<f32>(unpack4xU8(word & VALUE_BYTE_MASK));
}

// The channel whose code is byte `i` of part `v % KEY_PARTS` of row word `v / KEY_PARTS`.
fn query_channel(v: u32, i: u32) -> u32 {
    return (v / KEY_PARTS) * KEY_CODES_PER_WORD + v % KEY_PARTS + KEY_PARTS * i;
}

// First word of `head` in the block that holds `token`.
fn head_words(split: Split, head: u32, token: u32) -> u32 {
    return (split.source * BLOCKS_PER_PAGE + token / GROUP) * BLOCK_WORDS + head * HEAD_WORDS;
}

// Four key parameters from channel 4 * `v` on. The last word of a row may reach past the channels: its codes are zero, but what lies
// behind the parameters could decode to NaN.
fn key_params(first: u32, v: u32) -> vec4<u32> {
    return slab4[(first + KEY_PARAMS) / 4u + min(v, HEAD_DIM / 4u - 1u)];
}

fn scales(p: vec4<u32>) -> vec4<f32> {
    return vec4<f32>(
        unpack2x16float(p.x).x,
        unpack2x16float(p.y).x,
        unpack2x16float(p.z).x,
        unpack2x16float(p.w).x,
    );
}

fn minima(p: vec4<u32>) -> vec4<f32> {
    return vec4<f32>(
        unpack2x16float(p.x).y,
        unpack2x16float(p.y).y,
        unpack2x16float(p.z).y,
        unpack2x16float(p.w).y,
    );
}

// The row word's parameters in the order of `query_channel`: one vector per part.
struct Parts {
    p0: vec4<f32>,
    p1: vec4<f32>,
    p2: vec4<f32>,
    p3: vec4<f32>,
}

fn permute(n0: vec4<f32>, n1: vec4<f32>, n2: vec4<f32>, n3: vec4<f32>) -> Parts {
    if (KEY_BITS == 2u) {
        return Parts(
            vec4<f32>(n0.x, n1.x, n2.x, n3.x),
            vec4<f32>(n0.y, n1.y, n2.y, n3.y),
            vec4<f32>(n0.z, n1.z, n2.z, n3.z),
            vec4<f32>(n0.w, n1.w, n2.w, n3.w),
        );
    }
    if (KEY_BITS == 4u) {
        return Parts(vec4<f32>(n0.xz, n1.xz), vec4<f32>(n0.yw, n1.yw), vec4<f32>(), vec4<f32>());
    }
    return Parts(n0, vec4<f32>(), vec4<f32>(), vec4<f32>());
}

fn word_scales(first: u32, word: u32) -> Parts {
    let v = word * KEY_PARTS;
    let n0 = scales(key_params(first, v));
    var n1 = vec4<f32>();
    var n2 = vec4<f32>();
    var n3 = vec4<f32>();
    if (KEY_PARTS > 1u) {
        n1 = scales(key_params(first, v + 1u));
    }
    if (KEY_PARTS > 2u) {
        n2 = scales(key_params(first, v + 2u));
        n3 = scales(key_params(first, v + 3u));
    }
    return permute(n0, n1, n2, n3);
}

fn word_minima(first: u32, word: u32) -> Parts {
    let v = word * KEY_PARTS;
    let n0 = minima(key_params(first, v));
    var n1 = vec4<f32>();
    var n2 = vec4<f32>();
    var n3 = vec4<f32>();
    if (KEY_PARTS > 1u) {
        n1 = minima(key_params(first, v + 1u));
    }
    if (KEY_PARTS > 2u) {
        n2 = minima(key_params(first, v + 2u));
        n3 = minima(key_params(first, v + 3u));
    }
    return permute(n0, n1, n2, n3);
}

// This invocation's share of sum_d q_d m_d of its block: the words that fall to it.
fn bias_part(split: Split, head: u32, quad: u32, row: u32) -> vec4<f32> {
    var part: Dots;
    if (4u * quad < split.tokens) {
        let first = head_words(split, head, 4u * quad);
        for (var word = quad % BIAS_LANES; word < KEY_ROW_WORDS; word += BIAS_LANES) {
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

// One row's products with four channels of four tokens (`t0` to `t3` hold a channel each).
fn add_products(sum: vec4<f32>, q: vec4<f32>, t0: vec4<f32>, t1: vec4<f32>, t2: vec4<f32>, t3: vec4<f32>) -> vec4<f32> {
    return fma(vec4<f32>(q.w), t3, fma(vec4<f32>(q.z), t2, fma(vec4<f32>(q.y), t1, fma(vec4<f32>(q.x), t0, sum))));
}

fn logit_part(logits: ptr<function, Logits>, words: vec4<u32>, scale: vec4<f32>, row: u32, v: u32) {
    let c0 = key_codes(words.x);
    let c1 = key_codes(words.y);
    let c2 = key_codes(words.z);
    let c3 = key_codes(words.w);
    let t0 = vec4<f32>(c0.x, c1.x, c2.x, c3.x);
    let t1 = vec4<f32>(c0.y, c1.y, c2.y, c3.y);
    let t2 = vec4<f32>(c0.z, c1.z, c2.z, c3.z);
    let t3 = vec4<f32>(c0.w, c1.w, c2.w, c3.w);
    (*logits).r0 = add_products((*logits).r0, sh[row * QUERY_VECS + v] * scale, t0, t1, t2, t3);
    if (KEY_ROWS > 1u) {
        (*logits).r1 = add_products((*logits).r1, sh[(row + 1u) * QUERY_VECS + v] * scale, t0, t1, t2, t3);
    }
    if (KEY_ROWS > 2u) {
        (*logits).r2 = add_products((*logits).r2, sh[(row + 2u) * QUERY_VECS + v] * scale, t0, t1, t2, t3);
        (*logits).r3 = add_products((*logits).r3, sh[(row + 3u) * QUERY_VECS + v] * scale, t0, t1, t2, t3);
    }
}

fn tile_logits(split: Split, head: u32, quad: u32, row: u32) -> Logits {
    var logits: Logits;
    let token = 4u * quad;
    if (token >= split.tokens) {
        return logits;
    }
    let first = head_words(split, head, token);
    let at = (first + token % GROUP) / 4u;
    for (var word = 0u; word < KEY_ROW_WORDS; word++) {
        let words = slab4[at + word * (GROUP / 4u)];
        let scale = word_scales(first, word);
        let v = word * KEY_PARTS;
        var part: Logits;
        logit_part(&part, words, scale.p0, row, v);
        if (KEY_PARTS > 1u) {
            logit_part(&part, words >> vec4<u32>(KEY_BITS), scale.p1, row, v + 1u);
        }
        if (KEY_PARTS > 2u) {
            logit_part(&part, words >> vec4<u32>(2u * KEY_BITS), scale.p2, row, v + 2u);
            logit_part(&part, words >> vec4<u32>(3u * KEY_BITS), scale.p3, row, v + 3u);
        }
        logits.r0 += part.r0;
        logits.r1 += part.r1;
        logits.r2 += part.r2;
        logits.r3 += part.r3;
    }
    return logits;
}

// 16 codes of one token, one vector per part as above.
fn chunk_codes(at: u32) -> Parts {
    let w0 = slab[at];
    if (VALUE_BITS == 2u) {
        return Parts(value_codes(w0), value_codes(w0 >> 2u), value_codes(w0 >> 4u), value_codes(w0 >> 6u));
    }
    let w1 = slab[at + 1u];
    if (VALUE_BITS == 4u) {
        return Parts(value_codes(w0), value_codes(w0 >> 4u), value_codes(w1), value_codes(w1 >> 4u));
    }
    return Parts(value_codes(w0), value_codes(w1), value_codes(slab[at + 2u]), value_codes(slab[at + 3u]));
}

// Adds one token with weights `p` of the two rows.
fn add_token(sums: ptr<function, Sums>, zero: ptr<function, vec2<f32>>, first: u32, token: u32, chunk: u32, p: vec2<f32>) {
    let group = min(16u * chunk / VALUE_GROUP, VALUE_GROUPS - 1u);
    let param = unpack2x16float(slab[first + VALUE_PARAMS + token * VALUE_GROUPS + group]);
    let codes = chunk_codes(first + VALUE_CODES + token * VALUE_ROW_WORDS + chunk * (VALUE_BITS / 2u));
    let scaled = p * param.x;
    *zero = fma(p, vec2<f32>(param.y), *zero);
    (*sums).weights += p;
    (*sums).a0 = fma(vec4<f32>(scaled.x), codes.p0, (*sums).a0);
    (*sums).a1 = fma(vec4<f32>(scaled.x), codes.p1, (*sums).a1);
    (*sums).a2 = fma(vec4<f32>(scaled.x), codes.p2, (*sums).a2);
    (*sums).a3 = fma(vec4<f32>(scaled.x), codes.p3, (*sums).a3);
    if (VALUE_ROWS > 1u) {
        (*sums).b0 = fma(vec4<f32>(scaled.y), codes.p0, (*sums).b0);
        (*sums).b1 = fma(vec4<f32>(scaled.y), codes.p1, (*sums).b1);
        (*sums).b2 = fma(vec4<f32>(scaled.y), codes.p2, (*sums).b2);
        (*sums).b3 = fma(vec4<f32>(scaled.y), codes.p3, (*sums).b3);
    }
}

// Back from the order of the parts to that of the channels, plus the minima's sum.
fn natural(a: Parts, zero: f32) -> Parts {
    let z = vec4<f32>(zero);
    if (VALUE_BITS == 2u) {
        return Parts(
            vec4<f32>(a.p0.x, a.p1.x, a.p2.x, a.p3.x) + z,
            vec4<f32>(a.p0.y, a.p1.y, a.p2.y, a.p3.y) + z,
            vec4<f32>(a.p0.z, a.p1.z, a.p2.z, a.p3.z) + z,
            vec4<f32>(a.p0.w, a.p1.w, a.p2.w, a.p3.w) + z,
        );
    }
    if (VALUE_BITS == 4u) {
        return Parts(
            vec4<f32>(a.p0.x, a.p1.x, a.p0.y, a.p1.y) + z,
            vec4<f32>(a.p0.z, a.p1.z, a.p0.w, a.p1.w) + z,
            vec4<f32>(a.p2.x, a.p3.x, a.p2.y, a.p3.y) + z,
            vec4<f32>(a.p2.z, a.p3.z, a.p2.w, a.p3.w) + z,
        );
    }
    return Parts(a.p0 + z, a.p1 + z, a.p2 + z, a.p3 + z);
}

fn tile_values(split: Split, head: u32, chunk: u32, row: u32, begin: u32, end: u32) -> Sums {
    var sums: Sums;
    var zero = vec2<f32>();
    for (var quad = begin; quad < end; quad++) {
        let first = head_words(split, head, 4u * quad);
        let token = (4u * quad) % GROUP;
        let a = sh[row * QUADS + quad];
        var b = vec4<f32>();
        if (VALUE_ROWS > 1u) {
            b = sh[(row + 1u) * QUADS + quad];
        }
        add_token(&sums, &zero, first, token, chunk, vec2<f32>(a.x, b.x));
        add_token(&sums, &zero, first, token + 1u, chunk, vec2<f32>(a.y, b.y));
        add_token(&sums, &zero, first, token + 2u, chunk, vec2<f32>(a.z, b.z));
        add_token(&sums, &zero, first, token + 3u, chunk, vec2<f32>(a.w, b.w));
    }
    let a = natural(Parts(sums.a0, sums.a1, sums.a2, sums.a3), zero.x);
    let b = natural(Parts(sums.b0, sums.b1, sums.b2, sums.b3), zero.y);
    return Sums(a.p0, a.p1, a.p2, a.p3, b.p0, b.p1, b.p2, b.p3, sums.weights);
}

@compute @workgroup_size(WORKGROUP)
fn attend_history(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    attend_split(group, local);
}
