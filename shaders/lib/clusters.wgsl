// Attention by clusters of invocations that talk through subgroup shuffles: no workgroup memory, no barrier.
// The pieces of the pass add where keys and values come from: lib/clusters_packed.wgsl and
// lib/clusters_unpacked.wgsl.
//
// A cluster of LANES invocations reads the splits of a run for one KV head and KEY_ROWS rows from end to end,
// UNIT tokens at a time. For keys and values a lane owns 16 channels, for the softmax four tokens of the
// unit; the running maximum is that of the unit or of any before it. Every load is a vec4 of which all is
// used. It needs one subgroup to hold a cluster, and the invocations of a workgroup numbered as their
// subgroups are: the host runs lane_order.wgsl before it chooses these kernels.
//
// Constants: F32, HEADS_PER_KV, HEAD_DIM, ITEMS_AT_MOST, KEYS_ROTATED, KEY_ROWS, LANES, LOGIT_SCALE, PREFILL,
// READS_PACKED, READS_UNPACKED, ROW_GROUPS, WORKGROUP.
// Records: RowTile, TileRun.

@group(1) @binding(2) var<storage, read> host_queries4: array<vec4<u32>>;

// Tokens of one round: four per lane.
const UNIT: u32 = 4u * LANES;

// Per row (of up to KEY_ROWS): four tokens.
struct Logits {
    r0: vec4<f32>,
    r1: vec4<f32>,
    r2: vec4<f32>,
    r3: vec4<f32>,
}

// a + s * b.
fn add_scaled(a: Parts, s: f32, b: Parts) -> Parts {
    let v = vec4<f32>(s);
    return Parts(fma(v, b.p0, a.p0), fma(v, b.p1, a.p1), fma(v, b.p2, a.p2), fma(v, b.p3, a.p3));
}

// Adds each row's part of its query times four channels of four tokens.
fn add_rows(sum: ptr<function, Logits>, k: Parts, q0: vec4<f32>, q1: vec4<f32>, q2: vec4<f32>, q3: vec4<f32>) {
    (*sum).r0 = add_products((*sum).r0, q0, k);
    if (KEY_ROWS > 1u) {
        (*sum).r1 = add_products((*sum).r1, q1, k);
    }
    if (KEY_ROWS > 2u) {
        (*sum).r2 = add_products((*sum).r2, q2, k);
        (*sum).r3 = add_products((*sum).r3, q3, k);
    }
}

// Sums over the lanes of a cluster: all of them get the same bits, since each step adds the same two numbers
// in both.
fn cluster_sum(x: vec4<f32>) -> vec4<f32> {
    var sum = x + subgroupShuffleXor(x, 1u);
    sum += subgroupShuffleXor(sum, 2u);
    if (LANES > 4u) {
        sum += subgroupShuffleXor(sum, 4u);
    }
    return sum;
}

fn cluster_max(x: vec4<f32>) -> vec4<f32> {
    var most = max(x, subgroupShuffleXor(x, 1u));
    most = max(most, subgroupShuffleXor(most, 2u));
    if (LANES > 4u) {
        most = max(most, subgroupShuffleXor(most, 4u));
    }
    return most;
}

// 16 channels of a query from element `first` on, in vectors if the tensor is aligned to them.
fn query_channels(first: u32) -> Parts {
    let alignment = select(8u, 4u, io.q.dtype == F32);
    if ((io.q.offset | io.q.token_stride | io.q.head_stride) % alignment != 0u) {
        return Parts(query_vector(first), query_vector(first + 4u), query_vector(first + 8u), query_vector(first + 12u));
    }
    if (io.q.dtype == F32) {
        let at = first / 4u;
        return Parts(
            query_bits(host_queries4[at]),
            query_bits(host_queries4[at + 1u]),
            query_bits(host_queries4[at + 2u]),
            query_bits(host_queries4[at + 3u]),
        );
    }
    let low = host_queries4[first / 8u];
    let high = host_queries4[first / 8u + 1u];
    return Parts(query_pairs(low.xy), query_pairs(low.zw), query_pairs(high.xy), query_pairs(high.zw));
}

