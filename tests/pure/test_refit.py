"""Slots change hands only where prices say that it is clearly worth it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from daemon.hotset.curves import Curve, through
from daemon.hotset.prices import LayerFacts, Prices, layer_states
from daemon.hotset.refit import refit

N_EXPERT = 16
SIZE = 100
LAYERS = [LayerFacts(n_expert=N_EXPERT, n_used=2, expert_bytes=SIZE) for _ in range(4)]
PRICES = Prices(base=0.004, partial=0.0001, cold=0.0001, cpu_rate=1e-5, device_rate=1e-7)


def curve(rate: float) -> Curve:
    """So much is served by a quarter of the experts."""
    return through([(0.25, rate)], N_EXPERT)


def hits(curves: list[Curve]) -> np.ndarray:
    return np.array(curves) * 1000


def bytes_of(slots: list[int]) -> int:
    return sum((n + 1) * SIZE for n in slots if n)


def test_equal_layers_keep_equal_shares() -> None:
    curves = [curve(0.7)] * 4
    assert refit(PRICES, LAYERS, curves, hits(curves), [4] * 4, 20 * SIZE) is None


def test_a_layer_that_gains_more_gets_more_once_enough_was_seen() -> None:
    curves = [through([(0.25, 0.99)], N_EXPERT)] * 2 + [through([(0.25, 0.3), (0.5, 0.9)], N_EXPERT)] * 2
    assert refit(PRICES, LAYERS, curves, None, [5] * 4, 24 * SIZE) is None
    found = refit(PRICES, LAYERS, curves, hits(curves), [5] * 4, 24 * SIZE)
    assert found is not None
    assert bytes_of(found) <= 24 * SIZE
    assert found[2] > 5 > found[0] >= 2


@given(
    st.lists(st.floats(0.05, 0.99), min_size=4, max_size=4),
    st.integers(0, 70),
    st.lists(st.integers(0, N_EXPERT), min_size=4, max_size=4),
    st.booleans(),
)
def test_what_it_finds_fits_and_is_faster(rates: list[float], budget: int, current: list[int], known: bool) -> None:
    curves = [curve(rate) for rate in rates]
    found = refit(PRICES, LAYERS, curves, hits(curves) if known else None, current, budget * SIZE)
    if found is None:
        return
    states = layer_states(PRICES, LAYERS, curves)

    def seconds(slots: list[int]) -> float:
        return sum(state.seconds(n) for state, n in zip(states, slots, strict=True))

    assert bytes_of(found) <= budget * SIZE
    assert seconds(found) <= 0.97 * seconds(current) + 1e-12
