"""How many experts of each layer should be in VRAM: from measured prices and a hit-rate curve to slots per layer.

A layer is *cold* (no slots, upstream's path), *partial* (some experts in slots, one more slot holds zeros) or *full*
(every expert, nothing on the CPU). Seconds of a layer per step, with S slots and the hit rate h(S):

    cold     g + c + T
    partial  g + p + max(h G, (1 - h) T)
    full     g + G

g is what every layer costs, T and G are what its routed experts take on the CPU and on the device, p is the fixed price
of a chain on each side, c that of upstream's hand-over to the CPU. Where c = p, partial layers beat a mixture of
full and cold layers of the same size when (h - S) T > S p.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

MARGIN = 0.01
"""What measurements can tell."""
SPLIT_MARGIN = 0.15
"""The static split must be predicted faster than slots by this share: on an H200 with one sequence its steps took 1.2
to 1.6 times what the prices say, those of equal shares at most 1.14 times (docs/benchmarks.md)."""
FULL_MARGIN = 0.4
"""A plan with full layers between or behind partial ones must be predicted faster than equal shares by this share.

On an H200 (docs/benchmarks.md, older reports too) steps with equal shares took 0.80 to 1.14 times what the prices say,
those with 21 to 40 of 48 layers full 1.0 to 1.46 times, wherever they were. A likely reason: the device's next part can
be recorded ahead only where it is short, and full layers make it long. Only where nearly all experts fit is the gain
large enough to be believed.
"""
FULL_OR_NOTHING_MARGIN = 0.05
"""The same where equal shares do not pay at all, so that the other choice is nothing."""


class Kind(StrEnum):
    """What a plan asks for: slots, whole layers loaded to the device as upstream can, or nothing on the device."""

    RESIDENCY = "residency"
    SPLIT = "split"
    OFF = "off"


@dataclass(frozen=True)
class LayerState:
    """One layer: seconds per step, bytes of one expert, and the hit rate with 0 to `n_expert` slots."""

    expert_bytes: int
    hit_rates: tuple[float, ...]
    fixed: float
    partial_price: float
    cold_price: float
    cpu: float
    device: float

    @property
    def n_expert(self) -> int:
        """Routed experts."""
        return len(self.hit_rates) - 1

    def seconds(self, slots: int) -> float:
        """A step's time in this layer."""
        if slots == 0:
            return self.fixed + self.cold_price + self.cpu
        if slots == self.n_expert:
            return self.fixed + self.device
        hits = self.hit_rates[slots]
        return self.fixed + self.partial_price + max(hits * self.device, (1 - hits) * self.cpu)

    def bytes(self, slots: int) -> int:
        """VRAM that `slots` take: one more is there for the zeros."""
        return (slots + 1) * self.expert_bytes if slots else 0

    @property
    def whole(self) -> int:
        """VRAM of all experts where the loader puts them there, without a slot for zeros."""
        return self.n_expert * self.expert_bytes


@dataclass(frozen=True)
class Plan:
    """A decision. `slots` are per layer; in a split they are `n_expert` or 0. `seconds` is the predicted step."""

    kind: Kind
    slots: tuple[int, ...]
    bytes: int
    seconds: float

    @property
    def n_cold(self) -> int:
        """Layers without slots: in a split, how many of the first layers keep their experts on the CPU."""
        return sum(not slots for slots in self.slots)


def plan(layers: Sequence[LayerState], budget: int) -> Plan:
    """The fastest placement that takes at most `budget` bytes, as far as the prices predict."""
    split = static_split(layers, budget)
    best = _clearly_faster(all_partial(layers, budget), layers, budget)
    if not any(best.slots):
        return split
    partial = any(0 < n < layer.n_expert for n, layer in zip(best.slots, layers, strict=True))
    flattery = 1 - SPLIT_MARGIN if partial else 1 + MARGIN
    return best if split.seconds > best.seconds * flattery else split


def in_slots(layers: Sequence[LayerState], budget: int) -> Plan:
    """The fastest placement that a running engine can have. Nothing is loaded anew, so full layers have a slot for
    zeros too. A layer that slots do not make faster has none; `Kind.OFF` where that is so of all.
    """
    none = _made(Kind.OFF, layers, [0] * len(layers))
    best = _clearly_faster(min(none, paying(layers, budget), key=lambda found: found.seconds), layers, budget)
    return best if any(best.slots) else none


def _clearly_faster(best: Plan, layers: Sequence[LayerState], budget: int) -> Plan:
    """`best`, or what is predicted to be faster by more than predictions err."""
    tail, anywhere = whole_tail(layers, budget), mixed(layers, budget)
    other = anywhere if anywhere.seconds < tail.seconds * (1 - MARGIN) else tail
    margin = FULL_MARGIN if any(best.slots) else FULL_OR_NOTHING_MARGIN
    return other if other.seconds < best.seconds * (1 - margin) else best