// `finite_or_nan` of four channels.
fn query_bits(bits: vec4<u32>) -> vec4<f32> {
    let exponents = vec4<u32>(0x7f800000u);
    return bitcast<vec4<f32>>(select(bits, vec4<u32>(QUIET_NAN), (bits & exponents) == exponents));
}

// Four channels of a 16-bit tensor.
fn query_pairs(words: vec2<u32>) -> vec4<f32> {
    let d = io.q.dtype;
    return query_bits(vec4<u32>(
        element_bits(d, words.x, 0u), element_bits(d, words.x, 1u), element_bits(d, words.y, 0u), element_bits(d, words.y, 1u)));
}

// A row's scaled query in the lane's channels.
fn lane_query(tile: RowTile, head: u32, row: u32, lane: u32, unpacked: bool) -> Parts {
    if (row >= tile.rows) {
        return Parts();
    }
    let first = query_first(tile, head, row, unpacked) + 16u * lane;
    let s = vec4<f32>(LOGIT_SCALE);
    let x = query_channels(first);
    return Parts(x.p0 * s, x.p1 * s, x.p2 * s, x.p3 * s);
}

// The lane's 16 channels of up to four rows.
struct Rows {
    r0: Parts,
    r1: Parts,
    r2: Parts,
    r3: Parts,
}

// Gives the sum over the lanes of their shares of a quad's logits to the lane that owns the quad.
fn give(logits: ptr<function, Logits>, share: Logits, own: bool) {
    let o = vec4<bool>(own);
    (*logits).r0 = select((*logits).r0, cluster_sum(share.r0), o);
    if (KEY_ROWS > 1u) {
        (*logits).r1 = select((*logits).r1, cluster_sum(share.r1), o);
    }
    if (KEY_ROWS > 2u) {
        (*logits).r2 = select((*logits).r2, cluster_sum(share.r2), o);
        (*logits).r3 = select((*logits).r3, cluster_sum(share.r3), o);
    }
}

// Weighted sums of the lane's channels, and of the minima.
struct Sums {
    r0: Parts,
    r1: Parts,
    r2: Parts,
    r3: Parts,
    zero: vec4<f32>,
}

fn joined(sum: Parts, shrink: f32, part: Parts, zero: f32) -> Parts {
    let s = vec4<f32>(shrink);
    let z = vec4<f32>(zero);
    return Parts(
        fma(sum.p0, s, part.p0 + z), fma(sum.p1, s, part.p1 + z), fma(sum.p2, s, part.p2 + z), fma(sum.p3, s, part.p3 + z));
}

// Adds a token's 16 channels with the rows' weights `p`.
fn add_weighted(sums: ptr<function, Sums>, x: Parts, p: vec4<f32>) {
    (*sums).r0 = add_scaled((*sums).r0, p.x, x);
    if (KEY_ROWS > 1u) {
        (*sums).r1 = add_scaled((*sums).r1, p.y, x);
    }
    if (KEY_ROWS > 2u) {
        (*sums).r2 = add_scaled((*sums).r2, p.z, x);
        (*sums).r3 = add_scaled((*sums).r3, p.w, x);
    }
}

fn write_row(partial: u32, row: u32, head: u32, chunk: u32, x: Parts) {
    let at = partial_at(partial, row, head) + 1u + 4u * chunk;
    let vecs = HEAD_DIM / 4u - 4u * chunk;
    partials[at] = x.p0;
    if (vecs > 1u) { partials[at + 1u] = x.p1; }
    if (vecs > 2u) { partials[at + 2u] = x.p2; }
    if (vecs > 3u) { partials[at + 3u] = x.p3; }
}

