"""An independent packer, written from docs/format.md alone.

    pack_from_the_page.py INPUT OUTPUT

It shares no code with the library, so that a test can hold the library's files against what the page says.
It is to be read next to the page: the comments in quotes name the page's sections.

INPUT is a safetensors file. Its `__metadata__` has one entry `description`, a JSON object with the fields
`kv_heads`, `head_dim`, `window_format`, `formats` and `layers` of the page's header; the formats have no
`blocks` and `evicted`. Its tensors are `layers.l.keys` and `layers.l.values` for each layer l, F32,
[n][H][D]: the raw tokens of one sequence to which n tokens were only ever appended.

OUTPUT is the file of that sequence as the page describes it, byte for byte.

Needs numpy. Floats are float32, which numpy rounds once per operation. Where a comment says so, they are
float64, which is exact there.
"""

import json
import struct
import sys
import zlib

import numpy as np

F32, F64, U32 = np.float32, np.float64, np.uint32

# "Entry: from f32 to the window format"
SMALLEST = {"f16": 0x38800000, "bf16": 0x00800000, "f32": 0x00800000}
LARGEST = {"f16": 0x477FE000, "bf16": 0x477F0000, "f32": 0x477FE000}


def enter(x, form):
    """The bits of f32 elements in a window format."""
    word = np.ascontiguousarray(x, F32).view(U32)
    sign, m = word & U32(0x80000000), word & U32(0x7FFFFFFF)
    zero = (m > 0x7F800000) | (m < SMALLEST[form])
    m = np.minimum(m, U32(LARGEST[form]))
    if form == "f32":
        return np.where(zero, U32(0), sign | m).astype("<u4")
    k = 13 if form == "f16" else 16
    m = (m + U32((1 << (k - 1)) - 1) + ((m >> U32(k)) & U32(1))) >> U32(k)
    if form == "f16":
        m -= U32(112 << 10)
    return np.where(zero, U32(0), (sign >> U32(16)) | m).astype("<u2")


def value(entered, form):
    """The f32 values of entered bits."""
    if form == "f16":
        return entered.view("<f2").astype(F32)
    return (entered.astype(U32) << U32(16 if form == "bf16" else 0)).view(F32)


