"""Which decode steps are computed another way than the gate says, to learn what that would give. Pure.

A closed gate counts in bursts. An open one leaves a few steps to upstream's path, which tells what residency saves
where the streams are now.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass
from enum import StrEnum

PERIOD, BURST, WARM = 512, 64, 32
"""A closed gate counts 64 steps of 512. Heat must warm up first: in the traces of tests/data, ranks from the second
half of each burst give hit rates within 3 points of those of all steps; bursts of 16 without that are 10 too low."""

REFERENCE_PERIOD, REFERENCE_STEPS = 2048, 6
SETTLE = 2
"""Steps after a change that do not count: the graph is built, and prepared ahead from the second on."""


class Compute(StrEnum):
    """How a step is computed: `daemon.native.hotset.State` by name."""

    OFF = "off"
    COUNT = "count"
    ON = "on"


@dataclass(frozen=True)
class Counting:
    """What a decode step of a closed gate does; `learn`: its ranks tell of hit rates, since heat is warm."""

    compute: Compute
    learn: bool = False


def counting(step: int) -> Counting:
    """What to do with decode step number `step`, from 0 on, since the gate closed."""
    at = step % PERIOD
    return Counting(Compute.COUNT, at >= WARM) if at < BURST else Counting(Compute.OFF)


@dataclass(frozen=True)
class Reference:
    """Seconds per step without and with residency, of steps next to each other in the same streams."""

    off: float
    on: float
    width: int


class References:
    """Says how each decode step of an open gate is computed, and compares.

    Every 2048 steps six are left to upstream. The first two of them and of those behind do not count; the other four
    are compared with as many on either side. All must have the same number of sequences, or there is no comparison.
    """

    def __init__(self, period: int = REFERENCE_PERIOD) -> None:
        self._period = period
        self._step = 0
        self._off: list[float] = []
        self._on: list[float] = []
        self._before: deque[tuple[float, int]] = deque(maxlen=REFERENCE_STEPS - SETTLE)
        self._widths: set[int] = set()

    @property
    def compute(self) -> Compute:
        """How the next decode step is to be computed."""
        return Compute.OFF if self._period <= self._step < self._period + REFERENCE_STEPS else Compute.ON

    def observe(self, seconds: float, width: int) -> Reference | None:
        """A decode step of `width` sequences took so long; the comparison, if it was the last step of one."""
        at = self._step - self._period
        self._step += 1
        if at < 0:
            self._before.append((seconds, width))
            return None
        if at == 0:
            self._begin()
        self._widths.add(width)
        if at % REFERENCE_STEPS >= SETTLE:
            (self._off if at < REFERENCE_STEPS else self._on).append(seconds)
        return self._compare() if at == 2 * REFERENCE_STEPS - 1 else None

    def restart(self) -> None:
        """Something else came in between: a prompt, another placement, an idle time."""
        if self._step > self._period:
            self._step = 0
        self._before.clear()

    def _begin(self) -> None:
        self._off, self._on = [], [seconds for seconds, _ in self._before]
        self._widths = {width for _, width in self._before}

    def _compare(self) -> Reference | None:
        self._step = 0
        self._before.clear()
        if len(self._widths) != 1 or not self._off:
            return None
        return Reference(statistics.median(self._off), statistics.median(self._on), self._widths.pop())
