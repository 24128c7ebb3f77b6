// Units of a packed page for lib/clusters.wgsl. lib/lines.wgsl comes before.
//
// Constants: CHANNEL_GROUP, GROUP, KEY_BITS, KEY_COMPACT, KEY_LOW_BITS, KEY_LOW_WORDS, KEY_PARAMS, KEY_ROWS,
// LANES, VALUE_BITS, VALUE_CODES, VALUE_COMPACT, VALUE_GROUPS, VALUE_LOW_BITS, VALUE_LOW_WORDS,
// VALUE_PARAMS.
// Records: Split.

fn times(a: Parts, b: Parts) -> Parts {
    return Parts(a.p0 * b.p0, a.p1 * b.p1, a.p2 * b.p2, a.p3 * b.p3);
}

// The sum over the lane's 16 channels.
fn dot_parts(a: Parts, b: Parts) -> f32 {
    let sum = a.p0 * b.p0 + a.p1 * b.p1 + a.p2 * b.p2 + a.p3 * b.p3;
    return (sum.x + sum.y) + (sum.z + sum.w);
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

// Logits of a quad of tokens: each lane's share of the products, then their sum to the lane that owns the
// quad. `at` is the first vector of the quad's keys.
fn key_quad(logits: ptr<function, Logits>, q: Rows, at: u32, quad: u32, lane: u32) {
    var share = Logits();
    let words = load_words(at, GROUP / 4u, KEY_BITS, KEY_LOW_BITS, KEY_LOW_WORDS, lane);
    add_rows(&share, part(words, 0u, KEY_BITS), q.r0.p0, q.r1.p0, q.r2.p0, q.r3.p0);
    add_rows(&share, part(words, 1u, KEY_BITS), q.r0.p1, q.r1.p1, q.r2.p1, q.r3.p1);
    if (KEY_BITS == 16u) {
        let more = load_words(at + GROUP, GROUP / 4u, KEY_BITS, KEY_LOW_BITS, KEY_LOW_WORDS, lane);
        add_rows(&share, part(more, 0u, KEY_BITS), q.r0.p2, q.r1.p2, q.r2.p2, q.r3.p2);
        add_rows(&share, part(more, 1u, KEY_BITS), q.r0.p3, q.r1.p3, q.r2.p3, q.r3.p3);
    } else {
        add_rows(&share, part(words, 2u, KEY_BITS), q.r0.p2, q.r1.p2, q.r2.p2, q.r3.p2);
        add_rows(&share, part(words, 3u, KEY_BITS), q.r0.p3, q.r1.p3, q.r2.p3, q.r3.p3);
    }
    give(logits, share, lane == quad);
}

// Logits of the lane's own four tokens of the unit that begins at token `first` of the split.
fn packed_logits(split: Split, head: u32, first: u32, lane: u32, base: u32, q: Rows) -> Logits {
    let block = head_words(split, head, first);
    let first_quad = (first % GROUP) / 4u;

    // The queries times the scales, and their products with the minima.
    var scaled = q;
    var bias = vec4<f32>();
    if (KEY_BITS < 16u) {
        let w = lane_params((block + KEY_PARAMS) / 4u, lane);
        let s = Parts(
            scales(w.w0, KEY_COMPACT), scales(w.w1, KEY_COMPACT), scales(w.w2, KEY_COMPACT), scales(w.w3, KEY_COMPACT));
        let m = Parts(
            minima(w.w0, KEY_COMPACT), minima(w.w1, KEY_COMPACT), minima(w.w2, KEY_COMPACT), minima(w.w3, KEY_COMPACT));
        let units = Parts(
            code_units(0u, KEY_BITS), code_units(1u, KEY_BITS), code_units(2u, KEY_BITS), code_units(3u, KEY_BITS));
        let u = times(s, units);
        scaled = Rows(times(q.r0, u), times(q.r1, u), times(q.r2, u), times(q.r3, u));
        bias = cluster_sum(vec4<f32>(dot_parts(q.r0, m), dot_parts(q.r1, m), dot_parts(q.r2, m), dot_parts(q.r3, m)));
    }

    var logits = Logits();
    for (var quad = 0u; quad < LANES; quad++) {
        key_quad(&logits, scaled, block / 4u + first_quad + quad, quad, lane);
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

// Adds a row's weights of a quad of tokens times its values in the lane's channels.
fn add_values(sum: Parts, weights: vec4<f32>, x0: Parts, x1: Parts, x2: Parts, x3: Parts) -> Parts {
    return Parts(
        add_products(sum.p0, weights, x0), add_products(sum.p1, weights, x1), add_products(sum.p2, weights, x2), add_products(sum.p3, weights, x3));
}

// Four lines of values each: 16 channels.
struct LaneWords {
    c0: Words,
    c1: Words,
    c2: Words,
    c3: Words,
}

// The words of 16 tokens in the lane's channels; `at` is the first vector of their values.
fn lane_words(at: u32, unit: u32, lane: u32) -> LaneWords {
    let v = at + 4u * lane;
    return LaneWords(
        load_words(v, 4u * LANES, VALUE_BITS, VALUE_LOW_BITS, VALUE_LOW_WORDS, unit),
        load_words(v + 1u, 4u * LANES, VALUE_BITS, VALUE_LOW_BITS, VALUE_LOW_WORDS, unit),
        load_words(v + 2u, 4u * LANES, VALUE_BITS, VALUE_LOW_BITS, VALUE_LOW_WORDS, unit),
        load_words(v + 3u, 4u * LANES, VALUE_BITS, VALUE_LOW_BITS, VALUE_LOW_WORDS, unit),
    );
}

// Adds the values of a quad of tokens, whose weights and parameters come from the lane that owns it, from the
// words of its 16 tokens: their `j`-th quad.
fn value_quad(sums: ptr<function, Sums>, p: Logits, v: Words, words: LaneWords, j: u32, quad: u32, lane: u32, base: u32) {
    let owner = base + quad;
    var w0 = subgroupShuffle(p.r0, owner);
    var w1 = subgroupShuffle(p.r1, owner);
    var w2 = subgroupShuffle(p.r2, owner);
    var w3 = subgroupShuffle(p.r3, owner);
    if (VALUE_BITS < 16u) {
        let group = 16u * lane / CHANNEL_GROUP;
        let a = group_param(value_param(v, 0u, group, owner), VALUE_COMPACT);
        let b = group_param(value_param(v, 1u, group, owner), VALUE_COMPACT);
        let c = group_param(value_param(v, 2u, group, owner), VALUE_COMPACT);
        let d = group_param(value_param(v, 3u, group, owner), VALUE_COMPACT);
        let scale = vec4<f32>(a.x, b.x, c.x, d.x) * code_units(j, VALUE_BITS);
        let low = vec4<f32>(a.y, b.y, c.y, d.y);
        (*sums).zero += vec4<f32>(dot(w0, low), dot(w1, low), dot(w2, low), dot(w3, low));
        w0 *= scale;
        w1 *= scale;
        w2 *= scale;
        w3 *= scale;
    }
    let x0 = part(words.c0, j, VALUE_BITS);
    let x1 = part(words.c1, j, VALUE_BITS);
    let x2 = part(words.c2, j, VALUE_BITS);
    let x3 = part(words.c3, j, VALUE_BITS);
    (*sums).r0 = add_values((*sums).r0, w0, x0, x1, x2, x3);
    if (KEY_ROWS > 1u) {
        (*sums).r1 = add_values((*sums).r1, w1, x0, x1, x2, x3);
    }
    if (KEY_ROWS > 2u) {
        (*sums).r2 = add_values((*sums).r2, w2, x0, x1, x2, x3);
        (*sums).r3 = add_values((*sums).r3, w3, x0, x1, x2, x3);
    }
}

// The unit's weighted values, 16 tokens at a time.
fn packed_values(split: Split, head: u32, first: u32, lane: u32, base: u32, p: Logits) -> Sums {
    let block = head_words(split, head, first);
    let first_quad = (first % GROUP) / 4u;
    var sums = Sums();
    var params_of = Words();
    if (VALUE_BITS < 16u) {
        params_of = quad_params((block + VALUE_PARAMS) / 4u, first_quad + lane);
    }
    let at = (block + VALUE_CODES) / 4u;
    for (var quad = 0u; quad < LANES; quad += 4u) {
        let unit = (first_quad + quad) / 4u;
        let words = lane_words(at, unit, lane);
        value_quad(&sums, p, params_of, words, 0u, quad, lane, base);
        value_quad(&sums, p, params_of, words, 1u, quad + 1u, lane, base);
        if (VALUE_BITS == 16u) {
            // The four vectors of words that follow.
            let more = lane_words(at + 16u * LANES, unit, lane);
            value_quad(&sums, p, params_of, more, 0u, quad + 2u, lane, base);
            value_quad(&sums, p, params_of, more, 1u, quad + 3u, lane, base);
        } else {
            value_quad(&sums, p, params_of, words, 2u, quad + 2u, lane, base);
            value_quad(&sums, p, params_of, words, 3u, quad + 3u, lane, base);
        }
    }
    return sums;
}
