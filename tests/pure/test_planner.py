"""The planner: never more than the budget, never slower than the static split, partial layers only where they pay."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.hotset import planner
from daemon.hotset.planner import (
    FULL_MARGIN,
    MARGIN,
    SPLIT_MARGIN,
    Kind,
    LayerState,
    all_partial,
    in_slots,
    mixed,
    paying,
    plan,
    static_split,
    whole_tail,
)

N_EXPERT = 8


def curve(weights: list[float]) -> tuple[float, ...]:
    """The hit rates of experts with these shares, the most popular first."""
    ordered = sorted(weights, reverse=True)
    total = sum(ordered)
    return (0.0, *(sum(ordered[: n + 1]) / total for n in range(len(ordered) - 1)), 1.0)


def layer(
    weights: list[float] | None = None,
    *,
    size: int = 10,
    fixed: float = 1.0,
    price: float = 1.0,
    cold: float = 1.0,
    cpu: float = 10.0,
    device: float = 0.1,
) -> LayerState:
    return LayerState(size, curve(weights or [1.0] * N_EXPERT), fixed, price, cold, cpu, device)


SKEWED = [32.0, 16, 8, 4, 2, 1, 1, 1]

seconds = st.floats(0, 20, allow_nan=False)
layers = st.lists(
    st.builds(
        layer,
        st.lists(st.floats(0.01, 10), min_size=N_EXPERT, max_size=N_EXPERT),
        size=st.integers(1, 50),
        fixed=seconds,
        price=seconds,
        cold=seconds,
        cpu=seconds,
        device=st.floats(0, 2, allow_nan=False),
    ),
    min_size=1,
    max_size=6,
)
budgets = st.integers(0, 3000)


@given(layers, budgets)
def test_a_plan_fits_and_its_numbers_are_true(states: list[LayerState], budget: int) -> None:
    found = plan(states, budget)
    assert found.bytes <= budget
    assert found.seconds == pytest.approx(sum(one.seconds(n) for one, n in zip(states, found.slots, strict=True)))
    sizes = [one.bytes(n) if found.kind is Kind.RESIDENCY else one.whole * bool(n)
             for one, n in zip(states, found.slots, strict=True)]  # fmt: skip
    assert found.bytes == sum(sizes)
    assert all(0 <= n <= one.n_expert for one, n in zip(states, found.slots, strict=True))


@given(layers, budgets)
def test_a_plan_is_predicted_no_slower_than_others_but_for_what_predictions_flatter(
    states: list[LayerState], budget: int
) -> None:
    found = plan(states, budget)
    assert found.seconds <= static_split(states, budget).seconds / (1 - SPLIT_MARGIN) + 1e-9
    if any(all_partial(states, budget).slots):
        assert found.seconds <= all_partial(states, budget).seconds + 1e-9
    for mixture in (whole_tail(states, budget), mixed(states, budget)):
        assert found.seconds <= mixture.seconds / (1 - FULL_MARGIN) / (1 - MARGIN) + 1e-9


@given(layers, budgets)
def test_full_layers_of_a_tail_are_the_last_ones(states: list[LayerState], budget: int) -> None:
    found = whole_tail(states, budget)
    full = [slots == state.n_expert for slots, state in zip(found.slots, states, strict=True)]
    assert full == sorted(full)
    assert found.bytes <= budget or not any(found.slots)
    assert found.seconds <= all_partial(states, budget).seconds


def test_full_layers_must_be_worth_the_parts_that_they_make_long() -> None:
    states = [layer(SKEWED, price=1.0) for _ in range(8)]
    budget = 8 * 10 * N_EXPERT * 7 // 8
    even, tail = all_partial(states, budget), whole_tail(states, budget)
    assert tail.seconds < even.seconds
    for margin in (0.0, 1.0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(planner, "FULL_MARGIN", margin)
            found = plan(states, budget)
            assert found.slots == even.slots if margin else found.seconds <= tail.seconds < even.seconds


@given(layers, budgets)
def test_nothing_can_be_added_for_free(states: list[LayerState], budget: int) -> None:
    found = mixed(states, budget)
    left = budget - found.bytes
    for one, n in zip(states, found.slots, strict=True):
        for more in range(n + 1, one.n_expert + 1):
            if one.bytes(more) - one.bytes(n) <= left:
                assert one.seconds(more) >= one.seconds(n) - 1e-9


def test_what_one_choice_leaves_goes_to_smaller_ones() -> None:
    """Neither can have all it was to get from the rest; what the first one leaves still pays for something."""
    states = [
        layer(size=5, price=0.0, fixed=0.0, cpu=1.0, device=0.0),
        layer(size=3, price=1.0, fixed=0.0, cpu=1.0, device=1.0),
    ]
    assert mixed(states, 30).slots == (2, 4)


@given(st.floats(0.1, 5), st.floats(0.1, 10), st.floats(1, 30), st.integers(1, N_EXPERT - 1))
def test_partial_layers_pay_exactly_where_the_rule_says(price: float, skew: float, cpu: float, slots: int) -> None:
    """(h - S) T > S p, with no time on the device and no slot of zeros: against full and cold layers of that size."""
    weights = [skew**-n for n in range(N_EXPERT)]
    one = layer(weights, price=price, cold=price, cpu=cpu, device=0.0)
    share = slots / N_EXPERT
    blend = share * one.seconds(N_EXPERT) + (1 - share) * one.seconds(0)
    gain = (one.hit_rates[slots] - share) * cpu - share * price
    assert blend - one.seconds(slots) == pytest.approx(gain, abs=1e-9)


def test_skew_makes_layers_partial() -> None:
    states = [layer(SKEWED, price=0.5, cold=0.5)] * 4
    found = plan(states, budget=4 * 10 * N_EXPERT // 2)
    assert found.kind is Kind.RESIDENCY
    assert all(0 < n < N_EXPERT for n in found.slots)


def test_uniform_routing_is_left_to_the_static_split() -> None:
    states = [layer(price=2.0, cold=0.0)] * 4
    budget = 4 * 10 * N_EXPERT // 2
    found = plan(states, budget)
    assert found == static_split(states, budget)
    assert (found.kind, found.slots, found.n_cold) == (Kind.SPLIT, (0, 0, N_EXPERT, N_EXPERT), 2)


def test_a_dear_chain_leaves_whole_layers_only() -> None:
    states = [layer(SKEWED, price=30.0, cold=4.0)] * 6
    found = plan(states, budget=6 * 10 * N_EXPERT * 3 // 4)
    assert (found.kind, found.slots) == (Kind.SPLIT, (0, 0, *[N_EXPERT] * 4))


def test_without_room_for_a_layer_or_a_slot_there_is_nothing() -> None:
    found = plan([layer(SKEWED)] * 3, budget=19)
    assert (found.kind, found.slots, found.bytes) == (Kind.OFF, (0, 0, 0), 0)


def test_room_for_everything_is_a_split_without_cold_layers() -> None:
    found = plan([layer(SKEWED)] * 3, budget=3 * 10 * N_EXPERT)
    assert (found.kind, found.n_cold) == (Kind.SPLIT, 0)


def test_all_partial_counts_the_slot_of_zeros() -> None:
    states = [layer(SKEWED), layer(SKEWED, size=20)]
    found = all_partial(states, budget=(10 + 20) * N_EXPERT // 2)
    assert found.slots == (3, 3)
    assert found.bytes == 4 * 30


def test_a_layer_that_gains_more_gets_more() -> None:
    slow = layer(SKEWED, cpu=20.0, price=0.1)
    found = mixed([slow, replace(slow, cpu=2.0)], budget=10 * N_EXPERT)
    assert found.slots[0] > found.slots[1]


@given(layers, budgets)
def test_slots_are_never_predicted_slower_than_none(states: list[LayerState], budget: int) -> None:
    found = in_slots(states, budget)
    none = sum(one.seconds(0) for one in states)
    assert found.seconds <= none
    assert found.bytes == sum(one.bytes(n) for one, n in zip(states, found.slots, strict=True)) <= budget
    assert (found.kind is Kind.OFF) == (not any(found.slots))
    assert found.seconds == pytest.approx(sum(one.seconds(n) for one, n in zip(states, found.slots, strict=True)))


@given(layers, budgets)
def test_no_layer_keeps_slots_that_make_it_slower(states: list[LayerState], budget: int) -> None:
    found = paying(states, budget)
    assert found.bytes <= budget
    assert all(not n or one.seconds(n) < one.seconds(0) for one, n in zip(states, found.slots, strict=True))


def test_a_layer_that_slots_do_not_help_leaves_them_to_the_others() -> None:
    good, bad = layer(SKEWED, price=1.0), layer(SKEWED, price=50.0)
    budget = 4 * 10 * 2
    assert in_slots([good] * 4, budget).slots == (1, 1, 1, 1)
    assert in_slots([good, bad, good, bad], budget).slots == (3, 0, 3, 0)
    assert in_slots([bad] * 4, budget).kind is Kind.OFF
