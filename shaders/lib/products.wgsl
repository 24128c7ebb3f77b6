// Products of queries with four channels of four tokens at a time.
//
// Constants: KEY_ROWS.

// One row's products with four channels of four tokens, a channel per vector of `k`.
fn add_products(sum: vec4<f32>, q: vec4<f32>, k: Parts) -> vec4<f32> {
    return fma(vec4<f32>(q.w), k.p3, fma(vec4<f32>(q.z), k.p2, fma(vec4<f32>(q.y), k.p1, fma(vec4<f32>(q.x), k.p0, sum))));
}

// The same for up to four rows, each with its own part of the query.
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

// Four channels of four tokens in 16 bits, from the tokens' words of the first two channels and of the last
// two: a channel per vector.
fn pair_channels(format: u32, low: vec4<u32>, high: vec4<u32>) -> Parts {
    let a = pair(format, low.x);
    let b = pair(format, low.y);
    let c = pair(format, low.z);
    let d = pair(format, low.w);
    let s = pair(format, high.x);
    let t = pair(format, high.y);
    let u = pair(format, high.z);
    let v = pair(format, high.w);
    return Parts(
        vec4<f32>(a.x, b.x, c.x, d.x), vec4<f32>(a.y, b.y, c.y, d.y), vec4<f32>(s.x, t.x, u.x, v.x), vec4<f32>(s.y, t.y, u.y, v.y));
}