# "Rotation"
def rotate(x):
    """Rotates the rows x[...][channel]."""
    k = (x.shape[-1] & -x.shape[-1]).bit_length() - 1
    rows = np.where(np.abs(x) < F32(2.0**-97), F32(0), x)
    for distance in (1 << i for i in range(k)):
        pairs = rows.reshape(*x.shape[:-1], x.shape[-1] // (2 * distance), 2, distance)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        rows = np.stack((a + b, a - b), axis=-2).reshape(x.shape)
    return value(enter(rows * F32(2.0 ** -((k + 1) // 2)), "f32"), "f32")


# "Parameters in 32 bits"
NORMAL = np.arange(0x0400, 0x7C00, dtype=np.uint16).view(np.float16).astype(F32)
STORABLE = np.concatenate((-NORMAL[::-1], np.zeros(1, F32), NORMAL))


def floor16(x):
    return STORABLE[np.maximum(np.searchsorted(STORABLE, x, side="right") - 1, 0)]


def fit_wide(lo, hi, form):
    """The scales, minima and stored words for ranges lo ... hi."""
    low = floor16(lo)
    span = hi - low
    index = np.searchsorted(NORMAL * F32(2 ** form["bits"] - 1), span)
    scale = np.where(span > 0, NORMAL[np.minimum(index, len(NORMAL) - 1)], F32(0))
    minimum = low
    if form["zero_point"] == "rounded":
        # float64: a quotient of two f16 is k + 1/2 or so far from it that rounding does not matter.
        divisor = np.where(scale > 0, scale, F32(1)).astype(F64)
        z = np.floor(0.5 - low / divisor)
        moved = -z * divisor
        usable = (scale > 0) & (np.abs(z) <= 4095) & (moved >= -65504)
        minimum = np.where(usable, floor16(moved.astype(F32)), low)
    scale_bits, minimum_bits = (a.astype(np.float16).view(np.uint16).astype(U32) for a in (scale, minimum))
    return scale, minimum, scale_bits | (minimum_bits << U32(16))


# "Compact parameters"
COMPACT_S = np.arange(0x08, 0xF8, dtype=np.uint16)
COMPACT_SCALE = (COMPACT_S << np.uint16(7)).view(np.float16).astype(F64)


def fit_compact(lo, hi, form):
    """As fit_wide; the stored words have 16 bits. float64 holds all that the page calls exact here."""
    reach = COMPACT_SCALE * (2 ** form["bits"] - 1)
    scale, minimum, stored = np.zeros_like(lo), np.zeros_like(lo), np.zeros(lo.shape, U32)
    # `todo` are the groups that have no parameter yet. Each starts at the first scale that spans its range.
    index = np.searchsorted(reach, hi - lo)
    todo = np.flatnonzero((lo != 0) | (hi != 0))
    while todo.size:
        for u, factor in (0, 0.25), (1, 4.0):
            at = index[todo]
            unit = COMPACT_SCALE[at] * factor
            n = np.floor(lo[todo] / unit)
            n -= n * unit > lo[todo]  # where the quotient was rounded up to an integer
            n = np.minimum(n, 63)
            fits = (n >= -63) & (n * unit + reach[at] >= hi[todo])
            done = todo[fits]
            scale[done], minimum[done] = COMPACT_SCALE[at[fits]], (n * unit)[fits]
            stored[done] = COMPACT_S[at[fits]] | ((n[fits].astype(np.int64) & 0x7F) << 8) | (u << 15)
            todo = todo[~fits]
        index[todo] += 1
    return scale, minimum, stored


# "The code of a value"
def encode(x, scale, minimum, bits):
    """The codes, as floats, of the values x[group][element], by binary search."""
    scale, minimum = scale[:, None], minimum[:, None]
    code = np.zeros_like(x)
    for step in (F32(1 << i) for i in reversed(range(bits))):
        code += step * (minimum + (code + step - F32(0.5)) * scale < x)
    return np.where(scale > 0, code, F32(0))


# "Clipping", and what comes of a group without it
def choose(x, form):
    """The scales, minima and stored words of the groups x[group][element]."""
    fit = fit_compact if form["compact"] else fit_wide
    lo, hi = x.min(axis=1), x.max(axis=1)
    chosen = fit(lo, hi, form)
    if not form["clipping"]:
        return chosen
    range_bits = (hi - lo).view(U32)
    exponent = (range_bits >> U32(23)).astype(np.int32) - 127
    wide = np.flatnonzero(exponent >= -60)
    x, lo, hi = x[wide], lo[wide], hi[wide]
    coarse = (range_bits[wide] & U32(0xFFFF0000)).view(F32) * F32(5 / 128)
    unit = np.ldexp(F32(1), 12 - exponent[wide])[:, None]
    least = np.full(len(wide), np.iinfo(np.int64).max)
    for i, j in np.ndindex(6, 6):
        candidate = fit(lo + F32(i) * coarse, hi - F32(j) * coarse, form)
        scale, minimum, _ = candidate
        code = encode(x, scale, minimum, form["bits"])
        above = np.trunc(np.clip((x - minimum[:, None]) * unit, F32(-(2**20)), F32(2**20)))
        level = np.trunc(np.minimum(code * scale[:, None] * unit, F32(2**20)))
        squares = np.minimum(np.abs(above - level), F32(2047)) ** 2  # integers below 2^24, so exact
        error = squares.astype(np.int64).sum(axis=1)
        better = error < least
        least[better] = error[better]
        for best, new in zip(chosen, candidate):
            best[wide[better]] = new[better]
    return chosen


# "Lines and planes"
PLANES = {2: (2,), 3: (2, 1), 4: (4,), 8: (8,), 16: (16,)}


def place(p, j):
    """The words of a plane of p bits where codes j of a line are, and their lowest bits there."""
    if p == 16:
        return j // 2, 16 * (j % 2)
    if p == 1:
        return j // 32, 8 * (j % 4) + 2 * (j % 16 // 4) + j % 32 // 16
    return j * p // 32, 8 * (j % 4) + p * (j % (32 // p) // 4)


def to_lines(codes, bits):
    """Codes [...][line][code] to words [...][word of the line][line]."""
    planes, shift, n = [], 0, codes.shape[-1]
    for p in PLANES[bits]:
        word, bit = place(p, np.arange(n))
        part = ((codes >> U32(shift)) & U32((1 << p) - 1)) << bit.astype(U32)
        words = [np.bitwise_or.reduce(part[..., word == w], axis=-1) for w in range(-(-n * p // 32))]
        planes.append(np.stack(words, axis=-2))
        shift += p
    return np.concatenate(planes, axis=-2)


def quantize(x, form):
    """Codes and stored parameters of the groups x[...][group][element]."""
    groups = np.ascontiguousarray(x).reshape(np.prod(x.shape[:-1], dtype=int), x.shape[-1])
    scale, minimum, stored = choose(groups, form)
    codes = encode(groups, scale, minimum, form["bits"])
    return codes.astype(U32).reshape(x.shape), stored.reshape(x.shape[:-1])


# "A block", "Packing"
def pack(x, form, gv, window_format, is_keys):
    """The words [block][head][word] of the keys or the values x[block][head][token][channel]."""
    *outer, tokens, channels = x.shape
    if form["rotated"]:
        x = rotate(x)
    if form["bits"] == 16:
        codes = enter(x, "bf16" if window_format == "bf16" else "f16").astype(U32)
        parameters = np.zeros((*outer, 0), U32)
    elif form["axis"] == "per_channel":
        codes, parameters = quantize(x.swapaxes(2, 3), form)
        codes = codes.swapaxes(2, 3)
    else:
        whole = channels // gv * gv
        codes, parameters = quantize(x[..., :whole].reshape(*outer, tokens, whole // gv, gv), form)
        codes = codes.reshape(*outer, tokens, whole)
        if whole < channels:
            last_codes, last_parameters = quantize(x[..., None, whole:], form)
            codes = np.concatenate((codes, last_codes[..., 0, :]), axis=3)
            parameters = np.concatenate((parameters, last_parameters), axis=3)
        parameters = parameters.reshape(*outer, tokens * parameters.shape[3])
    lines = to_lines(codes if is_keys else codes.swapaxes(2, 3), form["bits"])
    if form["compact"]:  # an even number of them, as D and G are even
        parameters = parameters[..., 0::2] | (parameters[..., 1::2] << U32(16))
    return np.concatenate((lines.reshape(*outer, lines.shape[2] * lines.shape[3]), parameters), axis=2)


# "Where a token is"
def split(n, form):
    """The numbers of sinks, blocks and evicted blocks of a sequence of n tokens."""
    g, s, limit = form["group_size"], form["sink_tokens"], form["history_limit"]
    blocks = max(0, n - s - form["residual_window"]) // g
    return min(n, s), blocks, 0 if limit is None else min(blocks, max(0, n - s - limit) // g)


def pack_layer(raw, form, window_format):
    """The tensors of a layer, by the ends of their names, from its raw keys and values."""
    g = form["group_size"]
    sinks, blocks, evicted = split(len(raw["keys"]), form)
    begin, end = sinks + evicted * g, sinks + blocks * g
    tensors, words = {}, []
    for what in "keys", "values":
        entered = enter(raw[what], window_format)
        tensors["sinks." + what], tensors["window." + what] = entered[:sinks], entered[end:]
        x = value(entered[begin:end], window_format)
        x = x.reshape(blocks - evicted, g, *x.shape[1:]).swapaxes(1, 2)
        words.append(pack(x, form[what], form["value_group_size"], window_format, what == "keys"))
    tensors["blocks"] = np.concatenate(words, axis=2).astype("<u4")
    return tensors


# "A file"
TYPES = ("F32", "U32", "BF16", "F16")
TENSOR_FIELDS = ("bits", "axis", "zero_point", "compact", "clipping", "rotated")
NUMBER_FIELDS = ("group_size", "value_group_size", "residual_window", "sink_tokens", "history_limit")


def read(path):
    """The description and the layers' raw keys and values in INPUT."""
    with open(path, "rb") as file:
        content = file.read()
    data = 8 + struct.unpack_from("<Q", content)[0]
    header = json.loads(content[8:data])
    description = json.loads(header.pop("__metadata__")["description"])
    layers = [{} for _ in description["layers"]]
    for name, tensor in header.items():
        _, layer, what = name.split(".")
        begin, end = (data + offset for offset in tensor["data_offsets"])
        layers[int(layer)][what] = np.frombuffer(content[begin:end], "<f4").reshape(tensor["shape"])
    return description, layers


def header_format(form, tokens):
    """A format with all its fields, in the page's order."""
    out = {what: {field: form[what][field] for field in TENSOR_FIELDS} for what in ("keys", "values")}
    out.update((field, form[field]) for field in NUMBER_FIELDS)
    _, out["blocks"], out["evicted"] = split(tokens, form)
    return out


def whole_file(description, layers):
    tokens, window_format = len(layers[0]["keys"]), description["window_format"]
    of_layers = [header_format(description["formats"][i], tokens) for i in description["layers"]]
    formats = [form for i, form in enumerate(of_layers) if form not in of_layers[:i]]

    tensors = []
    for layer, (raw, form) in enumerate(zip(layers, of_layers)):
        for name, array in pack_layer(raw, form, window_format).items():
            dtype = "U32" if name == "blocks" else window_format.upper()
            tensors.append((f"layers.{layer}.{name}", dtype, array))
    tensors.sort(key=lambda tensor: (TYPES.index(tensor[1]), tensor[0]))
    data = b"".join(array.tobytes() for _, _, array in tensors)

    def with_checksum(checksum):
        fields = {
            "version": 1,
            "kv_heads": description["kv_heads"],
            "head_dim": description["head_dim"],
            "window_format": window_format,
            "tokens": tokens,
            "formats": formats,
            "layers": [formats.index(form) for form in of_layers],
            "checksum": f"{checksum:08x}",
        }
        header, at = {"__metadata__": {"kivi_wgpu": json.dumps(fields, separators=(",", ":"))}}, 0
        for name, dtype, array in tensors:
            header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [at, at + array.nbytes]}
            at += array.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text + data

    return with_checksum(zlib.crc32(with_checksum(0)))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: pack_from_the_page.py INPUT OUTPUT")
    packed = whole_file(*read(sys.argv[1]))
    with open(sys.argv[2], "wb") as out:
        out.write(packed)