fn write_partial(partial: u32, row: u32, head: u32, lane: u32, highest: f32, weights: f32, a: Parts) {
    write_row(partial, row, head, lane, a);
    if (lane == 0u) {
        partials[partial_at(partial, row, head)] = vec4<f32>(highest, weights, 0.0, 0.0);
    }
}

fn read_partial(partial: u32, row: u32, head: u32, lane: u32) -> Parts {
    let at = partial_at(partial, row, head) + 1u + 4u * lane;
    return Parts(partials[at], partials[at + 1u], partials[at + 2u], partials[at + 3u]);
}

fn attend_cluster(workgroup: vec3<u32>, local: u32, in_subgroup: u32) {
    let lane = in_subgroup % LANES;
    let base = in_subgroup - lane;
    // Clusters beyond the last repeat its work and write nothing, so that no shuffle lies in divergent flow.
    let cluster = workgroup.y * (WORKGROUP / LANES) + local / LANES;
    let clusters = params.heads * ROW_GROUPS;
    let used = min(cluster, clusters - 1u);
    let head = params.first_head + used / ROW_GROUPS;
    let row = (used % ROW_GROUPS) * KEY_ROWS;

    // Several items, so that the queries are loaded once. Twin of the division: `workgroups` in
    // src/gpu/kernels/mod.rs.
    let each = clamp(params.count / 16u, 1u, ITEMS_AT_MOST);
    let first_item = work_item(workgroup) * each;
    let end = min(first_item + each, params.count);
    var loaded = 0xffffffffu;
    var tile = RowTile();
    var q = Rows();
    for (var item = first_item; item < end; item++) {
        let run = read_run(item);
        // A pass of long chunks over unpacked tokens has the host's queries.
        let unpacked = !PREFILL && run.unpacked != 0u;
        let wanted = 2u * run.tile + select(0u, 1u, KEYS_ROTATED && unpacked);
        if (wanted != loaded) {
            loaded = wanted;
            tile = read_tile(run.tile);
            q.r0 = lane_query(tile, head, row, lane, unpacked);
            if (KEY_ROWS > 1u) {
                q.r1 = lane_query(tile, head, row + 1u, lane, unpacked);
            }
            if (KEY_ROWS > 2u) {
                q.r2 = lane_query(tile, head, row + 2u, lane, unpacked);
                q.r3 = lane_query(tile, head, row + 3u, lane, unpacked);
            }
        }
        attend_run(run, tile, q, head, row, lane, base, cluster < clusters);
    }
}

