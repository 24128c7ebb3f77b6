// Attention of a tile of rows over one split: up to 256 tokens in one pass of logits, softmax and values, without a
// running rescale. The pass file adds where keys and values come from: `query_channel`, `prepare_queries`, `bias_part`,
// `tile_logits` and `tile_values`.

// Tokens go in fours.
const QUADS: u32 = 64u;
// Workgroup memory, by phase: queries, bias parts, maxima; then weights; then partial sums of the values.
const SH_BIAS: u32 = ROWS * QUERY_VECS;
const SH_MAX: u32 = SH_BIAS + WORKGROUP;

var<workgroup> sh: array<vec4<f32>, SH_VECS>;

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

// Vector `v` of a row's query, as `load_query` has put it there.
fn query(row: u32, v: u32) -> vec4<f32> {
    return sh[row * QUERY_VECS + v];
}

fn finish_dots(s: Dots) -> vec4<f32> {
    let low = vec4<f32>(s.r0.x, s.r1.x, s.r2.x, s.r3.x) + vec4<f32>(s.r0.y, s.r1.y, s.r2.y, s.r3.y);
    let high = vec4<f32>(s.r0.z, s.r1.z, s.r2.z, s.r3.z) + vec4<f32>(s.r0.w, s.r1.w, s.r2.w, s.r3.w);
    return low + high;
}

// Weighted sums of 16 channels for up to two rows, and the rows' sums of weights.
struct Sums {
    a0: vec4<f32>,
    a1: vec4<f32>,
    a2: vec4<f32>,
    a3: vec4<f32>,
    b0: vec4<f32>,
    b1: vec4<f32>,
    b2: vec4<f32>,
    b3: vec4<f32>,
    weights: vec2<f32>,
}

// Adds a token's 16 channels with weights `p` of the two rows.
fn add_weighted(sums: ptr<function, Sums>, x: Parts, p: vec2<f32>) {
    (*sums).a0 = fma(vec4<f32>(p.x), x.p0, (*sums).a0);
    (*sums).a1 = fma(vec4<f32>(p.x), x.p1, (*sums).a1);
    (*sums).a2 = fma(vec4<f32>(p.x), x.p2, (*sums).a2);
    (*sums).a3 = fma(vec4<f32>(p.x), x.p3, (*sums).a3);
    if (VALUE_ROWS > 1u) {
        (*sums).b0 = fma(vec4<f32>(p.y), x.p0, (*sums).b0);
        (*sums).b1 = fma(vec4<f32>(p.y), x.p1, (*sums).b1);
        (*sums).b2 = fma(vec4<f32>(p.y), x.p2, (*sums).b2);
        (*sums).b3 = fma(vec4<f32>(p.y), x.p3, (*sums).b3);
    }
}

// Vector `v` of a row's query, scaled, in the order in which `tile_logits` meets the channels.
fn load_query(tile: Tile, head: u32, row: u32, v: u32) -> vec4<f32> {
    if (row >= tile.rows) {
        return vec4<f32>();
    }
    let first = query_first(tile, head, row);
    return vec4<f32>(
        scaled_element(first, query_channel(v, 0u)),
        scaled_element(first, query_channel(v, 1u)),
        scaled_element(first, query_channel(v, 2u)),
        scaled_element(first, query_channel(v, 3u)),
    );
}

fn scaled_element(first: u32, channel: u32) -> f32 {
    if (channel >= HEAD_DIM) {
        return 0.0;
    }
    return query_element(first + channel) * LOGIT_SCALE;
}

