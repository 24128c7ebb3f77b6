"""Decodes a snapshot of kivi-wgpu: decode_snapshot.py FILE [LAYER [OUT]] (numpy and safetensors).
Prints what the layer holds; OUT gets its keys, then its values, as f32, [token][KV head][head_dim]."""
import json, sys, zlib
import numpy as np
import safetensors

def load(path):
    data = open(path, "rb").read()
    size = 8 + int.from_bytes(data[:8], "little")
    h = json.loads(json.loads(data[8:size])["__metadata__"]["kivi_wgpu"])
    before, mark, after = data[:size].partition(b'\\"checksum\\":\\"')
    assert zlib.crc32(before + mark + b"0" * 8 + after[8:] + data[size:]) == int(h["checksum"], 16), "altered"
    return h, {name: (t["dtype"], t["shape"], bytes(t["data"])) for name, t in safetensors.deserialize(data)}

PLANES = {2: [2], 3: [2, 1], 4: [4], 8: [8], 16: [16]}  # of a line of codes, lowest bits first

def place(width, j):  # the word of a plane where code j of a line is, and its lowest bit there
    if width == 16:
        return j // 2, 16 * (j % 2)
    if width == 1:
        return j // 32, 8 * (j % 4) + 2 * (j % 16 // 4) + j % 32 // 16
    return j * width // 32, 8 * (j % 4) + width * (j % (32 // width) // 4)

def floats(x, dtype):  # an array of '<u4' or '<u2' words
    return x.view("<f4") if dtype == "F32" else x.view("<f2").astype("<f4") if dtype == "F16" else (x.astype("<u4") << 16).view("<f4")

def parameters(words, count, compact):  # scale and minimum of each of `count` groups
    if not compact:
        return (floats(half.astype("<u2"), "F16") for half in (words & 0xFFFF, words >> 16))
    half = np.ascontiguousarray(words).view("<u2")[..., :count]
    scale = floats((half & 0xFF) << 7, "F16")
    number = (half << 1).astype("<i2") >> 9  # seven bits with a sign
    return scale, number.astype("<f4") * (np.where(half >> 15, 4, 0.25).astype("<f4") * scale)

def tensor(h, f, name, w, dtype):  # one tensor's part of the blocks, [block, head, token, channel]; and how many words it takes
    t, d, g = f[name], h["head_dim"], f["group_size"]
    bits, per_channel, keys = t["bits"], t["axis"] == "per_channel", name == "keys"
    n, lines = (d, g) if keys else (g, d)  # codes of a line, which is a token's keys or a channel's values
    code, shift, at = 0, 0, 0
    for width in PLANES[bits]:
        rows = -(-n * width // 32)
        size = rows * lines
        plane = w[..., at : at + size].reshape(*w.shape[:2], rows, lines)
        word, bit = place(width, np.arange(n))
        code = code | ((plane[:, :, word] >> bit.astype("<u4")[:, None]) & ((1 << width) - 1)) << shift
        shift, at = shift + width, at + size
    code = code.swapaxes(2, 3) if keys else code  # [block, head, token, channel]
    if bits == 16:
        return floats(code.astype("<u2"), dtype), at
    per_row = -(-d // f["value_group_size"])
    count = d if per_channel else g * per_row
    used = -(-count // 2) if t["compact"] else count
    spread = lambda p: p[:, :, None] if per_channel else np.repeat(p.reshape(*w.shape[:2], g, per_row), f["value_group_size"], axis=3)[..., :d]
    scale, minimum = (spread(p) for p in parameters(w[..., at : at + used], count, t["compact"]))
    x = code.astype("<f4") * scale + minimum
    return unrotate(x) if t["rotated"] else x, at + used

def unrotate(x):  # the inverse of the Hadamard transform along the last axis, in pieces of its largest power of two
    log = (x.shape[-1] & -x.shape[-1]).bit_length() - 1
    for i in range(log):
        pairs = x.reshape(*x.shape[:-1], x.shape[-1] >> (i + 1), 2, 1 << i)
        a, b = pairs[..., 0:1, :], pairs[..., 1:2, :]
        x = np.concatenate([a + b, a - b], axis=-2).reshape(x.shape)
    return x * np.float32(2.0 ** ((log + 1) // 2 - log))

def layer(h, tensors, l):
    def tokens(name):
        dtype, shape, data = tensors[f"layers.{l}.{name}"]
        return floats(np.frombuffer(data, "<u4" if dtype == "F32" else "<u2"), dtype).reshape(shape)
    f, window = h["formats"][h["layers"][l]], h["window_format"].upper()
    w = np.frombuffer(tensors[f"layers.{l}.blocks"][2], "<u4").reshape(tensors[f"layers.{l}.blocks"][1])
    dtype = "F16" if window == "F32" else window
    keys, used = tensor(h, f, "keys", w, dtype)
    values, _ = tensor(h, f, "values", w[..., used:], dtype)
    packed = lambda x: x.swapaxes(1, 2).reshape(-1, h["kv_heads"], h["head_dim"])
    return [np.concatenate([tokens(f"sinks.{n}"), packed(x), tokens(f"window.{n}")]) for n, x in (("keys", keys), ("values", values))]

header, tensors = load(sys.argv[1])
pair = layer(header, tensors, int(sys.argv[2]) if len(sys.argv) > 2 else 0)
print(header, *(f"{name} {x.shape}, root mean square {np.sqrt(np.mean(x.astype('f8') ** 2)):.4f}" for name, x in zip(("keys", "values"), pair)), sep="\n")
if len(sys.argv) > 3:
    open(sys.argv[3], "wb").write(b"".join(x.astype("<f4").tobytes() for x in pair))
