// Products with four lines at a time: channels of four tokens' keys, or tokens of four channels of the
// values.

// Adds four operands times four elements of each line, an element per vector of `x`.
fn add_products(sum: vec4<f32>, operands: vec4<f32>, x: Parts) -> vec4<f32> {
    let o = operands;
    return fma(vec4<f32>(o.w), x.p3, fma(vec4<f32>(o.z), x.p2, fma(vec4<f32>(o.y), x.p1, fma(vec4<f32>(o.x), x.p0, sum))));
}

// Four elements of four lines in 16 bits, from the lines' words of the first two and of the last two: an
// element per vector.
fn element_pairs(format: u32, low: vec4<u32>, high: vec4<u32>) -> Parts {
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

// Four vectors of a line each as a vector per element.
fn by_channels(a: vec4<f32>, b: vec4<f32>, c: vec4<f32>, d: vec4<f32>) -> Parts {
    return Parts(
        vec4<f32>(a.x, b.x, c.x, d.x), vec4<f32>(a.y, b.y, c.y, d.y), vec4<f32>(a.z, b.z, c.z, d.z), vec4<f32>(a.w, b.w, c.w, d.w));
}
