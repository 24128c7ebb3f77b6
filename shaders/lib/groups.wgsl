// The parameters of the groups of a head's block, for pack.wgsl. lib/rows_*.wgsl come before, with
// `row_bits`.
//
// Constants: CHANNEL_GROUP, CLIPPING, CLIP_LEAST_EXPONENT, CLIP_STEP, CLIP_STEPS, GROUP, HEAD_DIM,
// PACK_COMPACT, PACK_GROUPS, PACK_PARAMS, PACK_PER_TOKEN, PACK_ROW_GROUPS, PACK_WORKGROUP.

// Pairs of ends that clipping tries, and groups that a workgroup does so for at a time.
const CANDIDATES: u32 = CLIP_STEPS * CLIP_STEPS;
const CLIPPED_AT_ONCE: u32 = PACK_WORKGROUP / CANDIDATES;

// Of the groups that were fitted last.
var<workgroup> sh_param: array<u32, PACK_GROUPS>;
var<workgroup> sh_error: array<u32, PACK_WORKGROUP>;
var<workgroup> sh_tried: array<u32, PACK_WORKGROUP>;

// A group is a channel, over the block's tokens, or some channels of a token, of which the last may have
// fewer.
fn group_size(g: u32) -> u32 {
    if (PACK_PER_TOKEN) {
        return min(CHANNEL_GROUP, HEAD_DIM - (g % PACK_ROW_GROUPS) * CHANNEL_GROUP);
    }
    return GROUP;
}

// f32 bits of element `t` of a group.
fn group_bits(slots: u32, head: u32, g: u32, t: u32) -> u32 {
    if (PACK_PER_TOKEN) {
        return row_bits(slots, head, g / PACK_ROW_GROUPS, (g % PACK_ROW_GROUPS) * CHANNEL_GROUP + t);
    }
    return row_bits(slots, head, t, g);
}

fn group_of(token: u32, channel: u32) -> u32 {
    return select(channel, token * PACK_ROW_GROUPS + channel / CHANNEL_GROUP, PACK_PER_TOKEN);
}

// Order keys of a group's smallest and largest value.
fn group_ends(slots: u32, head: u32, g: u32) -> vec2<u32> {
    var low = 0xffffffffu;
    var high = 0u;
    for (var t = 0u; t < group_size(g); t++) {
        let key = order_key(group_bits(slots, head, g, t));
        low = min(low, key);
        high = max(high, key);
    }
    return vec2<u32>(low, high);
}

// Sum of squared errors of a group in units of 2^-12 of its range or so: integers, so that every backend
// makes the same choice.
fn group_error(slots: u32, head: u32, g: u32, param: u32, unit: f32) -> u32 {
    let scale = param_scale(param, PACK_COMPACT);
    let low = param_min(param, PACK_COMPACT);
    var sum = 0u;
    for (var t = 0u; t < group_size(g); t++) {
        let bits = group_bits(slots, head, g, t);
        let code = f32(code_of(param, bits));
        let above = clamp((bitcast<f32>(bits) - low) * unit, -1048576.0, 1048576.0);
        let level = min(code * scale * unit, 1048576.0);
        let n = min(u32(abs(i32(above) - i32(level))), 2047u);
        sum += n * n;
    }
    return sum;
}

// One candidate: the ends `i` and `j` steps nearer to the middle. Returns its parameter and its error.
fn try_ends(slots: u32, head: u32, g: u32, i: u32, j: u32) -> vec2<u32> {
    let ends = group_ends(slots, head, g);
    let low = bitcast<f32>(key_to_bits(ends.x));
    let high = bitcast<f32>(key_to_bits(ends.y));
    let range = bitcast<u32>(high - low);
    let exponent = i32((range >> 23u) & 0xffu) - 127;
    if (exponent < CLIP_LEAST_EXPONENT) {
        return vec2<u32>(group_param(ends.x, ends.y), 0u);
    }
    // Eight significant bits of the range, times at most five: exact products.
    let coarse = bitcast<f32>(range & 0xffff0000u) * CLIP_STEP;
    let nearer_low = order_key(bitcast<u32>(low + f32(i) * coarse));
    let nearer_high = order_key(bitcast<u32>(high - f32(j) * coarse));
    let param = group_param(nearer_low, nearer_high);
    let unit = bitcast<f32>(u32(127 + 12 - exponent) << 23u);
    return vec2<u32>(param, group_error(slots, head, g, param, unit));
}

// Fits the parameters of groups `begin` to `end`, at most PACK_GROUPS. Ends with a barrier.
fn fit_groups(slots: u32, head: u32, begin: u32, end: u32, local: u32) {
    if (!CLIPPING) {
        for (var g = begin + local; g < end; g += PACK_WORKGROUP) {
            let ends = group_ends(slots, head, g);
            sh_param[g - begin] = group_param(ends.x, ends.y);
        }
    } else {
        for (var start = begin; start < end; start += CLIPPED_AT_ONCE) {
            let g = start + local / CANDIDATES;
            let candidate = local % CANDIDATES;
            if (local < CLIPPED_AT_ONCE * CANDIDATES && g < end) {
                let tried = try_ends(slots, head, g, candidate / CLIP_STEPS, candidate % CLIP_STEPS);
                sh_tried[local] = tried.x;
                sh_error[local] = tried.y;
            }
            workgroupBarrier();
            if (local < CLIPPED_AT_ONCE && start + local < end) {
                // The first of the smallest errors.
                var best = local * CANDIDATES;
                for (var i = 1u; i < CANDIDATES; i++) {
                    let at = local * CANDIDATES + i;
                    if (sh_error[at] < sh_error[best]) {
                        best = at;
                    }
                }
                sh_param[start + local - begin] = sh_tried[best];
            }
            workgroupBarrier();
        }
    }
    workgroupBarrier();
}

// Stores the parameters that were fitted; if they are compact, `begin` and `end` are even.
fn store_params(first: u32, begin: u32, end: u32, local: u32) {
    if (PACK_COMPACT) {
        for (var i = 2u * local; i < end - begin; i += 2u * PACK_WORKGROUP) {
            slab[first + PACK_PARAMS + (begin + i) / 2u] = sh_param[i] | (sh_param[i + 1u] << 16u);
        }
    } else {
        for (var i = local; i < end - begin; i += PACK_WORKGROUP) {
            slab[first + PACK_PARAMS + begin + i] = sh_param[i];
        }
    }
}