// One item of a cluster, whose partial result is written if `writes`.
fn attend_run(run: TileRun, tile: RowTile, q: Rows, head: u32, row: u32, lane: u32, base: u32, writes: bool) {
    var sums = Sums();
    var highest = vec4<f32>(UNSEEN);
    var total = vec4<f32>();
    if (run.fresh == 0u) {
        let p0 = partials[partial_at(run.partial, row, head)];
        highest.x = p0.x;
        total.x = p0.y;
        sums.r0 = read_partial(run.partial, row, head, lane);
        if (KEY_ROWS > 1u) {
            let p1 = partials[partial_at(run.partial, row + 1u, head)];
            highest.y = p1.x;
            total.y = p1.y;
            sums.r1 = read_partial(run.partial, row + 1u, head, lane);
        }
        if (KEY_ROWS > 2u) {
            let p2 = partials[partial_at(run.partial, row + 2u, head)];
            let p3 = partials[partial_at(run.partial, row + 3u, head)];
            highest.z = p2.x;
            highest.w = p3.x;
            total.z = p2.y;
            total.w = p3.y;
            sums.r2 = read_partial(run.partial, row + 2u, head, lane);
            sums.r3 = read_partial(run.partial, row + 3u, head, lane);
        }
    }
    // Known where the kernel is made for one of them.
    let unpacked = READS_UNPACKED && (!READS_PACKED || run.unpacked != 0u);

    // The tile's first and last query: units that no row of the tile sees are left out.
    let last_query = tile.position + (tile.first_row + tile.rows - 1u) / HEADS_PER_KV;
    let first_query = tile.position + tile.first_row / HEADS_PER_KV;
    let oldest = max(first_query + 1u, params.sliding_window) - params.sliding_window;
    for (var i = 0u; i < run.splits; i++) {
        let split = run_split(run, i);
        // The lane's own.
        var weights = vec4<f32>();
        for (var first = 0u; first < split.tokens; first += UNIT) {
            let position = split.first_position + first;
            if (position > last_query || position + UNIT <= oldest) {
                continue;
            }
            var logits = Logits();
            if (unpacked) {
                logits = token_logits(split, head, first, lane, base, q);
            } else {
                logits = packed_logits(split, head, first, lane, base, q);
            }
            if (has_soft_cap(split)) {
                logits.r0 = capped(logits.r0);
                logits.r1 = capped(logits.r1);
                logits.r2 = capped(logits.r2);
                logits.r3 = capped(logits.r3);
            }

            // Softmax of the lane's own four tokens, relative to the largest logit so far.
            let token = first + 4u * lane;
            let seen0 = sees(tile, split, row, token);
            let seen1 = sees(tile, split, row + 1u, token);
            let seen2 = sees(tile, split, row + 2u, token);
            let seen3 = sees(tile, split, row + 3u, token);
            let most = vec4<f32>(
                largest(logits.r0, seen0),
                largest(logits.r1, seen1),
                largest(logits.r2, seen2),
                largest(logits.r3, seen3),
            );
            let before = highest;
            highest = max(highest, cluster_max(most));
            let shrink = exp2(before - highest);
            let p0 = select(vec4<f32>(), exp2(logits.r0 - highest.x), seen0);
            let p1 = select(vec4<f32>(), exp2(logits.r1 - highest.y), seen1);
            let p2 = select(vec4<f32>(), exp2(logits.r2 - highest.z), seen2);
            let p3 = select(vec4<f32>(), exp2(logits.r3 - highest.w), seen3);
            let one = vec4<f32>(1.0);
            weights = fma(weights, shrink, vec4<f32>(dot(p0, one), dot(p1, one), dot(p2, one), dot(p3, one)));
            total *= shrink;

            var part = Sums();
            if (unpacked) {
                part = token_values(split, head, first, lane, base, Logits(p0, p1, p2, p3));
            } else {
                part = packed_values(split, head, first, lane, base, Logits(p0, p1, p2, p3));
            }
            // Codes and minima cancel where a group has an outlier: within the unit, before they meet larger
            // sums.
            sums.r0 = joined(sums.r0, shrink.x, part.r0, part.zero.x);
            if (KEY_ROWS > 1u) {
                sums.r1 = joined(sums.r1, shrink.y, part.r1, part.zero.y);
            }
            if (KEY_ROWS > 2u) {
                sums.r2 = joined(sums.r2, shrink.z, part.r2, part.zero.z);
                sums.r3 = joined(sums.r3, shrink.w, part.r3, part.zero.w);
            }
        }
        // At the end of each split, not of the run, so that where runs end changes no bit.
        total += cluster_sum(weights);
    }

    let left = select(0u, tile.rows - min(row, tile.rows), writes);
    if (left > 0u) {
        write_partial(run.partial, row, head, lane, highest.x, total.x, sums.r0);
    }
    if (KEY_ROWS > 1u && left > 1u) {
        write_partial(run.partial, row + 1u, head, lane, highest.y, total.y, sums.r1);
    }
    if (KEY_ROWS > 2u && left > 2u) {
        write_partial(run.partial, row + 2u, head, lane, highest.z, total.z, sums.r2);
    }
    if (KEY_ROWS > 2u && left > 3u) {
        write_partial(run.partial, row + 3u, head, lane, highest.w, total.w, sums.r3);
    }
}
