// Decode attention of a tile of rows over a run of splits, TILE_TOKENS at a time with a running maximum, as
// FlashAttention (Dao et al., 2022) has it.
//
// Logits and weighted sums are the same computation: rows of operands times lines of elements, which are a
// token's channels or a channel's tokens. An invocation reads four lines, and meets them with all rows. The
// pass adds where they come from: packed pages (lib/decode_codes.wgsl, or lib/decode_vectors.wgsl) and
// unpacked tokens (lib/decode_unpacked.wgsl).
//
// Constants: HEAD_DIM, LOGIT_SCALE, OFFSETS, REDUCE_STEP, ROWS, SHARES, SH_VECS, TILE_TOKENS, WORKGROUP.
// Records: RowTile, Split, TileRun.

// Units of 16 channels of a row, the last of which may be half empty.
const KEY_UNITS: u32 = (HEAD_DIM + 15u) / 16u;
const KEY_VECS: u32 = 4u * KEY_UNITS;
const CHANNEL_QUADS: u32 = HEAD_DIM / 4u;
// Tokens of a tile, by fours and by sixteens.
const QUADS: u32 = TILE_TOKENS / 4u;
const TOKEN_UNITS: u32 = TILE_TOKENS / 16u;
// Invocations that share the channels of a quad of tokens.
const SLICES: u32 = WORKGROUP / QUADS;
// Invocations that share the softmax of a row, and quads of each.
const ROW_LANES: u32 = WORKGROUP / ROWS;
const LANE_QUADS: u32 = (QUADS + ROW_LANES - 1u) / ROW_LANES;
// Workgroup memory: queries [row][vector]; weights [row][quad]; operands, or what is summed up.
const SH_WEIGHTS: u32 = ROWS * KEY_VECS;
const SH_OPERANDS: u32 = SH_WEIGHTS + ROWS * QUADS;

var<workgroup> sh: array<vec4<f32>, SH_VECS>;
// What operands times minima add, or what is summed up.
var<workgroup> sh_offsets: array<f32, OFFSETS>;

// Four lines of each row.
struct Lines {
    r0: vec4<f32>,
    r1: vec4<f32>,
    r2: vec4<f32>,
    r3: vec4<f32>,
    r4: vec4<f32>,
    r5: vec4<f32>,
    r6: vec4<f32>,
    r7: vec4<f32>,
}

// The maximum of a row so far, and the invocation's share of its weights' sum.
struct Softmax {
    highest: f32,
    total: f32,
}

// Adds a vector of operands of each row times four codes of each line.
fn add_part(sums: ptr<function, Lines>, x: Parts, at: u32, row_stride: u32) {
    (*sums).r0 = add_products((*sums).r0, sh[at], x);
    if (ROWS > 1u) {
        (*sums).r1 = add_products((*sums).r1, sh[at + row_stride], x);
    }
    if (ROWS > 2u) {
        (*sums).r2 = add_products((*sums).r2, sh[at + 2u * row_stride], x);
        (*sums).r3 = add_products((*sums).r3, sh[at + 3u * row_stride], x);
    }
    if (ROWS > 4u) {
        (*sums).r4 = add_products((*sums).r4, sh[at + 4u * row_stride], x);
        (*sums).r5 = add_products((*sums).r5, sh[at + 5u * row_stride], x);
        (*sums).r6 = add_products((*sums).r6, sh[at + 6u * row_stride], x);
        (*sums).r7 = add_products((*sums).r7, sh[at + 7u * row_stride], x);
    }
}

// A number of each row.
struct Scalars {
    low: vec4<f32>,
    high: vec4<f32>,
}

// Each row's lines plus its number.
fn shifted(x: Lines, by: Scalars) -> Lines {
    let a = by.low;
    let b = by.high;
    return Lines(
        x.r0 + a.x, x.r1 + a.y, x.r2 + a.z, x.r3 + a.w, x.r4 + b.x, x.r5 + b.y, x.r6 + b.z, x.r7 + b.w);
}

