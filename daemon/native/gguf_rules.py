"""Rules for a model's sizes: everything in the head of a file that would end llama.cpp's process with an assertion."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from daemon.native.gguf_metadata import MAX_UINT32, Metadata
from daemon.native.gguf_reader import TensorEntry

MAX_LAYERS = 512
MAX_EXPERTS = 1024
MAX_HEADS = 65_536
MAX_HEAD_SIZE = 65_536
ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")
GATING_FUNCTIONS = 4
_NO_WEIGHTS = frozenset({"Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64"})  # llama.cpp cannot multiply them
_TABLES = ("d2t", "tid2eid")  # what holds whole numbers on purpose has one of these in its name

# Architectures whose graph asserts that keys, values and the rotated part of a head have the same size.
UNIFORM_HEADS = frozenset(
    "arcee arctic baichuan bailingmoe cohere2moe dbrx deepseek dots1 ernie4_5 ernie4_5-moe exaone-moe "
    "gpt-oss granite granite_swa granitemoe grok grovemoe hunyuan-moe hy_v3 internlm2 llada-moe llama llama4 mellum "
    "minicpm mistral3 olmo olmo2 olmoe orion qwen2 qwen2moe qwen3 qwen3moe qwen3vl qwen3vlmoe rnd1 seed_oss "
    "smallthinker smollm3 starcoder2 xverse".split()
)
# Architectures whose graph asserts that keys and values have the same size.
VALUES_LIKE_KEYS = UNIFORM_HEADS | frozenset(
    "afmoe bailingmoe2 deepseek2-ocr gemma4 glm4moe granitehybrid jamba laguna lfm2moe maple minimax-01 minimax-m2 "
    "minimax-m3 nemotron_h nemotron_h_moe phimoe qwen35moe qwen3next qwen4exp".split()
)
# Architectures whose graph takes the heads of a layer to be as wide as the embedding.
HEADS_LIKE_EMBEDDING = frozenset(
    "arctic dbrx deepseek deepseek2-ocr grok jamba lfm2moe llada-moe olmoe phimoe qwen2moe".split()
)
# Architectures whose graph takes every head to have keys of its own.
KEYS_FOR_EVERY_HEAD = frozenset("deepseek2-ocr dots1 olmoe".split())


@dataclass(frozen=True)
class Sizes:
    """What the metadata says; tuples have one number per layer."""

    n_layer: int
    n_prediction: int
    n_embd: int
    n_ctx_train: int
    n_expert: int
    n_expert_used: int
    n_head: tuple[int, ...]
    n_head_kv: tuple[int, ...]
    key_length: int
    value_length: int


def check_sizes(metadata: Metadata) -> Sizes:
    """The sizes of the model.

    Raises:
        ModelUnusable: a key is missing, of a wrong type, out of bounds, or contradicts another.
    """
    _check_kind(metadata)
    n_layer = metadata.number(".block_count", least=1, most=MAX_LAYERS, required=True)
    n_prediction = metadata.number(".nextn_predict_layers", most=n_layer)
    n_ctx = metadata.number(".context_length", least=1, required=True)
    n_embd = metadata.number(".embedding_length", least=1, most=1 << 24, required=True)
    n_expert, n_used = _experts(metadata, n_layer)
    n_head = _heads(metadata, ".attention.head_count", n_layer, (0,) * n_layer)
    n_head_kv = _heads(metadata, ".attention.head_count_kv", n_layer, n_head)
    key_length, value_length = _head_sizes(metadata, n_embd, n_head, n_head_kv)
    _check_numbers(metadata)
    return Sizes(n_layer, n_prediction, n_embd, n_ctx, n_expert, n_used, n_head, n_head_kv, key_length, value_length)


def check_tensors(metadata: Metadata, tensors: Iterable[TensorEntry], sizes: Sizes, n_vocab: int) -> None:
    """The tensors must fit the sizes, as far as every architecture agrees.

    Raises:
        ModelUnusable: they do not.
    """
    for tensor in tensors:
        _check_type(metadata, tensor)
        if tensor.name == "token_embd.weight" and tensor.dims[-1] != n_vocab:
            raise metadata.fail(f"the vocabulary has {n_vocab} tokens and token_embd.weight {tensor.dims[-1]} rows")
        if tensor.name.endswith("_exps.weight") and len(tensor.dims) == 3 and tensor.dims[2] != sizes.n_expert:
            what = f"tensor {tensor.name} has {tensor.dims[2]} experts"
            raise metadata.fail(f"{what}, and {metadata.name('.expert_count')} is {sizes.n_expert}")


def _check_type(metadata: Metadata, tensor: TensorEntry) -> None:
    """Norms and biases are added and multiplied as F32; other weights need a type with a matrix product."""
    kind = tensor.quant.name
    if tensor.name.endswith(("norm.weight", ".bias")) and kind != "F32":
        raise metadata.fail(f"tensor {tensor.name} has the type {kind}, norms and biases must be F32")
    if kind in _NO_WEIGHTS and not any(table in tensor.name for table in _TABLES):
        raise metadata.fail(f"tensor {tensor.name} has the type {kind}, which is none for weights")


def _check_kind(metadata: Metadata) -> None:
    kind = metadata.text("general.type", "model")
    if kind != "model":
        raise metadata.fail(f"this is no language model: general.type says {kind[:40]!r}")
    if metadata.architecture == "clip":
        raise metadata.fail("this is no language model but the image part of one (clip)")


def _experts(metadata: Metadata, n_layer: int) -> tuple[int, int]:
    """Experts in a layer and experts per token (the most of all layers)."""
    count, used_key = metadata.number(".expert_count", most=MAX_EXPERTS), ".expert_used_count"
    used = max(metadata.per_layer(used_key, n_layer, 0))
    metadata.bounded(used_key, used, min(count, 1), count)
    groups = metadata.number(".expert_group_count", most=max(count - 1, 0))
    if groups > 1:
        if count % groups:
            raise metadata.fail(f"{metadata.name('.expert_group_count')} is {groups}, which does not divide {count}")
        key = ".expert_group_used_count"
        metadata.bounded(key, metadata.number(key), 1, groups - 1)
    metadata.number(".expert_gating_func", 1, most=GATING_FUNCTIONS)
    return count, used


def _heads(metadata: Metadata, key: str, n_layer: int, default: tuple[int, ...]) -> tuple[int, ...]:
    if metadata.value(key) is None:
        return default
    heads = metadata.per_layer(key, n_layer, 0)
    metadata.bounded(key, max(heads), 0, MAX_HEADS)
    return heads


def _head_sizes(
    metadata: Metadata, n_embd: int, n_head: tuple[int, ...], n_head_kv: tuple[int, ...]
) -> tuple[int, int]:
    """Elements of one key and of one value."""
    for layer, (heads, shared) in enumerate(zip(n_head, n_head_kv, strict=True)):
        if heads and shared and heads % shared:
            key = metadata.name(".attention.head_count_kv")
            raise metadata.fail(f"{key} is {shared}, which does not divide the {heads} heads of layer {layer}")
    if not n_head[0]:
        return _size(metadata, ".attention.key_length", 0, 0), _size(metadata, ".attention.value_length", 0, 0)
    keys = _size(metadata, ".attention.key_length", n_embd // n_head[0], 1)
    values = _size(metadata, ".attention.value_length", n_embd // n_head[0], 1)
    _check_heads(metadata, keys, values)
    for heads, shared in zip(n_head, n_head_kv, strict=True):
        if heads and shared:
            _check_layer(metadata, n_embd, keys, heads, shared)
    return keys, values


def _check_heads(metadata: Metadata, keys: int, values: int) -> None:
    """Parts of a head that the graph takes to be equal."""
    rotated = _size(metadata, ".rope.dimension_count", keys, 0)
    for key, size, strict in (
        (".attention.value_length", values, VALUES_LIKE_KEYS),
        (".rope.dimension_count", rotated, UNIFORM_HEADS),
    ):
        if size != keys and metadata.architecture in strict:
            name = metadata.name(".attention.key_length")
            raise metadata.fail(f"{metadata.name(key)} is {size}, and {name} is {keys}: they must be equal")
    if rotated % 2:
        raise metadata.fail(f"{metadata.name('.rope.dimension_count')} is {rotated}, it must be even")


def _check_layer(metadata: Metadata, n_embd: int, keys: int, heads: int, shared: int) -> None:
    """Head counts of a layer with attention that the graph cannot multiply."""
    if metadata.architecture in HEADS_LIKE_EMBEDDING and heads * keys != n_embd:
        what = f"{heads} heads of {metadata.name('.attention.key_length')} {keys}"
        raise metadata.fail(f"{what} are not as wide as {metadata.name('.embedding_length')}, which is {n_embd}")
    if metadata.architecture in KEYS_FOR_EVERY_HEAD and shared != heads:
        key = metadata.name(".attention.head_count_kv")
        raise metadata.fail(f"{key} is {shared}, it must be the number of heads, {heads}")


def _size(metadata: Metadata, key: str, default: int, least: int) -> int:
    return metadata.bounded(key, metadata.number(key, default), least, MAX_HEAD_SIZE)


def _check_numbers(metadata: Metadata) -> None:
    """Numbers that an assertion in a graph would look at."""
    scaling = metadata.text(".rope.scaling.type", "none")
    if scaling not in ROPE_SCALINGS:
        names = ", ".join(ROPE_SCALINGS)
        raise metadata.fail(f"{metadata.name('.rope.scaling.type')} is {scaling[:40]!r}, it must be one of {names}")
    metadata.decimal(".attention.layer_norm_rms_epsilon", 0.0)
    metadata.decimal(".attention.layer_norm_epsilon", 0.0)
    metadata.decimal(".rope.freq_base", 1.0)
    for key in (".feed_forward_length", ".expert_feed_forward_length"):
        value = metadata.value(key)
        if value is not None and value.n is None:
            metadata.number(key, most=MAX_UINT32 >> 1)
