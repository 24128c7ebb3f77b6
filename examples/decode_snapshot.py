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

PLANES = {2: [2], 3: [2, 1], 4: [4], 8: [8], 16: [16]}  # a row of codes, lowest bits first

def words(dim, bits):
    return [-(-dim * width // 32) for width in PLANES[bits]]

def floats(x, dtype):  # an array of '<u4' or '<u2' words
    return x.view("<f4") if dtype == "F32" else x.view("<f2").astype("<f4") if dtype == "F16" else (x.astype("<u4") << 16).view("<f4")

def dequantize(rows, params, bits, dim, dtype):  # rows [..., token, row word], parameters [..., token or 1, channel]
    if bits == 16:
        return floats(np.ascontiguousarray(rows).view("<u2"), dtype)
    code, shift = 0, 0
    for width, plane in zip(PLANES[bits], np.split(rows, np.cumsum(words(dim, bits))[:-1], axis=-1)):
        part = (plane[..., None] >> np.arange(0, 32, width, dtype="<u4")) & ((1 << width) - 1)
        code, shift = code | (part.reshape(*rows.shape[:-1], plane.shape[-1] * (32 // width))[..., :dim] << shift), shift + width
    scale, minimum = (floats(half.astype("<u2"), "F16") for half in (params & 0xFFFF, params >> 16))
    return code.astype("<f4") * scale + minimum

def unrotate(x):  # the inverse of the Hadamard transform along the last axis, in pieces of its largest power of two
    log = (x.shape[-1] & -x.shape[-1]).bit_length() - 1
    for i in range(log):
        pairs = x.reshape(*x.shape[:-1], -1, 2, 1 << i)
        a, b = pairs[..., 0:1, :], pairs[..., 1:2, :]
        x = np.concatenate([a + b, a - b], axis=-2).reshape(x.shape)
    return x * np.float32(2.0 ** ((log + 1) // 2 - log))

def layer(h, tensors, l):
    def tokens(name):
        dtype, shape, data = tensors[f"layers.{l}.{name}"]
        return floats(np.frombuffer(data, "<u4" if dtype == "F32" else "<u2"), dtype).reshape(shape)
    d, g, gv, window = h["head_dim"], h["group_size"], h["value_group_size"], h["window_format"].upper()
    w = np.frombuffer(tensors[f"layers.{l}.blocks"][2], "<u4").reshape(tensors[f"layers.{l}.blocks"][1])
    kw, vw = sum(words(d, h["keys"]["bits"])), sum(words(d, h["values"]["bits"]))
    kp, vp = d * (h["keys"]["bits"] < 16), -(-d // gv) * (h["values"]["bits"] < 16)
    k, kparam, v, vparam = np.split(w, np.cumsum([kw * g, kp, vw * g]), axis=2)
    dtype = "F16" if window == "F32" else window
    keys = dequantize(k.reshape(*w.shape[:2], kw, g).swapaxes(2, 3), kparam[:, :, None], h["keys"]["bits"], d, dtype)
    vparam = np.repeat(vparam.reshape(*w.shape[:2], g, vp), gv, axis=3)[..., :d]
    values = dequantize(v.reshape(*w.shape[:2], g, vw), vparam, h["values"]["bits"], d, dtype)
    values = unrotate(values) if h["values"]["rotated"] else values
    packed = lambda x: x.swapaxes(1, 2).reshape(-1, h["kv_heads"], d)
    return [np.concatenate([tokens(f"sinks.{n}"), packed(x), tokens(f"window.{n}")]) for n, x in (("keys", keys), ("values", values))]

header, tensors = load(sys.argv[1])
pair = layer(header, tensors, int(sys.argv[2]) if len(sys.argv) > 2 else 0)
print(header, *(f"{name} {x.shape}, root mean square {np.sqrt(np.mean(x.astype('f8') ** 2)):.4f}" for name, x in zip(("keys", "values"), pair)), sep="\n")
if len(sys.argv) > 3:
    open(sys.argv[3], "wb").write(b"".join(x.astype("<f4").tobytes() for x in pair))
