// Joins the partial results of each row, in order of position, and writes the attention output. Twin:
// src/oracle/merge.rs.
//
// | binding | what | access |
// |---|---|---|
// | 0, 1 of group 0 | params, plan: tiles | read |
// | 2 | partial results | read |
// | 0 of group 1 | io | read |
// | 1 | host's output | write |
// | 2 | host's sink logits, if any | read |
// | 3 | host's log-sum-exp, if any | write |
//
// Grid: x, z rows of all tiles; y KV heads. An invocation owns four channels and a share of the splits.
//
// Constants: ABSENT, F16, F32, HEADS_PER_KV, HEAD_DIM, MERGE_SHARES, MERGE_VECS, MERGE_WORKGROUP,
// PARTIAL_VECS, ROTATION_SIZE, ROWS, UNROTATION_SCALE, VALUES_ROTATED.
// Records: RowTile.

@group(0) @binding(2) var<storage, read> partials: array<vec4<f32>>;
@group(1) @binding(0) var<storage, read> io: Io;
@group(1) @binding(1) var<storage, read_write> host_output: array<u32>;
@group(1) @binding(2) var<storage, read> host_sinks: array<u32>;
@group(1) @binding(3) var<storage, read_write> host_lse: array<u32>;

const VECS: u32 = HEAD_DIM / 4u;
const LOG2_E: f32 = 1.4426950408889634;
const LN_2: f32 = 0.6931471805599453;

var<workgroup> sh_max: array<f32, MERGE_WORKGROUP>;
var<workgroup> sh_sum: array<f32, MERGE_WORKGROUP>;
var<workgroup> sh_out: array<vec4<f32>, MERGE_WORKGROUP>;

// Rounds an output to f16, to nearest even, subnormals included. Outputs are averages of values and so never
// beyond the largest f16.
fn to_f16(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    let magnitude = min(bits & 0x7fffffffu, 0x477fe000u);
    // Subnormals are multiples of 2^-24: adding 0.5 leaves them, rounded, in the low bits of the sum.
    let small = bitcast<u32>(bitcast<f32>(magnitude) + 0.5) - 0x3f000000u;
    let normal = (round_even(magnitude, 13u) >> 13u) - (112u << 10u);
    return ((bits >> 16u) & 0x8000u) | select(small, normal, magnitude >= 0x38800000u);
}

// Rounds an output to bf16, to nearest even.
fn to_bf16(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    return ((bits & 0x80000000u) | round_even(bits & 0x7fffffffu, 16u)) >> 16u;
}

fn write_output(index: u32, x: vec4<f32>) {
    if (io.out.dtype == F32) {
        host_output[index] = bitcast<u32>(x.x);
        host_output[index + 1u] = bitcast<u32>(x.y);
        host_output[index + 2u] = bitcast<u32>(x.z);
        host_output[index + 3u] = bitcast<u32>(x.w);
    } else if (io.out.dtype == F16) {
        host_output[index / 2u] = to_f16(x.x) | (to_f16(x.y) << 16u);
        host_output[index / 2u + 1u] = to_f16(x.z) | (to_f16(x.w) << 16u);
    } else {
        host_output[index / 2u] = to_bf16(x.x) | (to_bf16(x.y) << 16u);
        host_output[index / 2u + 1u] = to_bf16(x.z) | (to_bf16(x.w) << 16u);
    }
}

// The same for what is no number.
fn write_nan(index: u32) {
    if (io.out.dtype == F32) {
        for (var i = 0u; i < 4u; i++) {
            host_output[index + i] = QUIET_NAN;
        }
    } else {
        let word = select(QUIET_NAN | (QUIET_NAN >> 16u), 0x7e007e00u, io.out.dtype == F16);
        host_output[index / 2u] = word;
        host_output[index / 2u + 1u] = word;
    }
}

// The sum of all shares, rotated back: vector `v` for invocation `v`. Butterflies at distances 1, 2, 4 …,
// each through workgroup memory. Ends with a barrier.
fn joined_and_unrotated(share: vec4<f32>, local: u32) -> vec4<f32> {
    sh_out[local] = share;
    workgroupBarrier();
    let v = min(local, VECS - 1u);
    var x = sh_out[v];
    for (var i = 1u; i < MERGE_SHARES; i++) {
        x += sh_out[i * MERGE_VECS + v];
    }
    // Within a vector.
    x = vec4<f32>(x.x + x.y, x.x - x.y, x.z + x.w, x.z - x.w);
    x = vec4<f32>(x.x + x.z, x.y + x.w, x.x - x.z, x.y - x.w);
    for (var stride = 1u; stride < ROTATION_SIZE / 4u; stride *= 2u) {
        workgroupBarrier();
        sh_out[local] = x;
        workgroupBarrier();
        let other = sh_out[v ^ stride];
        x = select(x + other, other - x, (v & stride) != 0u);
    }
    workgroupBarrier();
    return x * UNROTATION_SCALE;
}

