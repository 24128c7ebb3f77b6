// Units of a packed page for lib/clusters.wgsl.
//
// Constants: CHANNEL_GROUP, GROUP, KEY_BITS, KEY_COMPACT, KEY_LOW_BITS, KEY_PARAMS, LANES, PACKED_FORMAT,
// VALUE_BITS, VALUE_CODES, VALUE_COMPACT, VALUE_GROUPS, VALUE_LOW_BITS, VALUE_PARAMS, VALUE_ROW_WORDS.
// Records: Split.

// Words of the low plane of a lane's 16 channels.
const KEY_LANE_WORDS: u32 = KEY_LOW_BITS / 2u;

// From the order of the channels to that of the parts.
fn query_order(n: Parts) -> Parts {
    if (KEY_LOW_BITS == 2u) {
        return permute(n.p0, n.p1, n.p2, n.p3);
    }
    if (KEY_LOW_BITS == 4u) {
        let low = permute(n.p0, n.p1, n.p2, n.p3);
        let high = permute(n.p2, n.p3, n.p2, n.p3);
        return Parts(low.p0, low.p1, high.p0, high.p1);
    }
    return n;
}

fn channel_order(a: Parts) -> Parts {
    return natural(a, 0.0);
}

// From the order of the channels to that in which sums of values are kept.
fn value_order(n: Parts) -> Parts {
    if (VALUE_LOW_BITS == 2u) {
        // Its own inverse.
        return natural(n, 0.0);
    }
    if (VALUE_LOW_BITS == 4u) {
        return Parts(
            vec4<f32>(n.p0.xz, n.p1.xz), vec4<f32>(n.p0.yw, n.p1.yw), vec4<f32>(n.p2.xz, n.p3.xz), vec4<f32>(n.p2.yw, n.p3.yw));
    }
    return n;
}

fn times(a: Parts, b: Parts) -> Parts {
    return Parts(a.p0 * b.p0, a.p1 * b.p1, a.p2 * b.p2, a.p3 * b.p3);
}

// The sum over the lane's 16 channels.
fn dot_parts(a: Parts, b: Parts) -> f32 {
    let sum = a.p0 * b.p0 + a.p1 * b.p1 + a.p2 * b.p2 + a.p3 * b.p3;
    return (sum.x + sum.y) + (sum.z + sum.w);
}

struct Words {
    w0: vec4<u32>,
    w1: vec4<u32>,
    w2: vec4<u32>,
    w3: vec4<u32>,
}

// Parameters of the lane's 16 channels, of those that begin at vector `at`.
fn lane_params(at: u32, lane: u32) -> Words {
    if (KEY_COMPACT) {
        let a = slab4[at + 2u * lane];
        let b = slab4[at + 2u * lane + 1u];
        return Words(halves(a.xy), halves(a.zw), halves(b.xy), halves(b.zw));
    }
    let first = at + 4u * lane;
    return Words(slab4[first], slab4[first + 1u], slab4[first + 2u], slab4[first + 3u]);
}

// Parameters of the values of quad `quad`, of those that begin at vector `at`: [token][group].
fn quad_params(at: u32, quad: u32) -> Words {
    var p = Words();
    if (VALUE_COMPACT && VALUE_GROUPS == 1u) {
        p.w0 = four_params(at, quad, true);
    } else if (VALUE_COMPACT) {
        let first = at + quad * (VALUE_GROUPS / 2u);
        let a = slab4[first];
        p.w0 = halves(a.xy);
        p.w1 = halves(a.zw);
        if (VALUE_GROUPS > 2u) {
            let b = slab4[first + 1u];
            p.w2 = halves(b.xy);
            p.w3 = halves(b.zw);
        }
    } else {
        let first = at + quad * VALUE_GROUPS;
        p.w0 = slab4[first];
        if (VALUE_GROUPS > 1u) {
            p.w1 = slab4[first + 1u];
        }
        if (VALUE_GROUPS > 2u) {
            p.w2 = slab4[first + 2u];
            p.w3 = slab4[first + 3u];
        }
    }
    return p;
}

// Words `word` of the lane's keys of quad `at`: one per token.
fn key_words(at: u32, word: u32) -> vec4<u32> {
    return slab4[at + word * (GROUP / 4u)];
}

