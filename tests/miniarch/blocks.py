"""Random tensor data in every type that experts come in: valid blocks of about mean 0 and a wanted spread.

Nothing is quantised: a block is random bytes, and its own factor is set so that the values have the spread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from daemon.native.gguf_types import Quant, quant_numbers, quant_of

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

QUANTS: dict[str, Quant] = {quant.name: quant for number in quant_numbers() if (quant := quant_of(number))}
PLAIN = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class Layout:
    """Where a block's factor (an f16) lies, and the spread of the block's values at factor 1.

    `offset` is what is taken off each value, as a multiple of the factor, kept in the f16 behind the factor; `fixed`
    are bytes that are not random, from the position given.
    """

    factor_at: int
    spread: float
    offset: float | None = None
    fixed: tuple[int, bytes] | None = None


_SAME_SCALES = bytes([32 | (32 >> 4) << 6] * 8 + [0] * 4)
"""The scales and the offsets of all eight sub-blocks of a Q4_K or Q5_K block are 32."""

LAYOUTS = {
    "Q4_0": Layout(0, 4.64),
    "Q8_0": Layout(0, 73.9),
    "Q4_K": Layout(0, 147.5, 7.5, (4, _SAME_SCALES)),
    "Q5_K": Layout(0, 295.5, 15.5, (4, _SAME_SCALES)),
    "Q6_K": Layout(208, 1366.0),
    "IQ4_XS": Layout(0, 1284.0),
    "IQ3_S": Layout(0, 142.0),
    "IQ2_XS": Layout(0, 55.6),
}
_MXFP4_SPREAD = 2.93
"""Of a block with exponent 127: its values are 0, 1, 2, 3, 4, 6, 8, 12 and their negatives, by half."""

KINDS = (*PLAIN, *LAYOUTS, "MXFP4")
"""Every type that can be drawn."""


def size(kind: str, n_elements: int) -> int:
    """Bytes of whole blocks.

    Raises:
        ValueError: `n_elements` is no multiple of the block.
    """
    quant = QUANTS[kind]
    if n_elements % quant.elements:
        raise ValueError(f"{n_elements} elements are no blocks of {kind}, which have {quant.elements}")
    return n_elements // quant.elements * quant.bytes


def draw(kind: str, n_elements: int, spread: float, random: np.random.Generator) -> Bytes:
    """Blocks for `n_elements` values."""
    if kind in PLAIN:
        return plain(kind, random.standard_normal(n_elements, dtype=np.float32) * np.float32(spread))
    count = size(kind, n_elements) // QUANTS[kind].bytes
    blocks = np.frombuffer(bytearray(random.bytes(count * QUANTS[kind].bytes)), np.uint8).reshape(count, -1)
    factors = random.uniform(0.7, 1.3, count).astype(np.float32) * np.float32(spread)
    if kind == "MXFP4":
        blocks[:, 0] = 127 + np.round(np.log2(factors / _MXFP4_SPREAD))
    else:
        _set_factors(blocks, factors, LAYOUTS[kind])
    return blocks.reshape(-1)


def plain(kind: str, values: Floats) -> Bytes:
    """Values as they are, in a type without blocks."""
    if kind == "F32":
        return values.view(np.uint8)
    if kind == "F16":
        return _half(values).reshape(-1)
    return np.ascontiguousarray(values.view(np.uint16)[1::2]).view(np.uint8)  # BF16: the upper half of an F32


def _set_factors(blocks: Bytes, factors: Floats, layout: Layout) -> None:
    at, factors = layout.factor_at, factors / np.float32(layout.spread)
    blocks[:, at : at + 2] = _half(factors)
    if layout.offset is not None:
        blocks[:, at + 2 : at + 4] = _half(factors * np.float32(layout.offset))
    if layout.fixed is not None:
        start, data = layout.fixed
        blocks[:, start : start + len(data)] = np.frombuffer(data, np.uint8)


def _half(values: npt.NDArray[Any]) -> Bytes:
    return values.astype(np.float16).view(np.uint8).reshape(-1, 2)
