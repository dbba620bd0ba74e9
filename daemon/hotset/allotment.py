"""How many slots each layer gets of a budget for all: where one more slot would serve the most selections. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from daemon.hotset.policy import Values

Hits = npt.NDArray[np.float64]
"""Selections that 0 to n_expert slots would have served, [layers, n_expert + 1]."""

LEAST_GAIN = 0.03
"""Another allotment must serve so much more: pooling is worth little, and resizing moves whole layers."""


class RankCounts:
    """How hot the experts are that get chosen: how often the hottest of its layer, the second, and so on.

    This is Mattson's stack distance (1970) with heat for recency: the hit rate of every number of slots from one pass,
    with the experts in them that heat would put there.
    """

    def __init__(self, n_layers: int, n_expert: int, half_life: float = 4096.0) -> None:
        """`half_life` is in tokens. `counts` are [n_layers, n_expert], the hottest first."""
        self.counts = np.zeros((n_layers, n_expert))
        self._layers = np.arange(n_layers)[:, None]
        self._halvings = 1 / half_life

    def observe(self, heat: Values, ids: npt.NDArray[np.integer]) -> None:
        """`heat` as it was before the step that chose `ids` [n_tokens, layers, top_k]."""
        self.counts *= 0.5 ** (self._halvings * len(ids))
        for token in ids:
            chosen = heat[self._layers, token]
            ranks = (heat[:, None, :] > chosen[:, :, None]).sum(axis=2)
            # Equally hot experts keep the order of their ids.
            ranks += ((heat[:, None, :] == chosen[:, :, None]) & (np.arange(heat.shape[1]) < token[:, :, None])).sum(2)
            np.add.at(self.counts, (self._layers, ranks), 1)

    def hits(self) -> Hits:
        """Selections that each number of slots would have served."""
        return np.pad(np.cumsum(self.counts, axis=1), ((0, 0), (1, 0)))


def allot(hits: Hits, n_expert: Sequence[int], expert_bytes: Sequence[int], budget: int, floor: int = 1) -> list[int]:
    """Slots of each layer within `budget` bytes; every layer has one more, for zeros, as soon as it has any.

    Each layer gets `floor` slots first: with fewer than a token chooses, a layer that becomes busy would look useless
    for ever. If that is more than the budget all get fewer, and none at all if there is not room for one each. The rest
    goes where it serves the most selections per byte, along the concave hull of each layer's curve: the usual greedy
    solution of the multiple-choice knapsack (Sinha and Zoltners, 1979).
    """
    sizes = np.array(expert_bytes)
    floors = next((least for least in range(floor, 0, -1) if _cost(least, n_expert, sizes) <= budget), 0)
    slots = [min(floors, count) for count in n_expert]
    if not floors:
        return slots
    left = budget - _cost(floors, n_expert, sizes)
    steps = [
        (gain / expert_bytes[index], index, to)
        for index, curve in enumerate(hits)
        for gain, to in _hull(curve[: n_expert[index] + 1], slots[index])
    ]
    for _, index, to in sorted(steps, key=lambda step: (-step[0], step[1], step[2])):
        more = min(to - slots[index], left // expert_bytes[index])
        slots[index] += int(more)
        left -= int(more) * expert_bytes[index]
    return slots


def gain(hits: Hits, old: Sequence[int], new: Sequence[int]) -> float:
    """What another allotment would serve more, as a share of what the old one serves."""
    layers = np.arange(len(hits))
    before, after = float(hits[layers, old].sum()), float(hits[layers, new].sum())
    if before > 0:
        return after / before - 1
    return float("inf") if after > 0 else 0.0


def _cost(slots: int, n_expert: Sequence[int], sizes: npt.NDArray[np.int64]) -> int:
    return int(sum((min(slots, count) + 1) * int(size) for count, size in zip(n_expert, sizes, strict=True)))


def _hull(curve: npt.NDArray[np.float64], start: int) -> Iterator[tuple[float, int]]:
    """(selections per slot, slots) of each step along the upper hull from `start` on, the steepest first."""
    while start < len(curve) - 1:
        slopes = (curve[start + 1 :] - curve[start]) / np.arange(1, len(curve) - start)
        steepest = len(slopes) - 1 - int(slopes[::-1].argmax())
        yield float(slopes[steepest]), start + 1 + steepest
        start += 1 + steepest
