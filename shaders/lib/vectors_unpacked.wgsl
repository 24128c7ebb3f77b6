// Four channels of an unpacked token. lib/slots.wgsl comes before.
//
// Constants: F32, WINDOW_FORMAT.
// Records: Split.

// Of the key (`tensor` = 0) or the value (1) of token `token` of a split; past the last one it is the last.
fn token_vector(split: Split, tensor: u32, head: u32, token: u32, v: u32) -> vec4<f32> {
    let slot = slot_of(split, token);
    if (WINDOW_FORMAT == F32) {
        return bitcast<vec4<f32>>(fetch(slot, tensor, head, v));
    }
    let words = fetch(slot, tensor, head, v / 2u);
    let two = select(words.xy, words.zw, v % 2u == 1u);
    return vec4<f32>(pair(WINDOW_FORMAT, two.x), pair(WINDOW_FORMAT, two.y));
}
