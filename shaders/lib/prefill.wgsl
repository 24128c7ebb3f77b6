// Attention of a long chunk: a tile of rows extends its partial results by consecutive splits, KEY_TILE
// tokens at a time, whose keys and values are unpacked once for the whole tile into workgroup memory. The
// pass file adds `key_vector` and `value_vector`, four channels of a token.
//
// The tile of logits and that of the outputs are divided among the invocations alike: each has four rows (a
// row group), of TOKENS_EACH tokens, then of OUTPUTS_EACH vectors of channels.
//
// Source: FlashAttention (Dao et al., 2022), with the state between runs kept in the attention scratch as
// f32: where a run ends never changes a bit.
//
// Constants: COLUMNS, HEADS_PER_KV, HEAD_DIM, KEY_TILE, LOGIT_SCALE, OUTPUTS_EACH, REDUCE_STEP, ROWS,
// SH_VECS, TOKENS_EACH, VALUE_TOKENS.
// Records: RowTile, Split.

const PREFILL_WORKGROUP: u32 = 256u;
// Channels go through workgroup memory 16 at a time.
const CHUNK_VECS: u32 = 4u;
const HEAD_VECS: u32 = HEAD_DIM / 4u;
const ROW_QUADS: u32 = ROWS / 4u;
// Workgroup memory: a chunk of queries [row][vector], a chunk of keys [token][vector], weights [token][row
// group]. Values [token][vector] and row sums take the place of the chunks.
const SH_KEYS: u32 = ROWS * CHUNK_VECS;
const SH_WEIGHTS: u32 = SH_KEYS + KEY_TILE * CHUNK_VECS;

var<workgroup> sh: array<vec4<f32>, SH_VECS>;

// Logits of four rows for up to two tokens.
struct TileLogits {
    a: vec4<f32>,
    b: vec4<f32>,
}

// Outputs of four rows in up to two vectors of channels.
struct TileSums {
    a0: vec4<f32>,
    a1: vec4<f32>,
    a2: vec4<f32>,
    a3: vec4<f32>,
    b0: vec4<f32>,
    b1: vec4<f32>,
    b2: vec4<f32>,
    b3: vec4<f32>,
}

fn query_part(tile: RowTile, head: u32, row: u32, v: u32) -> vec4<f32> {
    if (row >= tile.rows || v >= HEAD_VECS) {
        return vec4<f32>();
    }
    return LOGIT_SCALE * query_vector(query_first(tile, head, row, false) + 4u * v);
}

// Which of four rows see a token.
fn rows_that_see(tile: RowTile, split: Split, row: u32, token: u32) -> vec4<bool> {
    let r = vec4<u32>(tile.first_row + row) + vec4<u32>(0u, 1u, 2u, 3u);
    let end = vec4<u32>(tile.position + 1u) + r / HEADS_PER_KV;
    let position = vec4<u32>(split.first_position + token);
    let oldest = max(end, vec4<u32>(params.sliding_window)) - params.sliding_window;
    return (position < end) & (position >= oldest) & vec4<bool>(token < split.tokens);
}

fn products(row: u32, token: u32, v: u32) -> vec4<f32> {
    let k = sh[SH_KEYS + token * CHUNK_VECS + v];
    let q = row * CHUNK_VECS + v;
    return vec4<f32>(
        dot(sh[q], k), dot(sh[q + CHUNK_VECS], k), dot(sh[q + 2u * CHUNK_VECS], k), dot(sh[q + 3u * CHUNK_VECS], k));
}

// The logits of this invocation's rows and tokens. Begins with a barrier.
fn tile_logits(
    tile: RowTile,
    split: Split,
    head: u32,
    first_token: u32,
    row: u32,
    column: u32,
    local: u32,
) -> TileLogits {
    var logits = TileLogits();
    for (var first = 0u; first < HEAD_VECS; first += CHUNK_VECS) {
        workgroupBarrier();
        if (local < ROWS * CHUNK_VECS) {
            sh[local] = query_part(tile, head, local / CHUNK_VECS, first + local % CHUNK_VECS);
        }
        for (var i = local; i < KEY_TILE * CHUNK_VECS; i += PREFILL_WORKGROUP) {
            let v = first + i % CHUNK_VECS;
            // Past the last token it is the last, so that no load leaves the page. No result depends on it:
            // no row sees such a token, whatever its logit, and `add_values` stops before it.
            let token = min(first_token + i / CHUNK_VECS, split.tokens - 1u);
            var k = vec4<f32>();
            if (v < HEAD_VECS) {
                k = key_vector(split, head, token, v);
            }
            sh[SH_KEYS + i] = k;
        }
        workgroupBarrier();
        // Sums of 16 channels, then the sum of these: a long sum would round more. The bound is not constant,
        // so that no compiler unrolls the loop and loads all vectors at once, for which there are not
        // registers enough.
        var part = TileLogits();
        for (var v = 0u; v < min(CHUNK_VECS, HEAD_VECS - first); v++) {
            part.a += products(row, column, v);
            if (TOKENS_EACH > 1u) {
                part.b += products(row, column + COLUMNS, v);
            }
        }
        logits.a += part.a;
        logits.b += part.b;
    }
    return logits;
}

