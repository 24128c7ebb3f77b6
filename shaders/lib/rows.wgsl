// Rows, splits and partial results: what every attention pass shares.
//
// A row is a (query, head of the KV head) pair, so the keys and values of a KV head are read and unpacked
// once for all its query heads. Logits are in base 2: queries are multiplied by LOGIT_SCALE = softmax_scale *
// log2(e) as they are loaded.
//
// Constants: HEADS_PER_KV, HEAD_DIM, KEYS_ROTATED, PARTIAL_VECS, SOFT_CAPS.
// Records: RowTile, Split, TileRun.

@group(0) @binding(5) var<storage, read_write> partials: array<vec4<f32>>;
@group(1) @binding(0) var<storage, read> io: Io;
@group(1) @binding(1) var<storage, read> host_queries: array<u32>;

fn read_run(item: u32) -> TileRun {
    return tile_run_at(params.first + TILE_RUN_WORDS * item);
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

fn read_tile(tile: u32) -> RowTile {
    return row_tile_at(params.tiles + ROW_TILE_WORDS * tile);
}

// Element of the queries where a row's query begins. Where keys are rotated, packed and unpacked tokens have
// queries of their own, side by side.
fn query_first(tile: RowTile, head: u32, row: u32, unpacked: bool) -> u32 {
    let r = tile.first_row + row;
    let query_head = head * HEADS_PER_KV + r % HEADS_PER_KV;
    return io.q.offset + (tile.first_query + r / HEADS_PER_KV) * io.q.token_stride
        + query_head * io.q.head_stride + select(0u, HEAD_DIM, KEYS_ROTATED && unpacked);
}

fn query_element(index: u32) -> f32 {
    let word = host_queries[element_word(io.q.dtype, index)];
    return bitcast<f32>(finite_or_nan(element_bits(io.q.dtype, word, index)));
}

// Four elements of the queries.
fn query_vector(first: u32) -> vec4<f32> {
    return vec4<f32>(
        query_element(first), query_element(first + 1u), query_element(first + 2u), query_element(first + 3u));
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