// Each row times its factor.
fn scaled(x: Lines, by: Scalars) -> Lines {
    let a = by.low;
    let b = by.high;
    return Lines(
        x.r0 * a.x, x.r1 * a.y, x.r2 * a.z, x.r3 * a.w, x.r4 * b.x, x.r5 * b.y, x.r6 * b.z, x.r7 * b.w);
}

// Stores each row at `at` and every `row_stride` vectors from there on.
fn store_lines(x: Lines, at: u32, row_stride: u32) {
    sh[at] = x.r0;
    if (ROWS > 1u) {
        sh[at + row_stride] = x.r1;
    }
    if (ROWS > 2u) {
        sh[at + 2u * row_stride] = x.r2;
        sh[at + 3u * row_stride] = x.r3;
    }
    if (ROWS > 4u) {
        sh[at + 4u * row_stride] = x.r4;
        sh[at + 5u * row_stride] = x.r5;
        sh[at + 6u * row_stride] = x.r6;
        sh[at + 7u * row_stride] = x.r7;
    }
}

// Adds to each row what is at `at` and every `row_stride` vectors from there on.
fn add_stored(x: Lines, at: u32, row_stride: u32) -> Lines {
    var sums = x;
    sums.r0 += sh[at];
    if (ROWS > 1u) {
        sums.r1 += sh[at + row_stride];
    }
    if (ROWS > 2u) {
        sums.r2 += sh[at + 2u * row_stride];
        sums.r3 += sh[at + 3u * row_stride];
    }
    if (ROWS > 4u) {
        sums.r4 += sh[at + 4u * row_stride];
        sums.r5 += sh[at + 5u * row_stride];
        sums.r6 += sh[at + 6u * row_stride];
        sums.r7 += sh[at + 7u * row_stride];
    }
    return sums;
}

// Vector `quad` of each row's partial result.
fn read_rows(run: TileRun, head: u32, quad: u32) -> Lines {
    var sums = Lines();
    sums.r0 = partials[partial_at(run.partial, 0u, head) + 1u + quad];
    if (ROWS > 1u) {
        sums.r1 = partials[partial_at(run.partial, 1u, head) + 1u + quad];
    }
    if (ROWS > 2u) {
        sums.r2 = partials[partial_at(run.partial, 2u, head) + 1u + quad];
        sums.r3 = partials[partial_at(run.partial, 3u, head) + 1u + quad];
    }
    if (ROWS > 4u) {
        sums.r4 = partials[partial_at(run.partial, 4u, head) + 1u + quad];
        sums.r5 = partials[partial_at(run.partial, 5u, head) + 1u + quad];
        sums.r6 = partials[partial_at(run.partial, 6u, head) + 1u + quad];
        sums.r7 = partials[partial_at(run.partial, 7u, head) + 1u + quad];
    }
    return sums;
}

fn write_vector(run: TileRun, head: u32, row: u32, rows: u32, quad: u32, x: vec4<f32>) {
    if (row < rows) {
        partials[partial_at(run.partial, row, head) + 1u + quad] = x;
    }
}

fn write_rows(run: TileRun, head: u32, rows: u32, quad: u32, sums: Lines) {
    write_vector(run, head, 0u, rows, quad, sums.r0);
    if (ROWS > 1u) {
        write_vector(run, head, 1u, rows, quad, sums.r1);
    }
    if (ROWS > 2u) {
        write_vector(run, head, 2u, rows, quad, sums.r2);
        write_vector(run, head, 3u, rows, quad, sums.r3);
    }
    if (ROWS > 4u) {
        write_vector(run, head, 4u, rows, quad, sums.r4);
        write_vector(run, head, 5u, rows, quad, sums.r5);
        write_vector(run, head, 6u, rows, quad, sums.r6);
        write_vector(run, head, 7u, rows, quad, sums.r7);
    }
}

// Vector `v` of a row's query, scaled.
fn load_query(tile: RowTile, head: u32, row: u32, v: u32, unpacked: bool) -> vec4<f32> {
    if (row >= tile.rows || 4u * v >= HEAD_DIM) {
        return vec4<f32>();
    }
    return LOGIT_SCALE * query_vector(query_first(tile, head, row, unpacked) + 4u * v);
}

