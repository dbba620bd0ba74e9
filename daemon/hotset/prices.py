"""What a layer costs on either side: from timed steps of a few placements to the prices of the planner. Pure.

Seconds of a step of one token, with M layers that could have slots, m that have some, and k that are made whole:

    off      base + M (c + T)                                    upstream's path
    empty    base + m (p + T) + (M - m) (c + T)                  slots, and nobody in them
    whole    base + k G + (m - k) (p + T) + (M - m) (c + T)      all experts of k layers, the other slots empty
    nearly   the same, but each of the k layers lacks one expert: p + max((1 - e) G, e T) instead of G

p, c, T and G are those of the planner's model; e is the share of these layers' selections that were missed. T and G go
by the bytes that a layer's selection reads. docs/gate.md has the solution in words.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from pydantic import Field, model_validator

from daemon.hotset.files import Part
from daemon.hotset.planner import LayerState

LEAST_ROUNDS = 3
_LARGEST_MISS = 0.5
"""With more missed than that, a layer that lacks one expert tells nothing of a whole one."""

SMOOTHING = 0.25
"""What one more comparison counts in a correction."""


class Arm(StrEnum):
    """What is timed. `ON` is the placement as it stands, the others are above."""

    OFF = "off"
    EMPTY = "empty"
    NEARLY = "nearly"
    WHOLE = "whole"
    ON = "on"


class LayerFacts(Part):
    """One layer that could have slots; `expert_bytes` of one expert, `n_used` experts are chosen for each token."""

    n_expert: int = Field(ge=1)
    n_used: int = Field(ge=1)
    expert_bytes: int = Field(ge=1)

    def picked(self, width: int = 1) -> float:
        """Bytes that a step of `width` sequences reads: of its distinct experts, if all choose independently."""
        distinct = self.n_expert * (1 - (1 - min(1.0, self.n_used / self.n_expert)) ** width)
        return distinct * self.expert_bytes


class Times(Part):
    """Seconds of one step: all of it, and what lies within the CPU's chains."""

    wall: float = Field(ge=0)
    cpu: float = Field(default=0.0, ge=0)

    @property
    def wait(self) -> float:
        """What is not spent in the CPU's chains."""
        return max(0.0, self.wall - self.cpu)


Round = Mapping[Arm, Times]
"""One after the other, so that what slows all of them down does so alike."""


class Setup(Part):
    """What the arms were: the layers, which of them (by place in the list) had slots, and which were made whole.

    `missed` is the share of the selections in the whole layers that `nearly` missed.
    """

    layers: list[LayerFacts]
    slotted: list[int]
    whole: list[int] = Field(default=[])
    missed: float = Field(default=0.0, ge=0, le=1)

    @model_validator(mode="after")
    def _in_range(self) -> Setup:
        for places in (self.slotted, self.whole):
            if len(set(places)) < len(places) or not set(places) <= set(range(len(self.layers))):
                raise ValueError("a place is no layer's, or is there twice")
        return self

    def picked(self, places: Sequence[int] | None = None) -> float:
        """Bytes that a token reads in these layers, or in all."""
        chosen = self.layers if places is None else [self.layers[place] for place in places]
        return sum(layer.picked() for layer in chosen)


@dataclass(frozen=True)
class Prices:
    """Seconds per step: `base` of everything else, `partial` (p) and `cold` (c) of a layer, and per byte read on the
    CPU and on the device. `whole` says that layers were made whole, without which nothing is known of the device."""

    base: float
    partial: float
    cold: float
    cpu_rate: float
    device_rate: float
    whole: bool = True


class NoPrices(ValueError):
    """The times are not those of the arms."""


def solve(setup: Setup, rounds: Sequence[Round]) -> Prices:
    """The prices that explain the medians of all rounds; none is less than 0.

    Raises:
        NoPrices: there is no round, no slot, or an arm is missing.
    """
    if not rounds or not setup.slotted:
        raise NoPrices("prices need a layer with slots and times of it")
    off, empty = _median(rounds, Arm.OFF), _median(rounds, Arm.EMPTY)
    n, cpu_rate = len(setup.slotted), empty.cpu / setup.picked(setup.slotted)
    dearer = (empty.wall - off.wall) / n  # p - c
    whole = bool(setup.whole) and setup.missed < _LARGEST_MISS
    partial, device_rate = _of_whole(setup, rounds, cpu_rate) if whole else (max(0.0, dearer), 0.0)
    cold = max(0.0, partial - dearer)
    base = max(0.0, off.wall - len(setup.layers) * cold - cpu_rate * setup.picked())
    return Prices(base, max(partial, cold + dearer), cold, cpu_rate, device_rate, whole)