@compute @workgroup_size(MERGE_WORKGROUP)
fn merge(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let item = work_item(workgroup);
    if (item >= params.count) {
        return;
    }
    let head = params.first_head + workgroup.y;
    let tile = row_tile_at(params.first + ROW_TILE_WORDS * (item / ROWS));
    let row = item % ROWS;
    if (row >= tile.rows) {
        return;
    }
    let splits = tile.partials;
    let first = ((tile.first_partial + row) * params.heads + workgroup.y) * PARTIAL_VECS;
    let stride = ROWS * params.heads * PARTIAL_VECS;

    // The row's maximum: exact in any order.
    var highest = partials[first].x;
    for (var s = local; s < splits; s += MERGE_WORKGROUP) {
        highest = max(highest, partials[first + s * stride].x);
    }
    sh_max[local] = highest;
    for (var half = MERGE_WORKGROUP / 2u; half > 0u; half /= 2u) {
        workgroupBarrier();
        if (local < half) {
            sh_max[local] = max(sh_max[local], sh_max[local + half]);
        }
    }
    workgroupBarrier();
    highest = sh_max[0];
    let r = tile.first_row + row;
    let query = tile.first_query + r / HEADS_PER_KV;
    let query_head = head * HEADS_PER_KV + r % HEADS_PER_KV;

    // A learned sink: one more logit, without a value.
    var sink_weight = 0.0;
    if (io.sinks.dtype != ABSENT) {
        let index = io.sinks.offset + query_head * io.sinks.head_stride;
        let bits = element_bits(io.sinks.dtype, host_sinks[element_word(io.sinks.dtype, index)], index);
        let finite = (bits & 0x7f800000u) != 0x7f800000u;
        // -inf is the logit of no token. Any other that is no number makes the row none.
        let special = select(NOT_A_NUMBER, UNSEEN, bits == 0xff800000u);
        let sink = select(special, bitcast<f32>(bits) * LOG2_E, finite);
        highest = max(highest, sink);
        sink_weight = select(0.0, exp2(sink - highest), finite);
    }
    let is_number = bitcast<u32>(max(highest, 0.0)) < BEYOND;

    let v = local % MERGE_VECS;
    let share = local / MERGE_VECS;
    let per_share = (splits + MERGE_SHARES - 1u) / MERGE_SHARES;
    // Packed pages: their sums are of rotated values, if these are.
    let first_packed = tile.first_packed;
    let end_packed = first_packed + tile.packed;
    var sum = 0.0;
    var out = vec4<f32>();
    var rotated = vec4<f32>();
    if (share < MERGE_SHARES && v < VECS) {
        let end = min((share + 1u) * per_share, splits);
        var s = share * per_share;
        // Four at a time: a load takes far longer than what follows, and compilers do not move loads across
        // iterations.
        for (; s + 4u <= end; s += 4u) {
            let at = first + s * stride;
            let p0 = partials[at].xy;
            let p1 = partials[at + stride].xy;
            let p2 = partials[at + 2u * stride].xy;
            let p3 = partials[at + 3u * stride].xy;
            let o0 = partials[at + 1u + v];
            let o1 = partials[at + stride + 1u + v];
            let o2 = partials[at + 2u * stride + 1u + v];
            let o3 = partials[at + 3u * stride + 1u + v];
            let w = exp2(vec4<f32>(p0.x, p1.x, p2.x, p3.x) - highest);
            sum = fma(w.w, p3.y, fma(w.z, p2.y, fma(w.y, p1.y, fma(w.x, p0.y, sum))));
            var own = w;
            if (VALUES_ROTATED) {
                let at_split = vec4<u32>(s, s + 1u, s + 2u, s + 3u);
                let is_packed = (at_split >= vec4<u32>(first_packed)) & (at_split < vec4<u32>(end_packed));
                let packed = select(vec4<f32>(), w, is_packed);
                own = select(w, vec4<f32>(), is_packed);
                rotated = fma(vec4<f32>(packed.x), o0, rotated);
                rotated = fma(vec4<f32>(packed.y), o1, rotated);
                rotated = fma(vec4<f32>(packed.z), o2, rotated);
                rotated = fma(vec4<f32>(packed.w), o3, rotated);
            }
            out = fma(vec4<f32>(own.x), o0, out);
            out = fma(vec4<f32>(own.y), o1, out);
            out = fma(vec4<f32>(own.z), o2, out);
            out = fma(vec4<f32>(own.w), o3, out);
        }
        for (; s < end; s++) {
            let at = first + s * stride;
            let head_part = partials[at];
            let weight = exp2(head_part.x - highest);
            sum = fma(weight, head_part.y, sum);
            if (VALUES_ROTATED && s >= first_packed && s < end_packed) {
                rotated = fma(vec4<f32>(weight), partials[at + 1u + v], rotated);
            } else {
                out = fma(vec4<f32>(weight), partials[at + 1u + v], out);
            }
        }
    }
    var unrotated = vec4<f32>();
    if (VALUES_ROTATED) {
        unrotated = joined_and_unrotated(rotated, local);
    }
    sh_sum[local] = sum;
    sh_out[local] = out;
    workgroupBarrier();
    if (share == 0u && v < VECS) {
        for (var i = 1u; i < MERGE_SHARES; i++) {
            sum += sh_sum[i * MERGE_VECS + v];
            out += sh_out[i * MERGE_VECS + v];
        }
        sum += sink_weight;
        if (VALUES_ROTATED) {
            out += unrotated;
        }
        // A row that sees no token has zeros everywhere.
        let result = select(vec4<f32>(), out / sum, sum > 0.0);
        let at = io.out.offset + query * io.out.token_stride + query_head * io.out.head_stride + 4u * v;
        if (is_number) {
            write_output(at, result);
        } else {
            write_nan(at);
        }
        if (v == 0u && io.lse.dtype != ABSENT) {
            let lse = bitcast<u32>((highest + log2(sum)) * LN_2);
            let at = io.lse.offset + query * io.lse.token_stride + query_head * io.lse.head_stride;
            host_lse[at] = select(QUIET_NAN, select(0xff800000u, lse, sum > 0.0), is_number);
        }
    }
}
