// Parameters of a packed page whose keys are codes. Scale and minimum are folded out of the inner loop:
//   q . k_t = sum_d (q_d s_d) c_td + sum_d q_d m_d
// The first sum is `tile_logits` of lib/keys_float.wgsl or lib/keys_dot.wgsl, the second is here.

// Invocations of a row group that share a block, and so its bias.
const BIAS_LANES: u32 = GROUP / 4u;

// Four key parameters from channel 4 * `v` on. The last word of a row may reach past the channels: its codes are zero, but what lies
// behind the parameters could decode to NaN.
fn key_params(first: u32, v: u32) -> vec4<u32> {
    return slab4[(first + KEY_PARAMS) / 4u + min(v, HEAD_DIM / 4u - 1u)];
}

// The channel whose code is byte `i` of part `v % KEY_PARTS` of row word `v / KEY_PARTS`.
fn query_channel(v: u32, i: u32) -> u32 {
    return (v / KEY_PARTS) * KEY_CODES_PER_WORD + v % KEY_PARTS + KEY_PARTS * i;
}

fn word_scales(first: u32, word: u32) -> Parts {
    let v = word * KEY_PARTS;
    let n0 = scales(key_params(first, v));
    var n1 = vec4<f32>();
    var n2 = vec4<f32>();
    var n3 = vec4<f32>();
    if (KEY_PARTS > 1u) {
        n1 = scales(key_params(first, v + 1u));
    }
    if (KEY_PARTS > 2u) {
        n2 = scales(key_params(first, v + 2u));
        n3 = scales(key_params(first, v + 3u));
    }
    return permute(n0, n1, n2, n3);
}

fn word_minima(first: u32, word: u32) -> Parts {
    let v = word * KEY_PARTS;
    let n0 = minima(key_params(first, v));
    var n1 = vec4<f32>();
    var n2 = vec4<f32>();
    var n3 = vec4<f32>();
    if (KEY_PARTS > 1u) {
        n1 = minima(key_params(first, v + 1u));
    }
    if (KEY_PARTS > 2u) {
        n2 = minima(key_params(first, v + 2u));
        n3 = minima(key_params(first, v + 3u));
    }
    return permute(n0, n1, n2, n3);
}

// This invocation's share of sum_d q_d m_d of its block: the words that fall to it.
fn bias_part(split: Split, head: u32, quad: u32, row: u32) -> vec4<f32> {
    var part: Dots;
    if (4u * quad < split.tokens) {
        let first = head_words(split, head, 4u * quad);
        for (var word = quad % BIAS_LANES; word < KEY_ROW_WORDS; word += BIAS_LANES) {
            let m = word_minima(first, word);
            let v = word * KEY_PARTS;
            add_dots(&part, row, v, m.p0);
            if (KEY_PARTS > 1u) {
                add_dots(&part, row, v + 1u, m.p1);
            }
            if (KEY_PARTS > 2u) {
                add_dots(&part, row, v + 2u, m.p2);
                add_dots(&part, row, v + 3u, m.p3);
            }
        }
    }
    return finish_dots(part);
}