def _of_whole(setup: Setup, rounds: Sequence[Round], cpu_rate: float) -> tuple[float, float]:
    """p, and seconds per byte on the device.

    Only what the CPU waits for is compared: its own work is the larger part of a step and swings more. An empty layer
    hides the device's work behind the CPU's; `nearly` is k p dearer than `whole`, but for what it misses.
    """
    empty, nearly, whole = (_median(rounds, arm).wait for arm in (Arm.EMPTY, Arm.NEARLY, Arm.WHOLE))
    k, picked, missed = len(setup.whole), setup.picked(setup.whole), setup.missed
    hidden = empty - whole  # k p - device
    partial = (nearly - whole - missed * hidden + missed * cpu_rate * picked) / (1 - missed)  # k p
    device = partial - hidden
    if device < 0:  # too fast to be seen: then both say what p is
        partial, device = hidden, 0.0
    if partial < 0:
        partial, device = 0.0, max(0.0, -hidden)
    return partial / k, device / picked


def intervals(setup: Setup, rounds: Sequence[Round]) -> dict[str, tuple[float, float]]:
    """The smallest and the largest of each price that single rounds give."""
    each = [solve(setup, [one]) for one in rounds]
    names = ("base", "partial", "cold", "cpu_rate", "device_rate")
    values = {name: [getattr(one, name) for one in each] for name in names}
    return {name: (min(found), max(found)) for name, found in values.items()}


def _median(rounds: Sequence[Round], arm: Arm) -> Times:
    if missing := [one for one in rounds if arm not in one]:
        raise NoPrices(f"{len(missing)} rounds have no times of {arm.value}")
    wall = statistics.median(one[arm].wall for one in rounds)
    wait = statistics.median(one[arm].wait for one in rounds)
    return Times(wall=wall, cpu=max(0.0, wall - wait))


def layer_states(
    prices: Prices, layers: Sequence[LayerFacts], curves: Sequence[Sequence[float]], width: int = 1
) -> list[LayerState]:
    """What the planner chooses by, for steps of `width` sequences; `curves[i]` are hit rates of 0 to n_expert slots.

    Each layer bears its part of `base`, so that the sum is the whole step. p, c and `base` are taken to be the same for
    any width; they were measured with one sequence.
    """
    return [
        LayerState(
            expert_bytes=layer.expert_bytes,
            hit_rates=tuple(curve),
            fixed=prices.base / len(layers),
            partial_price=prices.partial,
            cold_price=prices.cold,
            cpu=prices.cpu_rate * layer.picked(width),
            device=prices.device_rate * layer.picked(width),
        )
        for layer, curve in zip(layers, curves, strict=True)
    ]


def off_seconds(prices: Prices, layers: Sequence[LayerFacts], width: int = 1) -> float:
    """A step on upstream's path."""
    return prices.base + sum(prices.cold + prices.cpu_rate * layer.picked(width) for layer in layers)


def on_seconds(
    prices: Prices, layers: Sequence[LayerFacts], slots: Sequence[int], hit_rates: Sequence[float], width: int = 1
) -> float:
    """A step with so many slots in each layer that serve such a share of its selections."""
    curves = [_point(layer.n_expert, n, rate) for layer, n, rate in zip(layers, slots, hit_rates, strict=True)]
    states = layer_states(prices, layers, curves, width)
    return sum(state.seconds(n) for state, n in zip(states, slots, strict=True))


def _point(n_expert: int, slots: int, rate: float) -> list[float]:
    """A curve of which one point is known."""
    return [rate if n == slots and 0 < n < n_expert else float(n >= max(slots, 1)) for n in range(n_expert + 1)]


class Correction:
    """p as serving shows it: the gain that was measured, off - on at the same place, against the predicted one.

    What is common to both, as a long context is, drops out. Each comparison moves p by a part of what would explain it;
    p stays between 0 and the larger one of p and c as measured plus T of an average layer, with which no partial layer
    pays.
    """

    def __init__(self, measured: Prices, layers: Sequence[LayerFacts]) -> None:
        self._measured = measured
        cpu = measured.cpu_rate * sum(layer.picked() for layer in layers) / max(1, len(layers))
        self._most = max(0.0, measured.cold - measured.partial) + cpu
        self._extra = 0.0

    @property
    def prices(self) -> Prices:
        """The prices with p as it is taken to be now."""
        return replace(self._measured, partial=self._measured.partial + self._extra)

    def observe(self, predicted_gain: float, measured_gain: float, n_partial: int, weight: float = SMOOTHING) -> None:
        """Seconds per step that residency was predicted, by `prices`, and measured to save with `n_partial` layers."""
        if n_partial < 1:
            return
        extra = self._extra + weight * (predicted_gain - measured_gain) / n_partial
        self._extra = min(self._most, max(-self._measured.partial, extra))
