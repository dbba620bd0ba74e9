"""Shapes of generated models: the sizes, and from them every tensor with its place in the file."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from hotset_tools.random_weights import WeightType, row_bytes


@dataclass(frozen=True)
class Shape:
    """A qwen3moe model, or a dense qwen3 one where `n_expert` is 0.

    Types: experts, the other matrices of a layer, token embedding and output head.
    """

    name: str
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_size: int
    n_expert: int
    n_expert_used: int
    n_ff: int
    n_vocab: int
    n_ctx: int = 4096
    experts: WeightType = "Q4_K"
    layers: WeightType = "Q4_K"
    vocab: WeightType = "Q8_0"
    block_gain: float = 1.0
    """Size of what all blocks together add to the residual stream, against the embeddings."""

    @property
    def architecture(self) -> str:
        """llama.cpp's name."""
        return "qwen3moe" if self.n_expert else "qwen3"


@dataclass(frozen=True)
class Tensor:
    """One tensor; `dims` in numpy's order (rows before columns). `spread` None: all ones (a norm)."""

    name: str
    dims: tuple[int, ...]
    kind: WeightType
    spread: float | None

    @property
    def n_elements(self) -> int:
        return math.prod(self.dims)

    @property
    def size(self) -> int:
        """Bytes in the file, without padding."""
        return self.n_elements // self.dims[-1] * row_bytes(self.kind, self.dims[-1])


SHAPES = {
    shape.name: shape
    for shape in (
        # A step is mostly logits: what is left around the calls into llama.cpp can be measured.
        Shape("overhead", 2, 128, 2, 1, 64, 8, 2, 128, 151_936, layers="Q8_0", experts="Q8_0"),
        # A step of 8 sequences on two CPU cores takes 20 ms or more.
        Shape("step20", 24, 1024, 16, 4, 64, 32, 4, 512, 32_768, vocab="Q4_K"),
        # The same, with prompts of thousands of tokens in seconds: large experts, little attention.
        Shape("load", 10, 1024, 8, 2, 64, 32, 4, 512, 32_768, experts="Q8_0", vocab="Q4_K"),
        # The dimensions of a well-known model of 30 B parameters, 3 B of them active.
        Shape("qwen3-30b-a3b", 48, 2048, 32, 4, 128, 128, 8, 768, 151_936, n_ctx=32_768),
    )
}


def tensors(shape: Shape) -> Iterator[Tensor]:
    """Every tensor in the order of the file.

    Raises:
        ValueError: a row does not divide into the blocks of its type.
    """
    width, logits = shape.n_embd, 3.0  # spread of logits: enough that one token stands out
    yield _matrix("token_embd.weight", (shape.n_vocab, width), shape.vocab, math.sqrt(width))
    yield _matrix("output.weight", (shape.n_vocab, width), shape.vocab, logits)
    yield _norm("output_norm.weight", width)
    for layer in range(shape.n_layer):
        yield from _attention(shape, f"blk.{layer}.")
        yield from _experts(shape, f"blk.{layer}.") if shape.n_expert else _feed_forward(shape, f"blk.{layer}.")


def _attention(shape: Shape, prefix: str) -> Iterator[Tensor]:
    width, wide, narrow = shape.n_embd, shape.n_head * shape.head_size, shape.n_head_kv * shape.head_size
    yield _norm(prefix + "attn_norm.weight", width)
    yield _matrix(prefix + "attn_q.weight", (wide, width), shape.layers)
    yield _matrix(prefix + "attn_k.weight", (narrow, width), shape.layers)
    yield _matrix(prefix + "attn_v.weight", (narrow, width), shape.layers)
    yield _matrix(prefix + "attn_output.weight", (width, wide), shape.layers, _residual(shape))
    yield _norm(prefix + "attn_q_norm.weight", shape.head_size)
    yield _norm(prefix + "attn_k_norm.weight", shape.head_size)
    yield _norm(prefix + "ffn_norm.weight", width)


def _experts(shape: Shape, prefix: str) -> Iterator[Tensor]:
    width, count, wide = shape.n_embd, shape.n_expert, shape.n_ff
    yield _matrix(prefix + "ffn_gate_inp.weight", (count, width), "F32", 1.5)
    yield _matrix(prefix + "ffn_gate_exps.weight", (count, wide, width), shape.experts)
    yield _matrix(prefix + "ffn_up_exps.weight", (count, wide, width), shape.experts)
    yield _matrix(prefix + "ffn_down_exps.weight", (count, width, wide), shape.experts, _residual(shape))


def _feed_forward(shape: Shape, prefix: str) -> Iterator[Tensor]:
    width, wide = shape.n_embd, shape.n_ff
    yield _matrix(prefix + "ffn_gate.weight", (wide, width), shape.layers)
    yield _matrix(prefix + "ffn_up.weight", (wide, width), shape.layers)
    yield _matrix(prefix + "ffn_down.weight", (width, wide), shape.layers, _residual(shape))


def _residual(shape: Shape) -> float:
    """Gain of what is added to the residual stream, so that its size does not grow with the depth."""
    return shape.block_gain / math.sqrt(2 * shape.n_layer)


def _matrix(name: str, dims: tuple[int, ...], kind: WeightType, gain: float = 1.0) -> Tensor:
    """A matrix that multiplies the spread of its input by `gain`."""
    row_bytes(kind, dims[-1])
    return Tensor(name, dims, kind, gain / math.sqrt(dims[-1]))


def _norm(name: str, size: int) -> Tensor:
    return Tensor(name, (size,), "F32", None)
