// Sums and maxima over a workgroup of SIZE invocations that share a row of logits.

const SIZE = 256u;
const FOURS = VOCABULARY / 4u;

var<workgroup> sh_numbers: array<f32, SIZE>;
var<workgroup> sh_tokens: array<u32, SIZE>;

/// A token and how it is ranked.
struct Top { value: f32, token: u32 }

const NOTHING = Top(-3.0e38, 0u);

/// The sum of all invocations' numbers.
fn total(local: u32, x: f32) -> f32 {
    workgroupBarrier();
    sh_numbers[local] = x;
    workgroupBarrier();
    for (var half = SIZE / 2u; half > 0u; half /= 2u) {
        if (local < half) {
            sh_numbers[local] += sh_numbers[local + half];
        }
        workgroupBarrier();
    }
    return workgroupUniformLoad(&sh_numbers[0]);
}

/// The largest of all invocations' tokens, the first among equals.
fn largest(local: u32, mine: Top) -> Top {
    workgroupBarrier();
    sh_numbers[local] = mine.value;
    sh_tokens[local] = mine.token;
    workgroupBarrier();
    for (var half = SIZE / 2u; half > 0u; half /= 2u) {
        if (local < half) {
            let a = sh_numbers[local];
            let b = sh_numbers[local + half];
            if (b > a || (b == a && sh_tokens[local + half] < sh_tokens[local])) {
                sh_numbers[local] = b;
                sh_tokens[local] = sh_tokens[local + half];
            }
        }
        workgroupBarrier();
    }
    return Top(workgroupUniformLoad(&sh_numbers[0]), workgroupUniformLoad(&sh_tokens[0]));
}

/// The larger of what is known and four tokens from `token` on.
fn better(top: Top, x: vec4<f32>, token: u32) -> Top {
    var result = top;
    for (var c = 0u; c < 4u; c++) {
        if (x[c] > result.value) {
            result = Top(x[c], token + c);
        }
    }
    return result;
}
