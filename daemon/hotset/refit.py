"""Whether slots should change hands between the layers of a device. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from daemon.hotset.allotment import LEAST_GAIN, Hits, allot
from daemon.hotset.curves import Curve
from daemon.hotset.planner import in_slots
from daemon.hotset.prices import LayerFacts, Prices, layer_states


def refit(
    prices: Prices,
    layers: Sequence[LayerFacts],
    curves: Sequence[Curve],
    hits: Hits | None,
    current: Sequence[int],
    budget: int,
    width: int = 1,
) -> list[int] | None:
    """Slots for each layer within `budget` bytes that are predicted to be 3 % faster than `current`; None: no such.

    Candidates are what the planner would choose, and slots by marginal gain over all layers of `hits` (what was seen so
    far, [layers, n_expert + 1]; None: too little), of which every layer keeps those that one token chooses.
    """
    states = layer_states(prices, layers, curves, width)
    candidates = [list(in_slots(states, budget).slots)]
    if hits is not None:
        counts, sizes = [one.n_expert for one in layers], [one.expert_bytes for one in layers]
        candidates.append(allot(hits, counts, sizes, budget, max(one.n_used for one in layers)))

    def seconds(slots: Sequence[int]) -> float:
        return sum(state.seconds(n) for state, n in zip(states, slots, strict=True))

    best = min((found for found in candidates if any(found)), key=seconds, default=None)
    if best is None or seconds(best) > (1 - LEAST_GAIN) * seconds(current):
        return None
    return best
