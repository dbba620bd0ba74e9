"""Mini GGUF models for tests: good ones, and ones that are broken in exactly one place.

A good model comes from the model generator with tiny sizes. A broken one is a good one taken apart into a `MiniFile`,
changed, and put together again; `BROKEN` has them all, with what must be said about each.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from daemon.native.gguf_reader import read_head
from daemon.native.gguf_types import (
    ARRAY,
    BOOL,
    FLOAT32,
    INT32,
    SCALARS,
    STRING,
    UINT16,
    UINT32,
    quant_numbers,
    quant_of,
)
from hotset_tools.make_model import write_model
from hotset_tools.model_shapes import Shape
from hotset_tools.synthetic_vocab import make_vocab

MOE = Shape("mini", 2, 64, 2, 1, 32, 4, 2, 64, 400, n_ctx=512, experts="F16", layers="F16", vocab="F16")
DENSE = replace(MOE, name="mini dense", n_expert=0, n_expert_used=0)
ALIGNMENT = 32


def write_moe(path: Path, *, seed: int = 1, **sizes: Any) -> Path:
    """A qwen3moe model; `sizes` are fields of `Shape`, and must be multiples of the blocks of their types."""
    write_model(path, replace(MOE, **sizes), seed)
    return path


def write_dense(path: Path, *, seed: int = 1, **sizes: Any) -> Path:
    """A qwen3 model without experts."""
    write_model(path, replace(DENSE, **sizes), seed)
    return path


def pack(kind: int, value: Any) -> bytes:
    """One metadata value without its type."""
    if kind == STRING:
        raw = value if isinstance(value, bytes) else str(value).encode()
        return struct.pack("<Q", len(raw)) + raw
    return struct.pack("<" + SCALARS[kind], value)


def scalar(kind: int, value: Any) -> bytes:
    """A metadata value with its type."""
    return struct.pack("<I", kind) + pack(kind, value)


def array(kind: int, values: list[Any], *, count: int | None = None) -> bytes:
    """An array with its type; `count` is what it claims to hold."""
    head = struct.pack("<IIQ", ARRAY, kind, len(values) if count is None else count)
    return head + b"".join(pack(kind, value) for value in values)


def u32(value: int) -> bytes:
    """The usual metadata number."""
    return scalar(UINT32, value)


@dataclass(frozen=True)
class MiniTensor:
    """One tensor; `offset` None: right behind the one before."""

    name: bytes
    dims: tuple[int, ...]
    kind: int
    data: bytes
    offset: int | None = None


@dataclass(frozen=True)
class MiniFile:
    """A GGUF in parts. `keys` are (name, type and value as bytes); counts None: the real ones."""

    keys: tuple[tuple[bytes, bytes], ...]
    tensors: tuple[MiniTensor, ...]
    magic: bytes = b"GGUF"
    version: int = 3
    n_keys: int | None = None
    n_tensors: int | None = None

    def to_bytes(self) -> bytes:
        """The whole file."""
        return _pad(self.head()) + b"".join(_pad(tensor.data) for tensor in self.tensors)

    def head(self) -> bytes:
        """Everything before the padding in front of the data."""
        n_tensors = len(self.tensors) if self.n_tensors is None else self.n_tensors
        n_keys = len(self.keys) if self.n_keys is None else self.n_keys
        start = self.magic + struct.pack("<IQQ", self.version, n_tensors, n_keys)
        keys = b"".join(pack(STRING, name) + value for name, value in self.keys)
        return start + keys + self._table()

    def _table(self) -> bytes:
        out, offset = b"", 0
        for tensor in self.tensors:
            out += pack(STRING, tensor.name) + struct.pack(f"<I{len(tensor.dims)}Q", len(tensor.dims), *tensor.dims)
            out += struct.pack("<IQ", tensor.kind, offset if tensor.offset is None else tensor.offset)
            offset += len(_pad(tensor.data))
        return out

    def with_key(self, name: str, value: bytes) -> MiniFile:
        """The key replaced, or added at the end."""
        raw = name.encode()
        if raw not in dict(self.keys):
            return replace(self, keys=(*self.keys, (raw, value)))
        return replace(self, keys=tuple((key, value if key == raw else old) for key, old in self.keys))

    def without_key(self, name: str) -> MiniFile:
        """The key left out."""
        return replace(self, keys=tuple(item for item in self.keys if item[0] != name.encode()))

    def with_tensor(self, which: str, **changes: Any) -> MiniFile:
        """One tensor changed."""
        raw = which.encode()
        return replace(self, tensors=tuple(replace(t, **changes) if t.name == raw else t for t in self.tensors))

    def without_tensor(self, name: str) -> MiniFile:
        """One tensor left out."""
        return replace(self, tensors=tuple(t for t in self.tensors if t.name != name.encode()))

    def tensor(self, name: str) -> MiniTensor:
        """The tensor of that name."""
        return next(t for t in self.tensors if t.name == name.encode())


def take_apart(path: Path) -> MiniFile:
    """A good file as parts."""
    head, raw = read_head(path), path.read_bytes()
    keys = []
    for name, value in head.metadata.items():
        kind = struct.pack("<I", value.kind) if value.n is None else struct.pack("<IIQ", ARRAY, value.kind, value.n)
        keys.append((name.encode(), kind + value.raw))
    numbers = {quant_of(number): number for number in quant_numbers()}
    tensors = [
        MiniTensor(t.name.encode(), t.dims, numbers[t.quant], raw[t.offset : t.offset + t.size]) for t in head.tensors
    ]
    return MiniFile(tuple(keys), tuple(tensors))


def split(path: Path, n_parts: int, directory: Path) -> list[Path]:
    """The file as `n_parts` parts, the metadata in the first, as llama.cpp's own splitter writes them."""
    whole = take_apart(path)
    names = [directory / f"{path.stem}-{number:05d}-of-{n_parts:05d}.gguf" for number in range(1, n_parts + 1)]
    step = -(-len(whole.tensors) // n_parts)
    for number, name in enumerate(names):
        part = replace(
            whole,
            keys=whole.keys if number == 0 else (),
            tensors=whole.tensors[number * step : (number + 1) * step],
        )
        name.write_bytes(as_part(part, number, n_parts, len(whole.tensors)).to_bytes())
    return names


def as_part(part: MiniFile, number: int, count: int, n_tensors: int) -> MiniFile:
    """The keys that make a file the part `number` (from 0) of `count`."""
    part = part.with_key("split.no", scalar(UINT16, number)).with_key("split.count", scalar(UINT16, count))
    return part.with_key("split.tensors.count", scalar(INT32, n_tensors))


def _pad(data: bytes) -> bytes:
    return data + bytes(-len(data) % ALIGNMENT)


@dataclass(frozen=True)
class Broken:
    """One fault: how it gets into a good file, and what the message about it must match."""

    make: Callable[[MiniFile], bytes]
    message: str


def _key(name: str, value: bytes, message: str) -> Broken:
    return Broken(lambda f: f.with_key(name, value).to_bytes(), message)


def _no_key(name: str, message: str) -> Broken:
    return Broken(lambda f: f.without_key(name).to_bytes(), message)


def _tensor(message: str, **changes: Any) -> Broken:
    return Broken(lambda f: f.with_tensor("blk.1.attn_q.weight", **changes).to_bytes(), message)


def _cut(where: Callable[[MiniFile], int], message: str) -> Broken:
    return Broken(lambda f: f.to_bytes()[: where(f)], message)


def _raw_key(raw: bytes, message: str) -> Broken:
    """`raw` as the value of the last key, with everything behind it as it was."""
    return Broken(lambda f: replace(f, keys=(*f.keys, (b"hostile", raw))).to_bytes(), message)


def _tokens(change: Callable[[list[str]], list[Any]], message: str) -> Broken:
    tokens = make_vocab(MOE.n_vocab).tokens
    return _key("tokenizer.ggml.tokens", array(STRING, change(tokens)), message)


def _badly_aligned(file: MiniFile) -> bytes:
    """A file that keeps an alignment of 8, with its data 8 bytes off a multiple of 32."""
    head = file.with_key("general.alignment", u32(8))
    missing = (8 - len(head.head())) % 32
    head = head.with_key("general.name", scalar(STRING, "n" * (len("random mini") + missing)))
    return head.head() + b"".join(tensor.data for tensor in file.tensors)


def _more_tokens(count: int, message: str) -> Broken:
    def make(file: MiniFile) -> bytes:
        vocab = make_vocab(MOE.n_vocab + count)
        file = file.with_key("tokenizer.ggml.token_type", array(INT32, vocab.types))
        return file.with_key("tokenizer.ggml.tokens", array(STRING, vocab.tokens)).to_bytes()

    return Broken(make, message)


def _replaced(tokens: list[Any], index: int, token: bytes) -> list[Any]:
    return [*tokens[:index], token, *tokens[index + 1 :]]


_TOKENS_KEY = "tokenizer.ggml.tokens"

_EPS = "attention.layer_norm_rms_epsilon"

BROKEN: dict[str, Broken] = {
    # cut off
    "empty": _cut(lambda _: 0, "cut off: the magic number"),
    "only magic": _cut(lambda _: 4, "cut off: the version"),
    "cut in the counts": _cut(lambda _: 12, "cut off: the number of tensors"),
    "cut in a key": _cut(lambda _: 30, "more than its 30 bytes can hold"),
    "cut in the tokens": _cut(lambda f: f.head().index(b"tokenizer.ggml.tokens") + 400, "tokenizer.ggml.tokens"),
    "cut in the tensor table": _cut(lambda f: len(f.head()) - 20, "cut off: the (shape|type|offset|name) of tensor"),
    "cut before the data": _cut(lambda f: len(f.head()), "cut off: tensor token_embd.weight needs bytes"),
    "cut in the data": _cut(lambda f: len(f.to_bytes()) // 2, r"cut off: tensor \S+ needs bytes up to \d+, the file"),
    "last tensor cut": _cut(
        lambda f: len(f.to_bytes()) - 64, "cut off: tensor blk.1.ffn_down_exps.weight needs bytes up to"
    ),
    # head
    "wrong magic": Broken(lambda f: replace(f, magic=b"GGML").to_bytes(), "is not a GGUF file"),
    "version 0": Broken(lambda f: replace(f, version=0).to_bytes(), "version 0 is not supported"),
    "version 1": Broken(lambda f: replace(f, version=1).to_bytes(), "version 1 is not supported"),
    "version 99": Broken(lambda f: replace(f, version=99).to_bytes(), "version 99 is not supported"),
    "big-endian": Broken(lambda f: replace(f, version=0x03000000).to_bytes(), "big-endian"),
    "a billion keys": Broken(lambda f: replace(f, n_keys=10**9).to_bytes(), "claims 1000000000 keys"),
    "one key too many": Broken(lambda f: replace(f, n_keys=len(f.keys) + 1).to_bytes(), ""),
    "one key too few": Broken(lambda f: replace(f, n_keys=len(f.keys) - 1).to_bytes(), ""),
    "2^63 tensors": Broken(lambda f: replace(f, n_tensors=1 << 63).to_bytes(), "claims 9223372036854775808 tensors"),
    "one tensor too many": Broken(lambda f: replace(f, n_tensors=len(f.tensors) + 1).to_bytes(), ""),
    "no tensors": Broken(lambda f: replace(f, tensors=()).to_bytes(), "has no tensors"),
    # metadata
    "string of 2^63": _raw_key(struct.pack("<IQ", STRING, 1 << 63), "claims 9223372036854775808 bytes"),
    "string past the end": _raw_key(struct.pack("<IQ", STRING, 60 << 20), "cut off: the value of hostile"),
    "array of 2^60": _raw_key(array(UINT32, [1], count=1 << 60), "cut off: the value of hostile"),
    "array of 2^40 strings": _raw_key(array(STRING, ["a"], count=1 << 40), "claims 1099511627776 strings"),
    "nested array": _raw_key(struct.pack("<IIQ", ARRAY, ARRAY, 1) + array(UINT32, [1])[4:], "array of arrays"),
    "unknown value type": _raw_key(struct.pack("<II", 13, 0), "unknown type 13"),
    "unknown element type": _raw_key(struct.pack("<IIQ", ARRAY, 77, 1), "unknown type 77"),
    "key twice": Broken(lambda f: replace(f, keys=(*f.keys, f.keys[0])).to_bytes(), "is there twice"),
    "key without a name": Broken(lambda f: replace(f, keys=(*f.keys, (b"", u32(1)))).to_bytes(), "has no name"),
    "key not UTF-8": Broken(lambda f: replace(f, keys=(*f.keys, (b"\xff\xfe", u32(1)))).to_bytes(), "no plain text"),
    "key twice for a C string": Broken(
        lambda f: replace(f, keys=((b"general.architecture\0a", u32(1)), *f.keys)).to_bytes(), "no plain text"
    ),
    "alignment 0": _key("general.alignment", u32(0), "not a power of two"),
    "alignment 48": _key("general.alignment", u32(48), "not a power of two"),
    "alignment of a wrong type": _key("general.alignment", scalar(STRING, "32"), "must be u32, not string"),
    "alignment 8": Broken(_badly_aligned, "does not lie at a multiple of 32 bytes"),
    "alignment that is not the file's": _key("general.alignment", u32(4096), "starts at|cut off"),
    # tensor table
    "tensor twice": Broken(lambda f: replace(f, tensors=(*f.tensors, f.tensors[-1])).to_bytes(), "is there twice"),
    "tensor name too long": _tensor("the name of tensor 16 claims 64 bytes", name=b"x" * 64),
    "tensor name with a zero byte": _tensor("no plain text", name=b"blk.1.attn_q.weight\0"),
    "tensor type 31": _tensor("unknown type 31", kind=31),
    "tensor type 2^31": _tensor("unknown type 2147483648", kind=1 << 31),
    "no dimensions": _tensor("has 0 dimensions", dims=()),
    "five dimensions": _tensor("has 5 dimensions", dims=(64, 64, 1, 1, 1)),
    "a dimension of zero": _tensor("has a dimension of 0", dims=(64, 0)),
    "dimensions that overflow": _tensor("too large", dims=(1 << 32, 1 << 32)),
    "a negative dimension": _tensor("too large", dims=(64, (1 << 64) - 1)),
    "more elements than bytes": _tensor("starts at|cut off", dims=(64, 1 << 20)),
    "rows that are no blocks": _tensor("blocks of Q4_K hold 256", kind=12),
    "overlapping tensors": _tensor("overlaps the one before", offset=0),
    "a gap between tensors": _tensor("leaves a gap", offset=1 << 20),
    "an offset of 2^64": _tensor("leaves a gap", offset=(1 << 64) - 32),
    "a norm in F16": Broken(
        lambda f: f.with_tensor("blk.0.attn_norm.weight", kind=1, data=bytes(128)).to_bytes(), "must be F32"
    ),
    "weights that are whole numbers": Broken(
        lambda f: f.with_tensor("blk.0.attn_q.weight", kind=26, data=bytes(64 * 64 * 4)).to_bytes(), "none for weights"
    ),
    # sizes
    "no architecture": _no_key("general.architecture", "general.architecture"),
    "architecture of a wrong type": _key("general.architecture", u32(1), "general.architecture must be string"),
    "an adapter": _key("general.type", scalar(STRING, "adapter"), "adapter"),
    "no block_count": _no_key("qwen3moe.block_count", "qwen3moe.block_count is missing"),
    "no context_length": _no_key("qwen3moe.context_length", "qwen3moe.context_length is missing"),
    "no embedding_length": _no_key("qwen3moe.embedding_length", "qwen3moe.embedding_length is missing"),
    "block_count 0": _key("qwen3moe.block_count", u32(0), "block_count is 0"),
    "block_count 513": _key("qwen3moe.block_count", u32(513), "block_count is 513"),
    "block_count as text": _key("qwen3moe.block_count", scalar(STRING, "2"), "must be u32, not string"),
    "block_count signed": _key("qwen3moe.block_count", scalar(INT32, 2), "must be u32, not i32"),
    "context_length 0": _key("qwen3moe.context_length", u32(0), "context_length is 0"),
    "embedding_length 0": _key("qwen3moe.embedding_length", u32(0), "embedding_length is 0"),
    "more prediction layers than layers": _key("qwen3moe.nextn_predict_layers", u32(3), "nextn_predict_layers is 3"),
    "2000 experts": _key("qwen3moe.expert_count", u32(2000), "expert_count is 2000"),
    "no expert used": _key("qwen3moe.expert_used_count", u32(0), "expert_used_count"),
    "more experts used than there are": _key("qwen3moe.expert_used_count", u32(5), "expert_used_count is 5"),
    "expert_count 0": _key("qwen3moe.expert_count", u32(0), "expert_used_count is 2"),
    "no expert_count": _no_key("qwen3moe.expert_count", "expert_used_count is 2"),
    "expert_count that is not the tensors'": _key("qwen3moe.expert_count", u32(3), "4 experts.*expert_count is 3"),
    "as many groups as experts": _key("qwen3moe.expert_group_count", u32(4), "expert_group_count is 4"),
    "experts that do not divide into groups": _key("qwen3moe.expert_group_count", u32(3), "expert_group_count is 3"),
    "no group used": _key("qwen3moe.expert_group_count", u32(2), "expert_group_used_count"),
    "head counts for other layers": _key("qwen3moe.attention.head_count", array(INT32, [2, 2, 2]), "3 values"),
    "a negative head count": _key("qwen3moe.attention.head_count_kv", array(INT32, [1, -1]), "-1"),
    "heads that do not divide": _key("qwen3moe.attention.head_count_kv", u32(3), "head_count_kv"),
    "head counts of a wrong type": _key("qwen3moe.attention.head_count", scalar(FLOAT32, 2.0), "must be u32"),
    "key_length 0": _key("qwen3moe.attention.key_length", u32(0), "key_length is 0"),
    "rotation of other size than heads": _key("qwen3moe.rope.dimension_count", u32(16), "rope.dimension_count is 16"),
    "values of other size than keys": _key("qwen3moe.attention.value_length", u32(64), "value_length is 64"),
    "a negative epsilon": _key(f"qwen3moe.{_EPS}", scalar(FLOAT32, -1.0), "layer_norm_rms_epsilon is -1.0"),
    "an epsilon that is no number": _key(f"qwen3moe.{_EPS}", scalar(FLOAT32, float("nan")), "epsilon is nan"),
    "unknown rope scaling": _key("qwen3moe.rope.scaling.type", scalar(STRING, "spiral"), "rope.scaling.type"),
    # vocabulary
    "no tokenizer": _no_key("tokenizer.ggml.model", "tokenizer.ggml.model is missing"),
    "a tokenizer without tokens": _key("tokenizer.ggml.model", scalar(STRING, "no_vocab"), "no vocabulary"),
    "no tokens": _no_key(_TOKENS_KEY, "tokenizer.ggml.tokens is missing"),
    "tokens that are numbers": _key(_TOKENS_KEY, array(UINT32, [1, 2]), "must be array of string"),
    "an empty vocabulary": _key(_TOKENS_KEY, array(STRING, []), "no tokens"),
    "token twice for a C string": _tokens(lambda t: [*t[:300], "a\0b", *t[301:]], "has the token 'a' twice"),
    "token twice": _tokens(lambda t: [*t[:-1], t[0]], "tokenizer.ggml.tokens has .* twice"),
    "more tokens than rows": _more_tokens(1, "401 tokens.*400 rows"),
    "special tokens outside the vocabulary": _tokens(lambda t: t[:300], "bos_token_id is 397"),
    "fewer types than tokens": _key("tokenizer.ggml.token_type", array(INT32, [1] * 5), "token_type has 5"),
    "types that are text": _key("tokenizer.ggml.token_type", array(STRING, ["a"] * 400), "token_type must be"),
    "fewer scores than tokens": _key("tokenizer.ggml.scores", array(FLOAT32, [1.0]), "scores has 1"),
    "no merges": _no_key("tokenizer.ggml.merges", "merges is missing"),
    "merges that are numbers": _key("tokenizer.ggml.merges", array(BOOL, [1]), "merges must be array of string"),
    "a merge without a space": _key("tokenizer.ggml.merges", array(STRING, ["ab"]), "merge 0"),
    "eos outside the vocabulary": _key("tokenizer.ggml.eos_token_id", u32(400), "eos_token_id is 400"),
    "a template that is a number": _key("tokenizer.chat_template", u32(1), "chat_template must be string"),
}
"""Faults of a mini MoE model that must be refused before llama.cpp sees the file."""

HARMLESS: dict[str, Callable[[MiniFile], bytes]] = {
    "version 2": lambda f: replace(f, version=2).to_bytes(),
    "no name": lambda f: f.without_key("general.name").to_bytes(),
    "an unknown key": lambda f: f.with_key("somebody.else", array(STRING, ["a", ""])).to_bytes(),
    "an empty array": lambda f: f.with_key("somebody.else", array(UINT32, [])).to_bytes(),
    "text that is not UTF-8": lambda f: f.with_key("general.name", scalar(STRING, b"\xff\x1b[31m\n")).to_bytes(),
    "a token that is not UTF-8": lambda f: f.with_key(
        _TOKENS_KEY, array(STRING, _replaced(make_vocab(MOE.n_vocab).tokens, 300, b"\xc3\x28"))
    ).to_bytes(),
    "an empty token": lambda f: f.with_key(
        _TOKENS_KEY, array(STRING, _replaced(make_vocab(MOE.n_vocab).tokens, 300, b""))
    ).to_bytes(),
    "bytes behind the last tensor": lambda f: f.to_bytes() + bytes(1000),
    "no padding behind the last tensor": lambda f: f.to_bytes()[: -(-len(f.tensors[-1].data) % ALIGNMENT) or None],
    "head counts per layer": lambda f: f.with_key("qwen3moe.attention.head_count_kv", array(INT32, [1, 1])).to_bytes(),
    "window flags for fewer layers": lambda f: f.with_key(
        "qwen3moe.attention.sliding_window_pattern", array(BOOL, [1])
    ).to_bytes(),
}
"""Odd files that are in order; llama.cpp loads them too."""
