"""Slots across layers: the greedy choice against every possible one, floors, and curves measured by rank."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.hotset.allotment import RankCounts, allot, gain
from daemon.hotset.policy import Heat, Settings


def curves(*gains: list[float]) -> np.ndarray:
    return np.pad(np.cumsum(np.array(gains, float), axis=1), ((0, 0), (1, 0)))


def test_slots_go_where_they_serve_most() -> None:
    hits = curves([10, 9, 8, 0], [5, 1, 1, 1])
    assert allot(hits, [4, 4], [1, 1], 2 + 4, floor=1) == [3, 1]
    assert allot(hits, [4, 4], [1, 1], 2 + 8, floor=1) == [4, 4]


def test_a_step_that_pays_only_later_is_seen() -> None:
    assert allot(curves([0, 0, 90, 0], [4, 4, 4, 4]), [4, 4], [1, 1], 2 + 4, floor=1) == [3, 1]


def test_larger_experts_must_serve_more() -> None:
    hits = curves([6, 6, 6, 6], [4, 4, 4, 4])
    assert allot(hits, [4, 4], [2, 1], 2 * 2 + 2 * 1 + 3, floor=1) == [1, 4]


def test_every_layer_has_its_floor_or_all_have_less() -> None:
    hits = curves([9, 9, 9, 9], [0, 0, 0, 0])
    assert allot(hits, [4, 4], [1, 1], 2 + 5, floor=2) == [3, 2]
    assert allot(hits, [4, 4], [1, 1], 2 + 2, floor=2) == [1, 1]
    assert allot(hits, [4, 4], [1, 1], 3, floor=2) == [0, 0]
    assert allot(hits, [4, 4], [1, 1], 0) == [0, 0]


def test_layers_of_different_sizes() -> None:
    hits = curves([9, 9, 0, 0], [1, 1, 1, 1])
    assert allot(hits, [2, 4], [1, 1], 2 + 9, floor=3) == [2, 4]


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.integers(0, 20), min_size=3, max_size=3), min_size=2, max_size=3),
    st.integers(0, 12),
)
def test_of_falling_gains_the_choice_is_the_best_there_is(gains: list[list[int]], room: int) -> None:
    hits = curves(*(sorted(map(float, layer), reverse=True) for layer in gains))
    n = len(gains)
    found = allot(hits, [3] * n, [1] * n, n + room, floor=1)
    assert sum(found) <= room
    if room < n:
        assert found == [0] * n
        return
    every = (case for case in product(range(1, 4), repeat=n) if sum(case) <= room)
    best = max(sum(hits[layer, many] for layer, many in enumerate(case)) for case in every)
    assert sum(hits[layer, many] for layer, many in enumerate(found)) == pytest.approx(best)


def test_gain_is_a_share_of_what_is_served() -> None:
    hits = curves([4, 2], [4, 0])
    assert gain(hits, [1, 1], [2, 0]) == pytest.approx(6 / 8 - 1)
    assert gain(hits, [1, 2], [2, 1]) == pytest.approx(0.25)
    assert gain(hits, [0, 0], [1, 1]) == float("inf")
    assert gain(0 * hits, [0, 0], [1, 1]) == 0


def test_ranks_give_the_hit_rate_of_every_number_of_slots() -> None:
    random = np.random.default_rng(1)
    heat, ranks = Heat([6, 6], Settings()), RankCounts(2, 6, half_life=float("inf"))
    served = np.zeros((2, 7))
    for _ in range(200):
        ids = np.array([[random.choice(6, 2, replace=False, p=np.arange(1, 7) / 21) for _ in range(2)]])
        order = np.argsort(-heat.values, axis=1, kind="stable")
        for layer, many in product(range(2), range(7)):
            served[layer, many] += np.isin(ids[0, layer], order[layer, :many]).sum()
        ranks.observe(heat.values, ids)
        heat.observe(ids)
    assert ranks.hits() == pytest.approx(served)


def test_old_ranks_fade() -> None:
    ranks = RankCounts(1, 2, half_life=2)
    ranks.observe(np.array([[1.0, 0]]), np.array([[[0]]]))
    ranks.observe(np.array([[1.0, 0]]), np.array([[[1]], [[1]]]))
    assert ranks.hits().tolist() == [[0, 0.5, 2.5]]
