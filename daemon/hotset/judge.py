"""The gate and the planner with what they go by: prices, corrected for each number of sequences. Pure.

Lists of layers are in the order of `Setup.layers`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from daemon.hotset.bursts import Reference
from daemon.hotset.curves import Curve
from daemon.hotset.gate import CLOSE_TOKENS, Gate, Review, State, hit_rate
from daemon.hotset.planner import Plan, in_slots
from daemon.hotset.prices import (
    SMOOTHING,
    Correction,
    LayerFacts,
    Prices,
    layer_states,
    off_seconds,
    on_seconds,
)

_LEAST = 0.01
"""No step is predicted to take less than this part of what it takes now."""


class Judge:
    """Of one model on one machine."""

    def __init__(self, prices: Prices, layers: Sequence[LayerFacts], gate: Gate | None = None) -> None:
        """`gate` is one that waited for these prices."""
        self.gate = gate or Gate()
        self._measured, self._layers = prices, list(layers)
        self._corrections: dict[int, Correction] = {}

    @property
    def layers(self) -> list[LayerFacts]:
        """In the order of all lists."""
        return list(self._layers)

    def prices(self, width: int = 1) -> Prices:
        """For steps of so many sequences; 3 are corrected as 4 are, 5 as 8."""
        correction = self._corrections.get(_class(width))
        return correction.prices if correction else self._measured

    def place(self, curves: Sequence[Curve], budget: int, width: int = 1, among: Sequence[int] | None = None) -> Plan:
        """Slots for the layers `among` (those of one device; None: all) within `budget` bytes; `curves` of these."""
        chosen = self._layers if among is None else [self._layers[place] for place in among]
        return in_slots(layer_states(self.prices(width), chosen, curves, width), budget)

    def compared(
        self, offs: Sequence[float], ons: Sequence[float], slots: Sequence[int], rates: Sequence[float]
    ) -> None:
        """What the probe measured of the placement as it stands, in rounds of steps of one sequence.

        It explains p at once where the rounds agree on who is faster, and else counts like any other comparison.
        """
        gains = [off - on for off, on in zip(offs, ons, strict=True)]
        self._correct(statistics.median(gains), slots, rates, 1, 1.0 if _agree(gains) else SMOOTHING)

    def refer(self, reference: Reference, slots: Sequence[int], rates: Sequence[float]) -> bool:
        """What an open gate measured while it served, with hit rates of this moment; whether the gate changed.

        Two in a row decide, since each is of few steps.
        """
        self._correct(reference.off - reference.on, slots, rates, reference.width, SMOOTHING)
        rate = hit_rate(slots, rates)
        tokens = CLOSE_TOKENS // 2
        return self.gate.review(Review(reference.off, reference.on, rate, reference.width, tokens, measured=True))

    def review(
        self,
        slots: Sequence[int],
        rates: Sequence[float],
        *,
        width: int = 1,
        tokens: int = 0,
        now: float | None = None,
        decisive: bool = False,
    ) -> bool:
        """What prices say of these slots at these hit rates; whether the gate changed.

        For a gate that waits or is closed, and for an open one that makes no references. `now` is what a step takes,
        as the gate is; None: as the probe measured it. `tokens` were decoded since the last review.
        """
        prices = self.prices(width)
        off, on = off_seconds(prices, self._layers, width), on_seconds(prices, self._layers, slots, rates, width)
        if now is not None:
            off, on = _from_now(now, off - on, self.gate.state is State.CLOSED)
        if not (off > 0 and on > 0):
            return False
        rate = hit_rate(slots, rates)
        return self.gate.review(Review(off, on, rate, width, tokens, decisive=decisive))

    def _correct(
        self, measured: float, slots: Sequence[int], rates: Sequence[float], width: int, weight: float
    ) -> None:
        correction = self._corrections.setdefault(_class(width), Correction(self._measured, self._layers))
        prices = correction.prices
        predicted = off_seconds(prices, self._layers, width) - on_seconds(prices, self._layers, slots, rates, width)
        pairs = zip(slots, self._layers, strict=True)
        correction.observe(predicted, measured, sum(0 < n < layer.n_expert for n, layer in pairs), weight)


def _agree(gains: Sequence[float]) -> bool:
    """Whether at most one in five says another sign."""
    positive = sum(gain > 0 for gain in gains)
    return min(positive, len(gains) - positive) * 5 <= len(gains)


def _class(width: int) -> int:
    """1, 2, 3 to 4, 5 to 8, and so on."""
    return (width - 1).bit_length()


def _from_now(now: float, gain: float, closed: bool) -> tuple[float, float]:
    """Seconds off and on, one of which is what a step takes now."""
    return (now, max(_LEAST * now, now - gain)) if closed else (max(_LEAST * now, now + gain), now)
