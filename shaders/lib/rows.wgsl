// Rows, splits and partial results: what every attention pass shares.
//
// A row is a (query, head of the KV head) pair, so the keys and values of a KV head are read and unpacked
// once for all its query heads. Logits are in base 2: queries are multiplied by LOGIT_SCALE = softmax_scale *
// log2(e) as they are loaded.
//
// Constants: HEADS_PER_KV, HEAD_DIM, PARTIAL_VECS, PREFILL, SOFT_CAPS.
// Records: RowTile, AttendItem, Split, TileRun.

@group(0) @binding(4) var<storage, read_write> partials: array<vec4<f32>>;
@group(1) @binding(0) var<storage, read> io: Io;
@group(1) @binding(1) var<storage, read> host_queries: array<u32>;

// Per row (of up to KEY_ROWS): four tokens.
struct Logits {
    r0: vec4<f32>,
    r1: vec4<f32>,
    r2: vec4<f32>,
    r3: vec4<f32>,
}

// The run of an item of work. In a decode step it is the only split of a partial result of its own, which is
// the end of the item's record.
fn read_run(item: u32) -> TileRun {
    if (PREFILL) {
        return tile_run_at(params.first + TILE_RUN_WORDS * item);
    }
    let at = params.first + ATTEND_ITEM_WORDS * item;
    let own = attend_item_at(at);
    return TileRun(own.tile, own.partial, at + ATTEND_ITEM_WORDS - SPLIT_WORDS, 1u, 1u);
}

fn run_split(run: TileRun, i: u32) -> Split {
    return split_at(run.first_split + SPLIT_WORDS * i);
}

// 16 channels, in natural order or one vector per part.
struct Parts {
    p0: vec4<f32>,
    p1: vec4<f32>,
    p2: vec4<f32>,
    p3: vec4<f32>,
}

// a + s * b.
fn add_scaled(a: Parts, s: f32, b: Parts) -> Parts {
    let v = vec4<f32>(s);
    return Parts(fma(v, b.p0, a.p0), fma(v, b.p1, a.p1), fma(v, b.p2, a.p2), fma(v, b.p3, a.p3));
}

// 16 channels from eight words of 16-bit elements.
fn sixteen_channels(format: u32, low: vec4<u32>, high: vec4<u32>) -> Parts {
    return Parts(
        vec4<f32>(pair(format, low.x), pair(format, low.y)),
        vec4<f32>(pair(format, low.z), pair(format, low.w)),
        vec4<f32>(pair(format, high.x), pair(format, high.y)),
        vec4<f32>(pair(format, high.z), pair(format, high.w)),
    );
}

fn read_tile(tile: u32) -> RowTile {
    return row_tile_at(params.tiles + ROW_TILE_WORDS * tile);
}

// Element of the host's queries where a row's query begins.
fn query_first(tile: RowTile, head: u32, row: u32) -> u32 {
    let r = tile.first_row + row;
    let query_head = head * HEADS_PER_KV + r % HEADS_PER_KV;
    return io.q.offset + (tile.first_query + r / HEADS_PER_KV) * io.q.token_stride
        + query_head * io.q.head_stride;
}

fn query_element(index: u32) -> f32 {
    let word = host_queries[element_word(io.q.dtype, index)];
    return bitcast<f32>(finite_or_nan(element_bits(io.q.dtype, word, index)));
}

// Which of the four tokens from `token` on row `row` sees: those up to its own position, from the first of
// its sliding window on.
fn sees(tile: RowTile, split: Split, row: u32, token: u32) -> vec4<bool> {
    let position = tile.position + (tile.first_row + row) / HEADS_PER_KV;
    // Counts, so that nothing wraps around: of tokens up to the position, and of those before the sliding
    // window.
    let end = min(max(position + 1u, split.first_position) - split.first_position, split.tokens);
    let oldest = max(position + 1u, params.sliding_window) - params.sliding_window;
    let start = max(oldest, split.first_position) - split.first_position;
    let t = vec4<u32>(token, token + 1u, token + 2u, token + 3u);
    return (t < vec4<u32>(end)) & (t >= vec4<u32>(start));
}

// The number of tokens, which is not 0, makes the condition depend on a storage buffer: see shaders/README.md
// on branches on uniforms.
fn has_soft_cap(split: Split) -> bool {
    return SOFT_CAPS && ((params.soft_cap > 0.0) & (split.tokens > 0u));
}

// Which logits are no numbers.
fn beyond(l: vec4<f32>) -> vec4<bool> {
    return (bitcast<vec4<u32>>(l) & vec4<u32>(0x7fffffffu)) >= vec4<u32>(BEYOND);
}

// cap * tanh(l / cap). The built-in tanh may overflow or be coarse; this is exact to a few units in the last
// place of the cap. What is no number stays so.
fn capped(l: vec4<f32>) -> vec4<f32> {
    let x = l / params.soft_cap;
    let a = abs(x);
    let t = exp2(a * -2.8853900817779268);
    let s = x * x;
    // The series where (1 - t) / (1 + t) would lose digits, as a correction of l.
    let series = s * (-0.333333333 + s * (0.133333333 + s * (-0.0539682540 + s * 0.0218694885)));
    let far = sign(x) * params.soft_cap * ((1.0 - t) / (1.0 + t));
    return select(select(far, fma(l, series, l), a < vec4<f32>(0.25)), l, beyond(l));
}

// Logits as a maximum takes them: what is not seen lies below all others, what is no number above.
fn ranked(logits: vec4<f32>, seen: vec4<bool>) -> vec4<f32> {
    return select(vec4<f32>(UNSEEN), select(logits, vec4<f32>(NOT_A_NUMBER), beyond(logits)), seen);
}

fn largest(logits: vec4<f32>, seen: vec4<bool>) -> f32 {
    let l = ranked(logits, seen);
    return max(max(l.x, l.y), max(l.z, l.w));
}

// A row's partial result in the attention scratch: (maximum, sum of weights), then the output.
fn partial_at(partial: u32, row: u32, head: u32) -> u32 {
    return ((partial + row) * params.heads + head - params.first_head) * PARTIAL_VECS;
}

fn write_row(partial: u32, row: u32, head: u32, chunk: u32, s0: vec4<f32>, s1: vec4<f32>, s2: vec4<f32>, s3: vec4<f32>) {
    let at = partial_at(partial, row, head) + 1u + 4u * chunk;
    let vecs = HEAD_DIM / 4u - 4u * chunk;
    partials[at] = s0;
    if (vecs > 1u) { partials[at + 1u] = s1; }
    if (vecs > 2u) { partials[at + 2u] = s2; }
    if (vecs > 3u) { partials[at + 3u] = s3; }
}