// Largest of each row over a row group's invocations, in two steps: loads of all at once would need too many
// registers. Begins and ends with a barrier.
fn row_max(x: vec4<f32>, local: u32) -> vec4<f32> {
    workgroupBarrier();
    sh[local] = x;
    workgroupBarrier();
    let near = local - local % REDUCE_STEP;
    var most = sh[near];
    for (var i = 1u; i < REDUCE_STEP; i++) {
        most = max(most, sh[near + i]);
    }
    workgroupBarrier();
    sh[local] = most;
    workgroupBarrier();
    let first = local - local % COLUMNS;
    for (var i = 0u; i < COLUMNS; i += REDUCE_STEP) {
        most = max(most, sh[first + i]);
    }
    workgroupBarrier();
    return most;
}

// Sum of each row over a row group's invocations, in their order. Begins and ends with a barrier.
fn row_sum(x: vec4<f32>, local: u32) -> vec4<f32> {
    workgroupBarrier();
    sh[local] = x;
    workgroupBarrier();
    let near = local - local % REDUCE_STEP;
    var part = sh[near];
    for (var i = 1u; i < REDUCE_STEP; i++) {
        part += sh[near + i];
    }
    workgroupBarrier();
    sh[local] = part;
    workgroupBarrier();
    let first = local - local % COLUMNS;
    var sum = sh[first];
    for (var i = REDUCE_STEP; i < COLUMNS; i += REDUCE_STEP) {
        sum += sh[first + i];
    }
    workgroupBarrier();
    return sum;
}

// Joins the sums of a key tile to those of the tokens before. One long chain of additions would lose digits
// with the square root of the context.
fn join_sums(sums: ptr<function, TileSums>, s: vec4<f32>, part: TileSums) {
    (*sums).a0 = fma((*sums).a0, vec4<f32>(s.x), part.a0);
    (*sums).a1 = fma((*sums).a1, vec4<f32>(s.y), part.a1);
    (*sums).a2 = fma((*sums).a2, vec4<f32>(s.z), part.a2);
    (*sums).a3 = fma((*sums).a3, vec4<f32>(s.w), part.a3);
    if (OUTPUTS_EACH > 1u) {
        (*sums).b0 = fma((*sums).b0, vec4<f32>(s.x), part.b0);
        (*sums).b1 = fma((*sums).b1, vec4<f32>(s.y), part.b1);
        (*sums).b2 = fma((*sums).b2, vec4<f32>(s.z), part.b2);
        (*sums).b3 = fma((*sums).b3, vec4<f32>(s.w), part.b3);
    }
}

// Adds the weighted values of the tile's tokens. Begins with a barrier.
fn add_values(
    sums: ptr<function, TileSums>, split: Split, head: u32, first_token: u32, row_group: u32, column: u32, local: u32) {
    // Invocations beyond the row's vectors repeat its last; their sums are not written.
    let at_a = min(column, HEAD_VECS - 1u);
    let at_b = min(column + COLUMNS, HEAD_VECS - 1u);
    for (var first = 0u; first < KEY_TILE; first += VALUE_TOKENS) {
        workgroupBarrier();
        // As in `tile_logits`: the sums below stop at the last token.
        for (var i = local; i < VALUE_TOKENS * HEAD_VECS; i += PREFILL_WORKGROUP) {
            let token = min(first_token + first + i / HEAD_VECS, split.tokens - 1u);
            sh[i] = value_vector(split, head, token, i % HEAD_VECS);
        }
        workgroupBarrier();
        // A bound that is not constant: compilers unroll a constant one, and the loads of all tokens need too
        // many registers.
        let tokens = min(VALUE_TOKENS, split.tokens - min(first_token + first, split.tokens));
        for (var t = 0u; t < tokens; t++) {
            let p = sh[SH_WEIGHTS + (first + t) * ROW_QUADS + row_group];
            let x = sh[t * HEAD_VECS + at_a];
            (*sums).a0 = fma(vec4<f32>(p.x), x, (*sums).a0);
            (*sums).a1 = fma(vec4<f32>(p.y), x, (*sums).a1);
            (*sums).a2 = fma(vec4<f32>(p.z), x, (*sums).a2);
            (*sums).a3 = fma(vec4<f32>(p.w), x, (*sums).a3);
            if (OUTPUTS_EACH > 1u) {
                let y = sh[t * HEAD_VECS + at_b];
                (*sums).b0 = fma(vec4<f32>(p.x), y, (*sums).b0);
                (*sums).b1 = fma(vec4<f32>(p.y), y, (*sums).b1);
                (*sums).b2 = fma(vec4<f32>(p.z), y, (*sums).b2);
                (*sums).b3 = fma(vec4<f32>(p.w), y, (*sums).b3);
            }
        }
    }
}

