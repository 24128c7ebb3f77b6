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

def floats(words, dtype):  # an array of '<u4' or '<u2' words
    return words.view("<f4") if dtype == "F32" else words.view("<f2").astype("<f4") if dtype == "F16" else (words.astype("<u4") << 16).view("<f4")

def dequantize(rows, params, bits, dim, dtype):  # rows [..., token, row word], parameters [..., token or 1, channel]
    if bits == 16:
        return floats(np.ascontiguousarray(rows).view("<u2"), dtype)
    code = (rows[..., None] >> np.arange(0, 32, bits, dtype="<u4")) & ((1 << bits) - 1)
    scale, minimum = (floats(half.astype("<u2"), "F16") for half in (params & 0xFFFF, params >> 16))
    return code.reshape(*rows.shape[:-1], rows.shape[-1] * (32 // bits))[..., :dim].astype("<f4") * scale + minimum

def layer(h, tensors, l):
    def tokens(name):
        dtype, shape, data = tensors[f"layers.{l}.{name}"]
        return floats(np.frombuffer(data, "<u4" if dtype == "F32" else "<u2"), dtype).reshape(shape)
    d, g, gv, window = h["head_dim"], h["group_size"], h["value_group_size"], h["window_format"].upper()
    w = np.frombuffer(tensors[f"layers.{l}.blocks"][2], "<u4").reshape(tensors[f"layers.{l}.blocks"][1])
    kw, vw = -(-d * h["key_bits"] // 32), -(-d * h["value_bits"] // 32)
    kp, vp = d * (h["key_bits"] < 16), -(-d // gv) * (h["value_bits"] < 16)
    k, kparam, v, vparam = np.split(w, np.cumsum([kw * g, kp, vw * g]), axis=2)
    dtype = "F16" if window == "F32" else window
    keys = dequantize(k.reshape(*w.shape[:2], kw, g).swapaxes(2, 3), kparam[:, :, None], h["key_bits"], d, dtype)
    vparam = np.repeat(vparam.reshape(*w.shape[:2], g, vp), gv, axis=3)[..., :d]
    values = dequantize(v.reshape(*w.shape[:2], g, vw), vparam, h["value_bits"], d, dtype)
    packed = lambda x: x.swapaxes(1, 2).reshape(-1, h["kv_heads"], d)
    return [np.concatenate([tokens(f"sinks.{n}"), packed(x), tokens(f"window.{n}")]) for n, x in (("keys", keys), ("values", values))]

header, tensors = load(sys.argv[1])
pair = layer(header, tensors, int(sys.argv[2]) if len(sys.argv) > 2 else 0)
print(header, *(f"{name} {x.shape}, root mean square {np.sqrt(np.mean(x.astype('f8') ** 2)):.4f}" for name, x in zip(("keys", "values"), pair)), sep="\n")
if len(sys.argv) > 3:
    open(sys.argv[3], "wb").write(b"".join(x.astype("<f4").tobytes() for x in pair))