fn attend_split(group: vec3<u32>, local: u32) {
    let item = work_item(group);
    if (item >= params.count) {
        return;
    }
    let head = params.first_head + group.y;
    let run = read_run(item);
    let split = run_split(run, 0u);
    let tile = read_tile(run.tile);

    for (var i = local; i < ROWS * QUERY_VECS; i += WORKGROUP) {
        sh[i] = load_query(tile, head, i / QUERY_VECS, i % QUERY_VECS);
    }
    workgroupBarrier();

    // Logits: an invocation owns four tokens and KEY_ROWS rows.
    let quad = local % QUADS;
    let row_group = local / QUADS;
    let row = row_group * KEY_ROWS;
    let token = 4u * quad;
    let query_unit = prepare_queries(split, head, quad, row, local);
    if (BIAS_LANES > 0u) {
        sh[SH_BIAS + local] = bias_part(split, head, quad, row);
        workgroupBarrier();
    }
    var bias = vec4<f32>();
    for (var i = 0u; i < BIAS_LANES; i++) {
        bias += sh[SH_BIAS + local - quad % max(BIAS_LANES, 1u) + i];
    }
    var logits = tile_logits(split, head, quad, row, query_unit);
    logits.r0 += bias.x;
    logits.r1 += bias.y;
    logits.r2 += bias.z;
    logits.r3 += bias.w;

    if (has_soft_cap(split)) {
        logits.r0 = capped(logits.r0);
        logits.r1 = capped(logits.r1);
        logits.r2 = capped(logits.r2);
        logits.r3 = capped(logits.r3);
    }

    // Each row's maximum over the split, in two steps.
    let seen0 = sees(tile, split, row, token);
    let seen1 = sees(tile, split, row + 1u, token);
    let seen2 = sees(tile, split, row + 2u, token);
    let seen3 = sees(tile, split, row + 3u, token);
    sh[SH_MAX + local] = vec4<f32>(
        largest(logits.r0, seen0),
        largest(logits.r1, seen1),
        largest(logits.r2, seen2),
        largest(logits.r3, seen3),
    );
    workgroupBarrier();
    if (quad < 8u) {
        var m = vec4<f32>(UNSEEN);
        for (var i = 0u; i < 8u; i++) {
            m = max(m, sh[SH_MAX + row_group * QUADS + 8u * quad + i]);
        }
        sh[SH_BIAS + row_group * QUADS + quad] = m;
    }
    workgroupBarrier();
    var highest = vec4<f32>(UNSEEN);
    for (var i = 0u; i < 8u; i++) {
        highest = max(highest, sh[SH_BIAS + row_group * QUADS + i]);
    }
    workgroupBarrier();

    // Weights, [row][token].
    sh[row * QUADS + quad] = select(vec4<f32>(), exp2(logits.r0 - highest.x), seen0);
    if (KEY_ROWS > 1u) {
        sh[(row + 1u) * QUADS + quad] = select(vec4<f32>(), exp2(logits.r1 - highest.y), seen1);
    }
    if (KEY_ROWS > 2u) {
        sh[(row + 2u) * QUADS + quad] = select(vec4<f32>(), exp2(logits.r2 - highest.z), seen2);
        sh[(row + 3u) * QUADS + quad] = select(vec4<f32>(), exp2(logits.r3 - highest.w), seen3);
    }
    workgroupBarrier();

    // Values: an invocation owns 16 channels, up to two rows, and a share of the tokens.
    let unit = local % UNITS;
    let share = local / UNITS;
    let chunk = unit % CHUNKS;
    let pair = unit / CHUNKS;
    let value_row = pair * VALUE_ROWS;
    let quads = (split.tokens + 3u) / 4u;
    let per_share = (quads + TOKEN_SHARES - 1u) / TOKEN_SHARES;
    var sums: Sums;
    if (share < TOKEN_SHARES) {
        let begin = share * per_share;
        sums = tile_values(split, head, chunk, value_row, begin, min(begin + per_share, quads));
    }
    workgroupBarrier();

    // Sums of weights, and the maxima from those who know them.
    if (share < TOKEN_SHARES && chunk == 0u) {
        sh[share * ROW_PAIRS + pair] = vec4<f32>(sums.weights, 0.0, 0.0);
    }
    if (quad == 0u) {
        sh[TOKEN_SHARES * ROW_PAIRS + row_group] = highest;
    }
    workgroupBarrier();
    if (share == 0u && chunk == 0u) {
        var weights = vec2<f32>();
        for (var i = 0u; i < TOKEN_SHARES; i++) {
            weights += sh[i * ROW_PAIRS + pair].xy;
        }
        let first_max = TOKEN_SHARES * ROW_PAIRS;
        if (value_row < tile.rows) {
            let m = sh[first_max + value_row / KEY_ROWS][value_row % KEY_ROWS];
            partials[partial_at(run.partial, value_row, head)] = vec4<f32>(m, weights.x, 0.0, 0.0);
        }
        if (VALUE_ROWS > 1u && value_row + 1u < tile.rows) {
            let m = sh[first_max + (value_row + 1u) / KEY_ROWS][(value_row + 1u) % KEY_ROWS];
            partials[partial_at(run.partial, value_row + 1u, head)] = vec4<f32>(m, weights.y, 0.0, 0.0);
        }
    }

    // Sum over the shares, pairwise and in a fixed order.
    for (var half = TOKEN_SHARES / 2u; half > 0u; half /= 2u) {
        let stride = half * UNITS;
        workgroupBarrier();
        if (share >= half && share < 2u * half) {
            let at = local - half * UNITS;
            sh[at] = sums.a0;
            sh[at + stride] = sums.a1;
            sh[at + 2u * stride] = sums.a2;
            sh[at + 3u * stride] = sums.a3;
            if (VALUE_ROWS > 1u) {
                sh[at + 4u * stride] = sums.b0;
                sh[at + 5u * stride] = sums.b1;
                sh[at + 6u * stride] = sums.b2;
                sh[at + 7u * stride] = sums.b3;
            }
        }
        workgroupBarrier();
        if (share < half) {
            sums.a0 += sh[local];
            sums.a1 += sh[local + stride];
            sums.a2 += sh[local + 2u * stride];
            sums.a3 += sh[local + 3u * stride];
            if (VALUE_ROWS > 1u) {
                sums.b0 += sh[local + 4u * stride];
                sums.b1 += sh[local + 5u * stride];
                sums.b2 += sh[local + 6u * stride];
                sums.b3 += sh[local + 7u * stride];
            }
        }
    }
    if (share == 0u) {
        if (value_row < tile.rows) {
            write_row(run.partial, value_row, head, chunk, sums.a0, sums.a1, sums.a2, sums.a3);
        }
        if (VALUE_ROWS > 1u && value_row + 1u < tile.rows) {
            write_row(run.partial, value_row + 1u, head, chunk, sums.b0, sums.b1, sums.b2, sums.b3);
        }
    }
}