// Logits of a quad of tokens: each lane's share of the products, then their sum to the lane that owns the
// quad.
fn key_quad(logits: ptr<function, Logits>, q: Rows, row: u32, quad: u32, lane: u32) {
    var part = Logits();
    let at = row + quad + lane * (KEY_LANE_WORDS * GROUP / 4u);
    if (KEY_BITS == 16u) {
        add_rows(&part, pair_channels(PACKED_FORMAT, key_words(at, 0u), key_words(at, 1u)), q.r0.p0, q.r1.p0, q.r2.p0, q.r3.p0);
        add_rows(&part, pair_channels(PACKED_FORMAT, key_words(at, 2u), key_words(at, 3u)), q.r0.p1, q.r1.p1, q.r2.p1, q.r3.p1);
        add_rows(&part, pair_channels(PACKED_FORMAT, key_words(at, 4u), key_words(at, 5u)), q.r0.p2, q.r1.p2, q.r2.p2, q.r3.p2);
        add_rows(&part, pair_channels(PACKED_FORMAT, key_words(at, 6u), key_words(at, 7u)), q.r0.p3, q.r1.p3, q.r2.p3, q.r3.p3);
    } else {
        let k0 = key_words(at, 0u);
        let high = high_bits(row + quad, lane);
        add_rows(&part, key_channels(key_part(k0, high, 0u)), q.r0.p0, q.r1.p0, q.r2.p0, q.r3.p0);
        if (KEY_LOW_BITS == 2u) {
            add_rows(&part, key_channels(key_part(k0, high, 1u)), q.r0.p1, q.r1.p1, q.r2.p1, q.r3.p1);
            add_rows(&part, key_channels(key_part(k0, high, 2u)), q.r0.p2, q.r1.p2, q.r2.p2, q.r3.p2);
            add_rows(&part, key_channels(key_part(k0, high, 3u)), q.r0.p3, q.r1.p3, q.r2.p3, q.r3.p3);
        } else if (KEY_LOW_BITS == 4u) {
            let k1 = key_words(at, 1u);
            add_rows(&part, key_channels(key_part(k0, high, 1u)), q.r0.p1, q.r1.p1, q.r2.p1, q.r3.p1);
            add_rows(&part, key_channels(key_part(k1, high, 0u)), q.r0.p2, q.r1.p2, q.r2.p2, q.r3.p2);
            add_rows(&part, key_channels(key_part(k1, high, 1u)), q.r0.p3, q.r1.p3, q.r2.p3, q.r3.p3);
        } else {
            add_rows(&part, key_channels(key_words(at, 1u)), q.r0.p1, q.r1.p1, q.r2.p1, q.r3.p1);
            add_rows(&part, key_channels(key_words(at, 2u)), q.r0.p2, q.r1.p2, q.r2.p2, q.r3.p2);
            add_rows(&part, key_channels(key_words(at, 3u)), q.r0.p3, q.r1.p3, q.r2.p3, q.r3.p3);
        }
    }
    give(logits, part, lane == quad);
}

// Logits of the lane's own four tokens of the unit that begins at token `first` of the split.
fn unit_logits(split: Split, head: u32, first: u32, lane: u32, base: u32, q: Rows) -> Logits {
    let block = head_words(split, head, first);
    let first_quad = (first % GROUP) / 4u;

    // The queries times the scales, and their products with the minima.
    var scaled = q;
    var bias = vec4<f32>();
    if (KEY_BITS < 16u) {
        let w = lane_params((block + KEY_PARAMS) / 4u, lane);
        let s = query_order(Parts(
            scales(w.w0, KEY_COMPACT), scales(w.w1, KEY_COMPACT), scales(w.w2, KEY_COMPACT), scales(w.w3, KEY_COMPACT)));
        let m = query_order(Parts(
            minima(w.w0, KEY_COMPACT), minima(w.w1, KEY_COMPACT), minima(w.w2, KEY_COMPACT), minima(w.w3, KEY_COMPACT)));
        scaled = Rows(times(q.r0, s), times(q.r1, s), times(q.r2, s), times(q.r3, s));
        bias = cluster_sum(vec4<f32>(dot_parts(q.r0, m), dot_parts(q.r1, m), dot_parts(q.r2, m), dot_parts(q.r3, m)));
    }

    var logits = Logits();
    for (var quad = 0u; quad < LANES; quad++) {
        key_quad(&logits, scaled, block / 4u + first_quad, quad, lane);
    }
    logits.r0 += bias.x;
    logits.r1 += bias.y;
    logits.r2 += bias.z;
    logits.r3 += bias.w;
    return logits;
}

fn component(v: vec4<u32>, i: u32) -> u32 {
    return select(select(v.w, v.z, i == 2u), select(v.y, v.x, i == 0u), i < 2u);
}

// The lane's words of token `t` of a quad, whose words lie one after the other over the cluster's vectors:
// the n-th of lane l is vector n * LANES + l.
fn value_words(n: Words, t: u32, lane: u32, base: u32) -> vec4<u32> {
    if (VALUE_BITS == 2u) {
        let v = subgroupShuffle(n.w0, base + t * (LANES / 4u) + lane / 4u);
        return vec4<u32>(component(v, lane % 4u), 0u, 0u, 0u);
    }
    if (VALUE_BITS == 4u) {
        let v = subgroupShuffle(select(n.w1, n.w0, t < 2u), base + (t % 2u) * (LANES / 2u) + lane / 2u);
        return vec4<u32>(select(v.xy, v.zw, lane % 2u == 1u), 0u, 0u);
    }
    return select(select(n.w3, n.w2, t == 2u), select(n.w1, n.w0, t == 0u), t < 2u);
}

