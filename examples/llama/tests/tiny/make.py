"""Makes the tiny models of this folder, random weights and all, and what llama.cpp computes with them in f32.

    pip install gguf==0.19.0 numpy tokenizers xllamacpp==2026.10.11549
    python make.py

Each model is written twice: as it is kept here, in blocks of 4 and 8 bits, and with the same weights in f32, which is what llama.cpp is asked about (its products of 4-bit blocks round
activations to 8 bits).
"""
import json, pathlib, tempfile, urllib.request

import gguf, numpy as np, xllamacpp
from gguf import GGMLQuantizationType as Q, quants
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

HERE = pathlib.Path(__file__).parent
EMMA = (HERE / "../../../../tests/data/emma_long.txt").read_text()
TEXT = "Emma Woodhouse, handsome,  clever, and rich:\n\n it's 21 of 1815's years — naïve 漢字 🙂\tDON'T.  the end "


def byte_level_bpe(size, pattern):
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(pattern, "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"])
    tokenizer.train_from_iterator([EMMA[:60_000], "don't it's 1815 "], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return sorted(model["vocab"], key=model["vocab"].get), [" ".join(pair) for pair in model["merges"]]


def sentence_pieces(size):
    """Pieces as SentencePiece's BPE trains them: merged words of letters and spaces, then single characters; scores are minus the rank."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=size - 256, special_tokens=special, limit_alphabet=60)
    tokenizer.train_from_iterator([EMMA[:60_000]], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    merged = list(dict.fromkeys("".join(pair) for pair in model["merges"]))
    single = [piece for piece in sorted(model["vocab"], key=model["vocab"].get) if len(piece) == 1]
    pieces = special + [f"<0x{byte:02X}>" for byte in range(256)] + merged + single
    pieces = pieces[: len(pieces) // 4 * 4]
    kinds = [2, 3, 3] + [6] * 256 + [1] * (len(pieces) - 259)
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(pieces) - 259)]
    return pieces, kinds, scores


class File:
    """A GGUF file in blocks, and its twin in f32."""

    def __init__(self, name, architecture):
        self.random = np.random.default_rng(7)
        self.paths = [HERE / f"{name}.gguf", pathlib.Path(tempfile.gettempdir()) / f"{name}.f32.gguf"]
        self.writers = [gguf.GGUFWriter(path, architecture) for path in self.paths]

    def __getattr__(self, method):
        return lambda *values: [getattr(writer, method)(*values) for writer in self.writers]

    def matrix(self, name, rows, columns, kind, scale=1.0):
        values = (self.random.standard_normal((rows, columns)) * scale / np.sqrt(columns)).astype(np.float32)
        self.tensor(name, values, kind)

    def tensor(self, name, values, kind=Q.F32):
        blocks = quants.quantize(values, kind)
        self.writers[0].add_tensor(name, blocks, raw_dtype=kind)
        self.writers[1].add_tensor(name, quants.dequantize(blocks, kind))

    def layers(self, count, hidden, heads, kv_heads, head_dim, wide, kinds, biases):
        around_one = lambda: (1.0 + 0.2 * self.random.standard_normal(hidden)).astype(np.float32)
        for layer in range(count):
            of = lambda name: f"blk.{layer}.{name}"
            rows = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}
            self.tensor(of("attn_norm.weight"), around_one())
            for part, height in rows.items():
                self.matrix(of(f"attn_{part}.weight"), height, hidden, kinds[layer][part], 1.5)
                if biases:
                    self.tensor(of(f"attn_{part}.bias"), self.random.standard_normal(height).astype(np.float32))
            self.matrix(of("attn_output.weight"), hidden, heads * head_dim, kinds[layer]["output"])
            self.tensor(of("ffn_norm.weight"), around_one())
            self.matrix(of("ffn_gate.weight"), wide, hidden, kinds[layer]["gate"])
            self.matrix(of("ffn_up.weight"), wide, hidden, kinds[layer]["up"])
            self.matrix(of("ffn_down.weight"), hidden, wide, kinds[layer]["down"])
        self.tensor("output_norm.weight", around_one())

    def close(self):
        for writer in self.writers:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()


def common(file, vocabulary, layers, hidden, heads, kv_heads, wide):
    file.add_name("tiny, random")
    file.add_block_count(layers)
    file.add_context_length(256)
    file.add_embedding_length(hidden)
    file.add_feed_forward_length(wide)
    file.add_head_count(heads)
    file.add_head_count_kv(kv_heads)
    file.add_layer_norm_rms_eps(1e-5)
    file.add_token_list(vocabulary)


def qwen2():
    """Biases, RoPE of halves with linear scaling, an output matrix of its own, Q4_0 and Q8_0, byte-level BPE."""
    pattern = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    vocabulary, merges = byte_level_bpe(480, Regex(pattern))
    file = File("qwen2", "qwen2")
    common(file, vocabulary, 2, 96, 3, 1, 160)
    file.add_rope_freq_base(1000.0)
    file.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    file.add_rope_scaling_factor(2.0)
    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre("qwen2")
    file.add_token_merges(merges)
    file.add_token_types([3] + [1] * (len(vocabulary) - 1))
    file.add_eos_token_id(0)
    file.add_add_bos_token(False)
    four = dict.fromkeys(["q", "k", "v", "output", "gate", "up", "down"], Q.Q4_0)
    file.layers(2, 96, 3, 1, 32, 160, [four, four | {"k": Q.Q8_0, "down": Q.F16}], True)
    file.matrix("token_embd.weight", len(vocabulary), 96, Q.Q8_0, 9.0)
    file.matrix("output.weight", len(vocabulary), 96, Q.Q4_0, 2.5)
    file.close()
    return file


def llama():
    """Heads wider than the stream divided by their number, RoPE of neighbours with a factor per frequency, Q4_1 and F16, tied embeddings, SentencePiece."""
    pieces, kinds, scores = sentence_pieces(512)
    file = File("llama", "llama")
    common(file, pieces, 2, 64, 4, 2, 96)
    file.add_key_length(32)
    file.add_value_length(32)
    file.add_rope_dimension_count(32)
    file.add_rope_freq_base(10000.0)
    file.add_tokenizer_model("llama")
    file.add_token_scores(scores)
    file.add_token_types(kinds)
    file.add_bos_token_id(1)
    file.add_eos_token_id(2)
    file.add_unk_token_id(0)
    four = dict.fromkeys(["q", "k", "v", "output", "gate", "up", "down"], Q.Q4_1)
    file.layers(2, 64, 4, 2, 32, 96, [four | {"up": Q.Q4_0}, four | {"v": Q.F16}], False)
    file.matrix("token_embd.weight", len(pieces), 64, Q.Q4_1, 2.5)
    file.tensor("rope_freqs.weight", np.geomspace(1.0, 8.0, 16).astype(np.float32))
    file.close()
    return file


def ask(path):
    """Tokens of TEXT and the loss of each but the first, by llama.cpp."""
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_batch, params.n_gpu_layers, params.warmup = 256, 256, 0, False
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(params)

    def post(route, body):
        request = urllib.request.Request(server.listening_address + route, json.dumps(body).encode(), {"Content-Type": "application/json"})
        return json.load(urllib.request.urlopen(request))

    tokens = post("/tokenize", {"content": TEXT, "add_special": True, "parse_special": True})["tokens"]
    # A whole character is sampled each time: the server says nothing about parts of one, nor about the token
    # that ends a text.
    letter = post("/tokenize", {"content": "a"})["tokens"][-1]
    losses = []
    for count in range(1, len(tokens)):
        body = {"prompt": tokens[:count], "n_predict": 1, "n_probs": 600, "temperature": 0.0, "cache_prompt": False, "logit_bias": [[letter, 1000.0]]}
        answer = post("/completion", body)["completion_probabilities"][0]
        chances = {entry["id"]: entry["logprob"] for entry in answer["top_logprobs"]}
        losses.append(-chances[tokens[count]])
    return {"text": TEXT, "tokens": tokens, "losses": [round(loss, 5) for loss in losses]}


for name, make in {"qwen2": qwen2, "llama": llama}.items():
    reference = ask(make().paths[1])
    (HERE / f"{name}.json").write_text(json.dumps(reference, ensure_ascii=False) + "\n")
    print(name, len(reference["tokens"]), "tokens, mean loss", np.mean(reference["losses"]), "std", np.std(reference["losses"]))
