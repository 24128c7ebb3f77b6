// Chooses a token from each row of logits: the largest, or at random among the most likely.
//
// Candidates are the tokens whose logit is not below a threshold: the largest for which there are at least
// `top_k` of them (0: all), and then the largest for which they hold `top_p` of what the former hold (1:
// all). Both are found bit by bit on order-preserving integers, without sorting. One of them is drawn by the
// Gumbel trick: the largest of logit / temperature - ln(-ln u) is a draw from the softmax.
//
// | binding | what |
// |---|---|
// | 0 | logits, f32 [row][VOCABULARY] |
// | 1 | choices: how to choose, per row |
// | 2 | chosen, u32 [row] |
// Grid: rows.

struct Choice {
    temperature: f32, // 0: the largest logit
    top_k: u32,
    top_p: f32,
    seed: u32,
}

@group(0) @binding(0) var<storage, read> logits: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read> choices: array<Choice>;
@group(0) @binding(2) var<storage, read_write> chosen: array<u32>;

/// Integers in the order of the floats.
fn keys(x: vec4<f32>) -> vec4<u32> {
    let bits = bitcast<vec4<u32>>(x);
    return select(bits | vec4<u32>(0x80000000u), ~bits, (bits >> vec4<u32>(31u)) == vec4<u32>(1u));
}

/// What the tokens whose key is at least `threshold` hold: their number if `counts`, else their part of the
/// softmax, not normalized.
fn held(local: u32, first: u32, threshold: u32, counts: bool, top: f32, temperature: f32) -> f32 {
    var sum = 0.0;
    for (var i = local; i < FOURS; i += SIZE) {
        let x = logits[first + i];
        let inside = select(vec4<f32>(), vec4<f32>(1.0), keys(x) >= vec4<u32>(threshold));
        let weight = select(exp((x - top) / temperature), vec4<f32>(1.0), counts);
        sum += dot(inside, weight);
    }
    return total(local, sum);
}

/// The largest threshold, at least `lowest`, above which tokens hold `wanted`.
fn find(local: u32, first: u32, lowest: u32, wanted: f32, counts: bool, top: f32, temperature: f32) -> u32 {
    var threshold = 0u;
    for (var bit = 0x80000000u; bit > 0u; bit /= 2u) {
        let candidate = threshold | bit;
        if (held(local, first, max(candidate, lowest), counts, top, temperature) >= wanted) {
            threshold = candidate;
        }
    }
    return max(threshold, lowest);
}

/// PCG's output permutation (O'Neill, 2014).
fn scramble(x: u32) -> u32 {
    let state = x * 747796405u + 2891336453u;
    let word = ((state >> ((state >> 28u) + 4u)) ^ state) * 277803737u;
    return (word >> 22u) ^ word;
}

/// Gumbel noise of a token: -ln(-ln u), u in (0, 1).
fn noise(seed: u32, token: u32) -> f32 {
    // 1 - u. Near 0, where a GPU's log(1 - v) may well be 0, the first terms of its series are exact enough.
    let v = (f32(scramble(seed ^ scramble(token)) >> 9u) + 0.5) / 8388608.0;
    let exponential = select(-log(1.0 - v), v * (1.0 + v * (0.5 + v / 3.0)), v < 0.01);
    return -log(exponential);
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let first = group.x * FOURS;
    let choice = choices[group.x];
    var mine = NOTHING;
    for (var i = local; i < FOURS; i += SIZE) {
        mine = better(mine, logits[first + i], 4u * i);
    }
    let top = largest(local, mine);
    let random = choice.temperature > 0.0;
    let temperature = select(1.0, choice.temperature, random);
    let highest = top.value;
    // All invocations have read the same choice, so the branches below are uniform.
    var threshold = 0u;
    if (random && choice.top_k > 0u) {
        threshold = find(local, first, threshold, f32(choice.top_k), true, highest, temperature);
    }
    if (random && choice.top_p < 1.0) {
        let all = held(local, first, threshold, false, highest, temperature);
        threshold = find(local, first, threshold, choice.top_p * all, false, highest, temperature);
    }
    // The most likely token is a candidate in any case.
    threshold = min(threshold, keys(vec4<f32>(highest)).x);
    mine = NOTHING;
    for (var i = local; i < FOURS; i += SIZE) {
        let x = logits[first + i];
        let token = 4u * i;
        let noises = vec4<f32>(
            noise(choice.seed, token),
            noise(choice.seed, token + 1u),
            noise(choice.seed, token + 2u),
            noise(choice.seed, token + 3u),
        );
        let inside = keys(x) >= vec4<u32>(threshold);
        mine = better(mine, select(vec4<f32>(NOTHING.value), (x - highest) / temperature + noises, inside), token);
    }
    let drawn = largest(local, mine);
    if (local == 0u) {
        chosen[group.x] = select(top.token, drawn.token, random);
    }
}