// Largest of each row over its invocations, in two steps. Ends with a barrier.
fn row_max(x: f32, local: u32) -> f32 {
    sh_offsets[local] = x;
    workgroupBarrier();
    let near = local - local % REDUCE_STEP;
    var most = sh_offsets[near];
    for (var i = 1u; i < REDUCE_STEP; i++) {
        most = max(most, sh_offsets[near + i]);
    }
    sh_offsets[WORKGROUP + local] = most;
    workgroupBarrier();
    let first = WORKGROUP + local - local % ROW_LANES;
    for (var i = 0u; i < ROW_LANES; i += REDUCE_STEP) {
        most = max(most, sh_offsets[first + i]);
    }
    workgroupBarrier();
    return most;
}

// Sum of each row over its invocations, in their order. Ends with a barrier.
fn row_sum(x: f32, local: u32) -> f32 {
    sh_offsets[local] = x;
    workgroupBarrier();
    let near = local - local % REDUCE_STEP;
    var sum = sh_offsets[near];
    for (var i = 1u; i < REDUCE_STEP; i++) {
        sum += sh_offsets[near + i];
    }
    sh_offsets[WORKGROUP + local] = sum;
    workgroupBarrier();
    let first = WORKGROUP + local - local % ROW_LANES;
    sum = 0.0;
    for (var i = 0u; i < ROW_LANES; i += REDUCE_STEP) {
        sum += sh_offsets[first + i];
    }
    workgroupBarrier();
    return sum;
}

// A row's logits of a quad of the tile, from the shares that the slices have stored.
fn row_logits(split: Split, row: u32, quad: u32) -> vec4<f32> {
    let at = SH_OPERANDS + row * QUADS + quad;
    var logits = sh[at];
    for (var slice = 1u; slice < SLICES; slice++) {
        logits += sh[at + slice * ROWS * QUADS];
    }
    if (has_soft_cap(split)) {
        logits = capped(logits);
    }
    return logits;
}

// Turns the tile's logits into weights, and leaves the rows' factors for sums so far at the beginning of
// sh_offsets. Ends with a barrier.
fn tile_softmax(state: ptr<function, Softmax>, tile: RowTile, split: Split, first: u32, local: u32) {
    let row = local / ROW_LANES;
    let lane = local % ROW_LANES;
    let other = lane + ROW_LANES;
    var x = vec4<f32>();
    var y = vec4<f32>();
    var seen_x = vec4<bool>();
    var seen_y = vec4<bool>();
    var most = UNSEEN;
    if (lane < QUADS) {
        x = row_logits(split, row, lane);
        seen_x = sees(tile, split, row, first + 4u * lane);
        most = largest(x, seen_x);
    }
    if (LANE_QUADS > 1u) {
        y = row_logits(split, row, other);
        seen_y = sees(tile, split, row, first + 4u * other);
        most = max(most, largest(y, seen_y));
    }
    let before = (*state).highest;
    let highest = max(before, row_max(most, local));
    let shrink = exp2(before - highest);
    let p = select(vec4<f32>(), exp2(x - highest), seen_x);
    var sum = dot(p, vec4<f32>(1.0));
    if (lane < QUADS) {
        sh[SH_WEIGHTS + row * QUADS + lane] = p;
    }
    if (LANE_QUADS > 1u) {
        let q = select(vec4<f32>(), exp2(y - highest), seen_y);
        sum += dot(q, vec4<f32>(1.0));
        sh[SH_WEIGHTS + row * QUADS + other] = q;
    }
    if (lane == 0u) {
        sh_offsets[row] = shrink;
    }
    (*state).highest = highest;
    (*state).total = fma((*state).total, shrink, sum);
    workgroupBarrier();
}

