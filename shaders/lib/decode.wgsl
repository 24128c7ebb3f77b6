// Attention of a tile of rows over one split: up to 256 tokens in one pass of logits, softmax and values,
// without a running rescale. The pass file adds where keys and values come from: `query_channel`,
// `prepare_queries`, `bias_part`, `add_logits` and `tile_values`.
//
// Constants: CHUNKS, HEAD_DIM, KEY_ROWS, KEY_SLICES, LOGIT_SCALE, QUERY_VECS, ROWS, ROW_GROUPS, ROW_PAIRS,
// SH_VECS, TOKEN_SHARES, UNITS, VALUE_ROWS, WORKGROUP.
// Records: RowTile.

// Tokens go in fours.
const QUADS: u32 = 64u;
// Workgroup memory, by phase: queries and what invocations share about a block; partial logits; maxima;
// weights; partial sums of the values.
const SH_BLOCK: u32 = ROWS * QUERY_VECS;
const SH_MAX: u32 = ROW_GROUPS * QUADS;

var<workgroup> sh: array<vec4<f32>, SH_VECS>;

// Vector `v` of a row's query, as `load_query` has put it there.
fn query(row: u32, v: u32) -> vec4<f32> {
    return sh[row * QUERY_VECS + v];
}

// Weighted sums of 16 channels for up to two rows, and the rows' sums of weights.
struct Sums {
    a: Parts,
    b: Parts,
    weights: vec2<f32>,
}

fn added(x: Parts, y: Parts) -> Parts {
    return Parts(x.p0 + y.p0, x.p1 + y.p1, x.p2 + y.p2, x.p3 + y.p3);
}

// Adds a token's 16 channels with weights `p` of the two rows.
fn add_weighted(sums: ptr<function, Sums>, x: Parts, p: vec2<f32>) {
    (*sums).a = add_scaled((*sums).a, p.x, x);
    if (VALUE_ROWS > 1u) {
        (*sums).b = add_scaled((*sums).b, p.y, x);
    }
}