// The value parameter of the lane's channels for token `t` of the quad that lane `owner` owns.
fn value_param(p: Words, t: u32, group: u32, owner: u32) -> u32 {
    if (VALUE_GROUPS == 1u) {
        return subgroupShuffle(component(p.w0, t), owner);
    }
    if (VALUE_GROUPS == 2u) {
        let pair = select(p.w1, p.w0, t < 2u);
        let v = subgroupShuffle(select(pair.xy, pair.zw, t % 2u == 1u), owner);
        return select(v.x, v.y, group == 1u);
    }
    let all = select(select(p.w3, p.w2, t == 2u), select(p.w1, p.w0, t == 0u), t < 2u);
    return component(subgroupShuffle(all, owner), group);
}

// The same for a token of codes.
fn add_token(sums: ptr<function, Sums>, param_word: u32, words: vec4<u32>, p: vec4<f32>) {
    let param = group_param(param_word, VALUE_COMPACT);
    (*sums).zero = fma(p, vec4<f32>(param.y), (*sums).zero);
    add_weighted(sums, value_parts(words), p * param.x);
}

// The same for a token in 16 bits, whose channels are in vectors `at` and `at` + 1.
fn add_channels(sums: ptr<function, Sums>, at: u32, p: vec4<f32>) {
    add_weighted(sums, sixteen_channels(PACKED_FORMAT, slab4[at], slab4[at + 1u]), p);
}

// Adds the values of a quad of tokens, whose weights and parameters come from the lane that owns it.
fn value_quad(sums: ptr<function, Sums>, p: Logits, v: Words, codes: u32, quad: u32, lane: u32, base: u32) {
    let group = 16u * lane / CHANNEL_GROUP;
    let owner = base + quad;
    let w0 = subgroupShuffle(p.r0, owner);
    let w1 = subgroupShuffle(p.r1, owner);
    let w2 = subgroupShuffle(p.r2, owner);
    let w3 = subgroupShuffle(p.r3, owner);
    if (VALUE_BITS == 16u) {
        let at = codes + quad * VALUE_ROW_WORDS + 2u * lane;
        add_channels(sums, at, vec4<f32>(w0.x, w1.x, w2.x, w3.x));
        add_channels(sums, at + VALUE_ROW_WORDS / 4u, vec4<f32>(w0.y, w1.y, w2.y, w3.y));
        add_channels(sums, at + VALUE_ROW_WORDS / 2u, vec4<f32>(w0.z, w1.z, w2.z, w3.z));
        add_channels(sums, at + 3u * VALUE_ROW_WORDS / 4u, vec4<f32>(w0.w, w1.w, w2.w, w3.w));
        return;
    }
    if (VALUE_BITS > VALUE_LOW_BITS) {
        // Rows in two planes: words of neighbouring tokens are no whole vectors.
        let row = 4u * (codes + quad * VALUE_ROW_WORDS);
        add_token(sums, value_param(v, 0u, group, owner), chunk_words(row, lane), vec4<f32>(w0.x, w1.x, w2.x, w3.x));
        add_token(sums, value_param(v, 1u, group, owner),
            chunk_words(row + VALUE_ROW_WORDS, lane), vec4<f32>(w0.y, w1.y, w2.y, w3.y));
        add_token(sums, value_param(v, 2u, group, owner),
            chunk_words(row + 2u * VALUE_ROW_WORDS, lane), vec4<f32>(w0.z, w1.z, w2.z, w3.z));
        add_token(sums, value_param(v, 3u, group, owner),
            chunk_words(row + 3u * VALUE_ROW_WORDS, lane), vec4<f32>(w0.w, w1.w, w2.w, w3.w));
        return;
    }
    let at = codes + quad * VALUE_ROW_WORDS + lane;
    var n = Words();
    n.w0 = slab4[at];
    if (VALUE_BITS > 2u) {
        n.w1 = slab4[at + LANES];
    }
    if (VALUE_BITS > 4u) {
        n.w2 = slab4[at + 2u * LANES];
        n.w3 = slab4[at + 3u * LANES];
    }
    add_token(sums, value_param(v, 0u, group, owner),
        value_words(n, 0u, lane, base), vec4<f32>(w0.x, w1.x, w2.x, w3.x));
    add_token(sums, value_param(v, 1u, group, owner),
        value_words(n, 1u, lane, base), vec4<f32>(w0.y, w1.y, w2.y, w3.y));
    add_token(sums, value_param(v, 2u, group, owner),
        value_words(n, 2u, lane, base), vec4<f32>(w0.z, w1.z, w2.z, w3.z));
    add_token(sums, value_param(v, 3u, group, owner),
        value_words(n, 3u, lane, base), vec4<f32>(w0.w, w1.w, w2.w, w3.w));
}

// The unit's weighted values, a quad of tokens at a time.
fn unit_values(split: Split, head: u32, first: u32, lane: u32, base: u32, p: Logits) -> Sums {
    let block = head_words(split, head, first);
    let first_quad = (first % GROUP) / 4u;
    var sums = Sums();
    var params_of = Words();
    if (VALUE_BITS < 16u) {
        params_of = quad_params((block + VALUE_PARAMS) / 4u, first_quad + lane);
    }
    let codes = (block + VALUE_CODES) / 4u + first_quad * VALUE_ROW_WORDS;
    for (var quad = 0u; quad < LANES; quad++) {
        value_quad(&sums, p, params_of, codes, quad, lane, base);
    }
    return sums;
}