// The rows' factors that `tile_softmax` has left.
fn tile_factors() -> Scalars {
    var factors = Scalars();
    factors.low.x = sh_offsets[0];
    if (ROWS > 1u) {
        factors.low.y = sh_offsets[1];
    }
    if (ROWS > 2u) {
        factors.low.z = sh_offsets[2];
        factors.low.w = sh_offsets[3];
    }
    if (ROWS > 4u) {
        factors.high = vec4<f32>(sh_offsets[4], sh_offsets[5], sh_offsets[6], sh_offsets[7]);
    }
    return factors;
}

// The sums over the shares, for the first of them; the others have none left. Begins and ends with a barrier.
fn joined_shares(sums: Lines, channel_quad: u32, share: u32) -> Lines {
    workgroupBarrier();
    if (share > 0u && share < SHARES) {
        store_lines(sums, SH_OPERANDS + (share - 1u) * ROWS * CHANNEL_QUADS + channel_quad, CHANNEL_QUADS);
    }
    workgroupBarrier();
    var total = Lines();
    if (share == 0u) {
        total = sums;
        for (var other = 1u; other < SHARES; other++) {
            let at = SH_OPERANDS + (other - 1u) * ROWS * CHANNEL_QUADS + channel_quad;
            total = add_stored(total, at, CHANNEL_QUADS);
        }
    }
    return total;
}

fn decode_run(workgroup: vec3<u32>, local: u32) {
    let item = work_item(workgroup);
    if (item >= params.count) {
        return;
    }
    let head = params.first_head + workgroup.y;
    let run = read_run(item);
    let unpacked = run.unpacked != 0u;
    let tile = read_tile(run.tile);
    for (var i = local; i < ROWS * KEY_VECS; i += WORKGROUP) {
        sh[i] = load_query(tile, head, i / KEY_VECS, i % KEY_VECS, unpacked);
    }

    // For keys an invocation has four tokens and a slice of the channels, for values four channels and a
    // share of the tokens, for the softmax a part of a row.
    let quad = local % QUADS;
    let slice = local / QUADS;
    let channel_quad = local % CHANNEL_QUADS;
    let share = local / CHANNEL_QUADS;
    let row = local / ROW_LANES;
    let lane = local % ROW_LANES;
    var state = Softmax(UNSEEN, 0.0);
    var sums = Lines();
    if (run.fresh == 0u) {
        let known = partials[partial_at(run.partial, row, head)];
        state = Softmax(known.x, select(0.0, known.y, lane == 0u));
        if (share == 0u) {
            sums = read_rows(run, head, channel_quad);
        }
    }
    for (var i = 0u; i < run.splits; i++) {
        let split = run_split(run, i);
        for (var first = 0u; first < split.tokens; first += TILE_TOKENS) {
            workgroupBarrier();
            if (KEYS_PREPARED) {
                if (!unpacked) {
                    key_operands(split, head, first, local);
                }
                workgroupBarrier();
            }
            var logits = Lines();
            if (unpacked) {
                logits = token_logits(split, head, first + 4u * quad, slice);
            } else {
                logits = packed_logits(split, head, first + 4u * quad, 4u * quad, slice);
            }
            workgroupBarrier();
            store_lines(logits, SH_OPERANDS + slice * ROWS * QUADS + quad, QUADS);
            workgroupBarrier();
            tile_softmax(&state, tile, split, first, local);
            sums = scaled(sums, tile_factors());
            if (VALUES_PREPARED) {
                workgroupBarrier();
                if (!unpacked) {
                    value_operands(split, head, first, local);
                }
                workgroupBarrier();
            }
            if (share < SHARES) {
                if (unpacked) {
                    sums = add_tokens(sums, split, head, first, channel_quad, share);
                } else {
                    sums = add_packed(sums, split, head, first, channel_quad, share);
                }
            }
        }
        // At the end of each split, not of the run, so that where runs end changes no bit.
        sums = joined_shares(sums, channel_quad, share);
        let total = row_sum(state.total, local);
        state.total = select(0.0, total, lane == 0u);
    }
    if (share == 0u) {
        write_rows(run, head, tile.rows, channel_quad, sums);
    }
    if (lane == 0u && row < tile.rows) {
        partials[partial_at(run.partial, row, head)] = vec4<f32>(state.highest, state.total, 0.0, 0.0);
    }
}