// Vector `v` of a row's query, scaled, in the order in which `add_logits` meets the channels.
fn load_query(tile: RowTile, head: u32, row: u32, v: u32) -> vec4<f32> {
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

fn decode_split(workgroup: vec3<u32>, local: u32) {
    let item = work_item(workgroup);
    if (item >= params.count) {
        return;
    }
    let head = params.first_head + workgroup.y;
    let run = read_run(item);
    let split = run_split(run, 0u);
    let tile = read_tile(run.tile);

    for (var i = local; i < ROWS * QUERY_VECS; i += WORKGROUP) {
        sh[i] = load_query(tile, head, i / QUERY_VECS, i % QUERY_VECS);
    }
    workgroupBarrier();

    // Logits: an invocation owns four tokens, KEY_ROWS rows, and one of KEY_SLICES shares of the channels.
    let quad = local % QUADS;
    let slice = local / QUADS % KEY_SLICES;
    let row_group = local / (QUADS * KEY_SLICES);
    let row = row_group * KEY_ROWS;
    let token = 4u * quad;
    let query_unit = prepare_queries(split, head, quad, slice, row, local);
    if (BLOCK_LANES > 0u) {
        sh[SH_BLOCK + local] = bias_part(split, head, quad, slice, row);
        workgroupBarrier();
    }
    var logits = Logits();
    if (slice == 0u) {
        var bias = vec4<f32>();
        for (var i = 0u; i < BIAS_PARTS; i++) {
            bias += sh[SH_BLOCK + block_lane(local, i)];
        }
        logits = Logits(vec4<f32>(bias.x), vec4<f32>(bias.y), vec4<f32>(bias.z), vec4<f32>(bias.w));
    }
    add_logits(&logits, split, head, quad, slice, row, query_unit);

    // Sum over the slices, pairwise and in a fixed order.
    let owner = row_group * QUADS + quad;
    for (var half = KEY_SLICES / 2u; half > 0u; half /= 2u) {
        workgroupBarrier();
        if (slice >= half && slice < 2u * half) {
            let at = ((slice - half) * ROW_GROUPS * QUADS + owner) * KEY_ROWS;
            sh[at] = logits.r0;
            if (KEY_ROWS > 1u) {
                sh[at + 1u] = logits.r1;
            }
            if (KEY_ROWS > 2u) {
                sh[at + 2u] = logits.r2;
                sh[at + 3u] = logits.r3;
            }
        }
        workgroupBarrier();
        if (slice < half) {
            let at = (slice * ROW_GROUPS * QUADS + owner) * KEY_ROWS;
            logits.r0 += sh[at];
            if (KEY_ROWS > 1u) {
                logits.r1 += sh[at + 1u];
            }
            if (KEY_ROWS > 2u) {
                logits.r2 += sh[at + 2u];
                logits.r3 += sh[at + 3u];
            }
        }
    }
    workgroupBarrier();

    // Each row's maximum over the split, in two steps. From here on the first slice has the logits.
    let seen0 = sees(tile, split, row, token);
    let seen1 = sees(tile, split, row + 1u, token);
    let seen2 = sees(tile, split, row + 2u, token);
    let seen3 = sees(tile, split, row + 3u, token);
    if (slice == 0u) {
        if (has_soft_cap(split)) {
            logits.r0 = capped(logits.r0);
            logits.r1 = capped(logits.r1);
            logits.r2 = capped(logits.r2);
            logits.r3 = capped(logits.r3);
        }
        sh[owner] = vec4<f32>(
            largest(logits.r0, seen0),
            largest(logits.r1, seen1),
            largest(logits.r2, seen2),
            largest(logits.r3, seen3),
        );
    }
    workgroupBarrier();
    if (slice == 0u && quad < 8u) {
        var m = vec4<f32>(UNSEEN);
        for (var i = 0u; i < 8u; i++) {
            m = max(m, sh[row_group * QUADS + 8u * quad + i]);
        }
        sh[SH_MAX + row_group * 8u + quad] = m;
    }
    workgroupBarrier();
    var highest = vec4<f32>(UNSEEN);
    for (var i = 0u; i < 8u; i++) {
        highest = max(highest, sh[SH_MAX + row_group * 8u + i]);
    }
    workgroupBarrier();

    // Weights, [row][token].
    if (slice == 0u) {
        sh[row * QUADS + quad] = select(vec4<f32>(), exp2(logits.r0 - highest.x), seen0);
        if (KEY_ROWS > 1u) {
            sh[(row + 1u) * QUADS + quad] = select(vec4<f32>(), exp2(logits.r1 - highest.y), seen1);
        }
        if (KEY_ROWS > 2u) {
            sh[(row + 2u) * QUADS + quad] = select(vec4<f32>(), exp2(logits.r2 - highest.z), seen2);
            sh[(row + 3u) * QUADS + quad] = select(vec4<f32>(), exp2(logits.r3 - highest.w), seen3);
        }
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
    var sums = Sums();
    if (share < TOKEN_SHARES) {
        let begin = share * per_share;
        sums = tile_values(split, head, chunk, value_row, begin, min(begin + per_share, quads));
    }
    workgroupBarrier();

    // Sums of weights, and the maxima from those who know them.
    if (share < TOKEN_SHARES && chunk == 0u) {
        sh[share * ROW_PAIRS + pair] = vec4<f32>(sums.weights, 0.0, 0.0);
    }
    if (slice == 0u && quad == 0u) {
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

    // Sum over the shares, pairwise and in a fixed order; one row after the other, to need less workgroup
    // memory.
    for (var second = 0u; second < VALUE_ROWS; second++) {
        var sum = sums.a;
        if (second == 1u) {
            sum = sums.b;
        }
        for (var half = TOKEN_SHARES / 2u; half > 0u; half /= 2u) {
            let stride = half * UNITS;
            workgroupBarrier();
            if (share >= half && share < 2u * half) {
                let at = local - stride;
                sh[at] = sum.p0;
                sh[at + stride] = sum.p1;
                sh[at + 2u * stride] = sum.p2;
                sh[at + 3u * stride] = sum.p3;
            }
            workgroupBarrier();
            if (share < half) {
                let other = Parts(sh[local], sh[local + stride], sh[local + 2u * stride], sh[local + 3u * stride]);
                sum = added(sum, other);
            }
        }
        if (share == 0u && value_row + second < tile.rows) {
            write_row(run.partial, value_row + second, head, chunk, sum.p0, sum.p1, sum.p2, sum.p3);
        }
    }
}
