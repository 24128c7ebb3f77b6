// Compares next-token distributions with those of a reference, and both with the token that came.
//
// | binding | what |
// |---|---|
// | 0 | logits, f32 [row][VOCABULARY] |
// | 1 | reference logits, alike |
// | 2 | targets, u32 [row] |
// | 3 | scores [row] |
// Grid: rows.

struct Score {
    loss: f32, // -ln p(target), natural logarithm
    divergence: f32, // KL(reference ‖ logits)
    agrees: f32, // 1 if both rank the same token first
    right: f32, // 1 if the target is ranked first
}

@group(0) @binding(0) var<storage, read> logits: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read> reference: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> targets: array<u32>;
@group(0) @binding(3) var<storage, read_write> scores: array<Score>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let first = group.x * FOURS;
    var mine = NOTHING;
    var its = NOTHING;
    for (var i = local; i < FOURS; i += SIZE) {
        mine = better(mine, logits[first + i], 4u * i);
        its = better(its, reference[first + i], 4u * i);
    }
    mine = largest(local, mine);
    its = largest(local, its);
    var my_sum = 0.0;
    var its_sum = 0.0;
    for (var i = local; i < FOURS; i += SIZE) {
        my_sum += dot(exp(logits[first + i] - mine.value), vec4<f32>(1.0));
        its_sum += dot(exp(reference[first + i] - its.value), vec4<f32>(1.0));
    }
    let my_log = log(total(local, my_sum)) + mine.value;
    let its_log = log(total(local, its_sum)) + its.value;
    var divergence = 0.0;
    for (var i = local; i < FOURS; i += SIZE) {
        let a = reference[first + i] - its_log;
        let b = logits[first + i] - my_log;
        divergence += dot(exp(a), a - b);
    }
    divergence = total(local, divergence);
    if (local == 0u) {
        let token = targets[group.x];
        let x = logits[first + token / 4u][token % 4u];
        let agrees = select(0.0, 1.0, mine.token == its.token);
        scores[group.x] = Score(my_log - x, divergence, agrees, select(0.0, 1.0, mine.token == token));
    }
}