def static_split(layers: Sequence[LayerState], budget: int) -> Plan:
    """What upstream can do: the experts of the last layers on the device, the first ones on the CPU; the fastest."""
    slots, used = [0] * len(layers), 0
    best = _made(Kind.OFF, layers, slots, 0)
    for index in reversed(range(len(layers))):
        used += layers[index].whole
        if used > budget:
            break
        slots[index] = layers[index].n_expert
        best = min(best, _made(Kind.SPLIT, layers, slots, used), key=lambda found: found.seconds)
    return best


def all_partial(layers: Sequence[LayerState], budget: int) -> Plan:
    """The same share of every layer; layers stay partial even where all of their experts would fit."""
    share = budget / max(1, sum(layer.whole for layer in layers))
    slots = [min(layer.n_expert - 1, max(0, int(share * layer.n_expert + 1e-9) - 1)) for layer in layers]
    return _made(Kind.RESIDENCY, layers, slots)


def paying(layers: Sequence[LayerState], budget: int) -> Plan:
    """The same share of every layer that is faster with it; the others have no slots."""
    chosen = list(range(len(layers)))
    while chosen:
        shares = all_partial([layers[index] for index in chosen], budget).slots
        having = dict(zip(chosen, shares, strict=True))
        chosen = [index for index, n in having.items() if layers[index].seconds(n) < layers[index].seconds(0)]
        if len(chosen) == len(having):
            return _made(Kind.RESIDENCY, layers, [having.get(index, 0) for index in range(len(layers))])
    return _made(Kind.RESIDENCY, layers, [0] * len(layers))


def whole_tail(layers: Sequence[LayerState], budget: int) -> Plan:
    """The last layers full, the others the same share each where that pays; as many full ones as is fastest."""
    slots = [layer.n_expert for layer in layers]
    found = [all_partial(layers, budget)]
    for first in reversed(range(len(layers))):
        left = budget - sum(layer.bytes(layer.n_expert) for layer in layers[first:])
        if left < 0:
            break
        found.append(_made(Kind.RESIDENCY, layers, [*paying(layers[:first], left).slots, *slots[first:]]))
    return min(found, key=lambda plan: plan.seconds)


def mixed(layers: Sequence[LayerState], budget: int) -> Plan:
    """Slots by marginal gain per byte, along the lower convex hull of each layer's (bytes, seconds).

    This is the usual greedy solution of the multiple-choice knapsack (Sinha and Zoltners, 1979): optimal but for what
    the last step leaves of the budget, which single better choices then use.
    """
    slots = [0] * len(layers)
    left = budget
    steps = [(gain, index, to) for index, layer in enumerate(layers) for gain, to in _hull(layer)]
    for _, index, to in sorted(steps, key=lambda step: (-step[0], step[1], step[2])):
        cost = layers[index].bytes(to) - layers[index].bytes(slots[index])
        if cost <= left and to > slots[index]:
            slots[index], left = to, left - cost
    _use_rest(layers, slots, left)
    return _made(Kind.RESIDENCY, layers, slots)


def _hull(layer: LayerState) -> list[tuple[float, int]]:
    """(gain in seconds per byte, slots) of each step along the hull, the steepest first."""
    corners = [0]
    for slots in range(1, layer.n_expert + 1):
        while len(corners) > 1 and _slope(layer, corners[-2], corners[-1]) <= _slope(layer, corners[-1], slots):
            corners.pop()
        corners.append(slots)
    steps = [(_slope(layer, a, b), b) for a, b in pairwise(corners)]
    return [(gain, to) for gain, to in steps if gain > 0]


def _slope(layer: LayerState, less: int, more: int) -> float:
    return (layer.seconds(less) - layer.seconds(more)) / (layer.bytes(more) - layer.bytes(less))


def _use_rest(layers: Sequence[LayerState], slots: list[int], left: int) -> None:
    """The best single choice within what is left, until none is better: each leaves less for the others."""
    while True:
        options = [_best_within(layer, n, left) for layer, n in zip(layers, slots, strict=True)]
        both = enumerate(zip(layers, slots, options, strict=True))
        gains = [(layer.seconds(n) - layer.seconds(best), index) for index, (layer, n, best) in both]
        gain, index = max(gains, default=(0.0, 0))
        if gain <= 0:
            return
        left -= layers[index].bytes(options[index]) - layers[index].bytes(slots[index])
        slots[index] = options[index]


def _best_within(layer: LayerState, slots: int, left: int) -> int:
    """The fastest number of slots, not less than now, that `left` more bytes pay for."""
    most = min(layer.n_expert, (left + layer.bytes(slots)) // layer.expert_bytes - 1)
    return min(range(slots, most + 1), key=layer.seconds, default=slots)


def _made(kind: Kind, layers: Sequence[LayerState], slots: Sequence[int], used: int | None = None) -> Plan:
    total = sum(layer.bytes(n) for layer, n in zip(layers, slots, strict=True)) if used is None else used
    seconds = sum(layer.seconds(n) for layer, n in zip(layers, slots, strict=True))
    return Plan(kind, tuple(slots), total, seconds)
