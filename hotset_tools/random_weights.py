"""Random tensor data in GGUF block formats: valid blocks with mean 0 and a wanted spread, from a seed.

Nothing is quantised: the blocks are drawn directly, which is as fast as the random generator.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

WeightType = Literal["F32", "F16", "Q8_0", "Q4_K"]
Bytes = npt.NDArray[np.uint8]

BLOCK = {"F32": (1, 4), "F16": (1, 2), "Q8_0": (32, 34), "Q4_K": (256, 144)}
"""Elements and bytes of one block."""

_CHUNK_BLOCKS = 1 << 17
_SCALE = 32  # one 6-bit scale for every sub-block of Q4_K: the spread comes from the block's own factor
_Q4K_SCALES = np.array([_SCALE | (_SCALE >> 4) << 6] * 8 + [0] * 4, dtype=np.uint8)
_NIBBLE_SPREAD = 4.6098  # standard deviation of 0..15, each as likely
_INT8_SPREAD = 73.9  # standard deviation of -128..127, each as likely


def row_bytes(kind: WeightType, n_in: int) -> int:
    """Bytes of a row of `n_in` elements.

    Raises:
        ValueError: `n_in` is no multiple of the block.
    """
    elements, size = BLOCK[kind]
    if n_in % elements:
        raise ValueError(f"a row of {n_in} elements cannot be {kind}: blocks have {elements}")
    return n_in // elements * size


def chunks(kind: WeightType, n_elements: int, spread: float, random: np.random.Generator) -> Iterator[Bytes]:
    """Random data for `n_elements` with standard deviation `spread`, in pieces of some MB."""
    elements, _ = BLOCK[kind]
    remaining = n_elements // elements
    step = _CHUNK_BLOCKS if elements > 1 else _CHUNK_BLOCKS * 64
    while remaining:
        count = min(remaining, step)
        yield _draw(kind, count, spread, random)
        remaining -= count


def rows(kind: WeightType, n_rows: int, n_in: int, spread: float, random: np.random.Generator) -> Bytes:
    """A whole matrix as bytes, shape (n_rows, row_bytes)."""
    parts = list(chunks(kind, n_rows * n_in, spread, random))
    return np.concatenate(parts).reshape(n_rows, row_bytes(kind, n_in))


def encode(kind: WeightType, values: npt.NDArray[np.float32]) -> Bytes:
    """Given values in a block format, shape (rows, row_bytes).

    Raises:
        ValueError: this module cannot quantise to `kind`.
    """
    if kind == "F32":
        return values.view(np.uint8)
    if kind == "F16":
        return values.astype(np.float16).view(np.uint8)
    if kind != "Q8_0":
        raise ValueError(f"given values cannot be written as {kind}, only as F32, F16 or Q8_0")
    blocks = values.reshape(-1, 32)
    factor = (np.abs(blocks).max(axis=1) / 127).astype(np.float16)
    inverse = 1 / np.maximum(factor.astype(np.float32), np.float32(1e-7))
    numbers = np.clip(np.rint(blocks * inverse[:, None]), -127, 127).astype(np.int8)
    return np.concatenate([_half(factor), numbers.view(np.uint8)], axis=1).reshape(len(values), -1)


def _draw(kind: WeightType, count: int, spread: float, random: np.random.Generator) -> Bytes:
    if kind in ("F32", "F16"):
        values: npt.NDArray[Any] = random.standard_normal(count, dtype=np.float32) * np.float32(spread)
        return values.astype(np.float16 if kind == "F16" else np.float32).view(np.uint8)
    blocks = np.frombuffer(bytearray(random.bytes(count * BLOCK[kind][1])), dtype=np.uint8).reshape(count, -1)
    factor = random.uniform(0.7, 1.3, count).astype(np.float32) * np.float32(spread)
    if kind == "Q8_0":
        blocks[:, 0:2] = _half(factor / _INT8_SPREAD)
    else:
        blocks[:, 0:2] = _half(factor / (_SCALE * _NIBBLE_SPREAD))
        blocks[:, 2:4] = _half(factor * 7.5 / (_SCALE * _NIBBLE_SPREAD))  # 7.5: the mean of a nibble, taken off
        blocks[:, 4:16] = _Q4K_SCALES
    return blocks.reshape(-1)


def _half(values: npt.NDArray[Any]) -> Bytes:
    return values.astype(np.float16).view(np.uint8).reshape(-1, 2)
