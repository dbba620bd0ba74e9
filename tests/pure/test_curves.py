"""Hit-rate curves: their form whatever they come from, and which one holds when."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.hotset.allotment import RankCounts
from daemon.hotset.curves import OBSERVED_TOKENS, counted, expected, observed, observed_at, through, uniform
from daemon.hotset.policy import Heat, Settings


def assert_is_a_curve(curve: tuple[float, ...], n_expert: int) -> None:
    assert len(curve) == n_expert + 1
    assert (curve[0], curve[-1]) == (0.0, 1.0)
    assert all(a <= b for a, b in pairwise(curve))


@given(st.integers(1, 300), st.integers(1, 40))
def test_what_is_expected(n_expert: int, width: int) -> None:
    curve = expected(n_expert, width)
    assert_is_a_curve(curve, n_expert)
    assert all(rate >= share - 1e-9 for rate, share in zip(curve, uniform(n_expert), strict=True))
    assert all(a >= b - 1e-9 for a, b in zip(curve, expected(n_expert, width + 1), strict=True))


def test_it_is_what_was_replayed() -> None:
    assert [expected(32)[n] for n in (4, 8, 16)] == pytest.approx([0.463, 0.671, 0.876])
    assert [expected(32, 3)[n] for n in (4, 8, 16)] == pytest.approx([0.363, 0.555, 0.793])
    assert expected(32)[6] == pytest.approx((0.463 + 0.671) / 2)
    assert expected(32, 100) == expected(32, 8)


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=6), st.integers(1, 64))
def test_points_in_any_order_give_a_curve(points: list[tuple[float, float]], n_expert: int) -> None:
    assert_is_a_curve(through(points, n_expert), n_expert)


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=64))
def test_counts(counts: list[int]) -> None:
    assert_is_a_curve(counted(counts), len(counts))


def test_counts_are_served_by_the_most_used() -> None:
    assert counted([1, 6, 3]) == pytest.approx((0, 0.6, 0.9, 1))
    assert counted([0, 0]) == uniform(2) == (0.0, 0.5, 1.0)


def test_traffic_replaces_what_was_expected_once_there_is_enough() -> None:
    random = np.random.default_rng(1)
    heat, ranks = Heat([8, 4], Settings()), RankCounts(2, 8)
    for _ in range(300):
        ids = np.array([[[0, 1], [random.integers(4), 3]]])
        ranks.observe(heat.values, ids)
        heat.observe(ids)
    before = [expected(8), expected(4)]
    assert observed(ranks.hits(), OBSERVED_TOKENS - 1, before) == before
    first, second = observed(ranks.hits(), OBSERVED_TOKENS, before)
    assert_is_a_curve(first, 8)
    assert_is_a_curve(second, 4)
    assert first[2] > 0.99
    assert second[1] < 0.7


def test_a_layer_without_counts_keeps_what_was_expected() -> None:
    hits = np.array([[0.0, 0, 0], [0, 3, 4]])
    assert observed(hits, 10**6, [expected(2), expected(2)]) == [expected(2), (0.0, 0.75, 1.0)]


@given(st.data())
def test_single_rates_are_those_of_the_curves(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    n_tokens = data.draw(st.sampled_from([OBSERVED_TOKENS - 1, OBSERVED_TOKENS]))
    before = [expected(n, data.draw(st.integers(1, 9))) for n in sizes]
    more = st.lists(st.integers(0, 50), min_size=max(sizes), max_size=max(sizes))
    hits = np.array([[0, *np.cumsum(data.draw(more))] for _ in sizes], float)
    slots = [data.draw(st.integers(0, n)) for n in sizes]
    curves = observed(hits, n_tokens, before)
    assert observed_at(slots, hits, n_tokens, before) == [curve[n] for curve, n in zip(curves, slots, strict=True)]