fn store_sums(at: u32, column: u32, a: vec4<f32>, b: vec4<f32>) {
    if (column < HEAD_VECS) {
        partials[at + 1u + column] = a;
    }
    if (OUTPUTS_EACH > 1u && column + COLUMNS < HEAD_VECS) {
        partials[at + 1u + column + COLUMNS] = b;
    }
}

fn prefill_run(workgroup: vec3<u32>, local: u32) {
    let item = work_item(workgroup);
    if (item >= params.count) {
        return;
    }
    let head = params.first_head + workgroup.y;
    let run = read_run(item);
    let tile = read_tile(run.tile);
    let column = local % COLUMNS;
    let row_group = local / COLUMNS;
    let row = 4u * row_group;
    let at0 = partial_at(run.partial, row, head);
    let at1 = partial_at(run.partial, row + 1u, head);
    let at2 = partial_at(run.partial, row + 2u, head);
    let at3 = partial_at(run.partial, row + 3u, head);

    var sums = TileSums();
    var highest = vec4<f32>(UNSEEN);
    var total = vec4<f32>();
    if (run.fresh == 0u) {
        let p0 = partials[at0];
        let p1 = partials[at1];
        let p2 = partials[at2];
        let p3 = partials[at3];
        highest = vec4<f32>(p0.x, p1.x, p2.x, p3.x);
        total = vec4<f32>(p0.y, p1.y, p2.y, p3.y);
        let a = 1u + min(column, HEAD_VECS - 1u);
        let b = 1u + min(column + COLUMNS, HEAD_VECS - 1u);
        sums = TileSums(partials[at0 + a], partials[at1 + a], partials[at2 + a], partials[at3 + a],
            partials[at0 + b], partials[at1 + b], partials[at2 + b], partials[at3 + b]);
    }
    // Every invocation has read its state before any writes the maxima and totals.
    storageBarrier();

    // The tile's first and last query: tokens that no row sees are left out.
    let first_query = tile.position + tile.first_row / HEADS_PER_KV;
    let last_query = tile.position + (tile.first_row + tile.rows - 1u) / HEADS_PER_KV;
    let oldest = max(first_query + 1u, params.sliding_window) - params.sliding_window;
    for (var i = 0u; i < run.splits; i++) {
        let split = run_split(run, i);
        var weights = vec4<f32>();
        for (var token = 0u; token < split.tokens; token += KEY_TILE) {
            let position = split.first_position + token;
            if (position > last_query || position + KEY_TILE <= oldest) {
                continue;
            }
            var logits = tile_logits(tile, split, head, token, row, column, local);
            if (has_soft_cap(split)) {
                logits.a = capped(logits.a);
                logits.b = capped(logits.b);
            }
            let seen_a = rows_that_see(tile, split, row, token + column);
            var most = ranked(logits.a, seen_a);
            var seen_b = vec4<bool>();
            if (TOKENS_EACH > 1u) {
                seen_b = rows_that_see(tile, split, row, token + column + COLUMNS);
                most = max(most, ranked(logits.b, seen_b));
            }
            let before = highest;
            highest = max(highest, row_max(most, local));
            let shrink = exp2(before - highest);
            let p = select(vec4<f32>(), exp2(logits.a - highest), seen_a);
            sh[SH_WEIGHTS + column * ROW_QUADS + row_group] = p;
            weights = fma(weights, shrink, p);
            if (TOKENS_EACH > 1u) {
                let q = select(vec4<f32>(), exp2(logits.b - highest), seen_b);
                sh[SH_WEIGHTS + (column + COLUMNS) * ROW_QUADS + row_group] = q;
                weights += q;
            }
            total *= shrink;
            var part = TileSums();
            add_values(&part, split, head, token, row_group, column, local);
            join_sums(&sums, shrink, part);
        }
        // At the end of each split, not of the run, so that where runs end changes no bit.
        total += row_sum(weights, local);
    }

    let left = tile.rows - min(row, tile.rows);
    if (left > 0u) {
        store_sums(at0, column, sums.a0, sums.b0);
        if (column == 0u) {
            partials[at0] = vec4<f32>(highest.x, total.x, 0.0, 0.0);
        }
    }
    if (left > 1u) {
        store_sums(at1, column, sums.a1, sums.b1);
        if (column == 0u) {
            partials[at1] = vec4<f32>(highest.y, total.y, 0.0, 0.0);
        }
    }
    if (left > 2u) {
        store_sums(at2, column, sums.a2, sums.b2);
        if (column == 0u) {
            partials[at2] = vec4<f32>(highest.z, total.z, 0.0, 0.0);
        }
    }
    if (left > 3u) {
        store_sums(at3, column, sums.a3, sums.b3);
        if (column == 0u) {
            partials[at3] = vec4<f32>(highest.w, total.w, 0.0, 0.0);
        }
    }
}
