"""What steps cost, and whose prompt is next."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.engine.step_prices import Curve, StepPrices
from daemon.engine.turns import CLASS_STEP, Prompt, Turns
from tests.scheduling_replay import (
    spilled,
)

# -- prices


def test_a_price_is_the_median_of_its_bin_and_linear_between_bins() -> None:
    curve = Curve(int.bit_length)
    for seconds in (1.0, 1.1, 30.0):
        curve.add(64, seconds)
    curve.add(256, 5.1)
    assert curve.price(64) == pytest.approx(1.1)
    assert curve.price(160) == pytest.approx(3.1)
    assert curve.price(512) == pytest.approx(5.1 + 256 * 4 / 192), "beyond the last point it goes on"


def test_of_two_times_the_shorter_one_counts() -> None:
    curve = Curve(int.bit_length)
    curve.add(64, 5.0)
    curve.add(64, 1.0)
    assert curve.price(64) == 1.0


def test_a_price_follows_what_changed() -> None:
    curve = Curve(int.bit_length)
    for seconds in (*[1.0] * 9, *[3.0] * 5):
        curve.add(64, seconds)
    assert curve.price(64) == 3.0


def test_an_empty_curve_costs_nothing_and_a_single_point_is_proportional() -> None:
    curve = Curve(int.bit_length)
    assert (curve.price(9), bool(curve)) == (0.0, False)
    curve.add(100, 2.0)
    assert (curve.price(50), bool(curve)) == (1.0, True)


def test_more_tokens_never_cost_less() -> None:
    curve = Curve(int.bit_length)
    curve.add(100, 9.0)
    curve.add(200, 1.0)
    curve.add(400, 2.0)
    assert [curve.price(n) for n in (100, 200, 300)] == [1.0, 1.0, 1.5]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 512), st.floats(1e-4, 2)), max_size=12),
    st.floats(0, 3), st.integers(1, 600), st.integers(0, 600),
)  # fmt: skip
def test_the_widest_step_within_a_time_is_the_widest(
    known: list[tuple[int, float]], seconds: float, low: int, more: int
) -> None:
    curve = Curve(int.bit_length)
    for n, took in known:
        curve.add(n, took)
    found = curve.widest(seconds, low, low + more)
    assert low - 1 <= found <= low + more
    assert found < low or curve.price(found) <= seconds + 1e-6
    assert found == low + more or curve.price(found + 1) >= seconds - 1e-6


def test_narrow_and_wide_steps_are_priced_apart() -> None:
    prices = StepPrices()
    for n in (8, 12, 24, 28, 31):
        prices.observe(4, n - 4, spilled(n))
    for n in (64, 512):
        prices.observe(4, n - 4, spilled(n))
    assert prices.mixed(31, 4) == pytest.approx(spilled(31), rel=0.1)
    assert prices.mixed(32, 4) == pytest.approx(spilled(32), rel=0.01)


# -- turns


def prompt(number: int, n_left: int, rank: int = 1, client: str = "") -> Prompt:
    return Prompt(number, n_left, rank, client)


def test_the_better_class_goes_first_then_the_shorter_then_the_older() -> None:
    prompts = [prompt(1, 5, 2), prompt(2, 4000), prompt(3, 30), prompt(4, 30), prompt(5, 4000, 0)]
    assert [one.number for one in Turns().order(prompts)] == [5, 3, 4, 2, 1]


def read(prompts: list[Prompt], budget: int, turns: Turns) -> list[Prompt]:
    """Compute a step of `budget` tokens of the first in line; returns what is left."""
    first = turns.order(prompts)[0]
    n = min(budget, first.n_left)
    turns.computed(prompts, {first.number: n})
    rest = [prompt(one.number, one.n_left - n if one is first else one.n_left, one.rank, one.client) for one in prompts]
    return [one for one in rest if one.n_left]


def test_a_long_prompt_is_passed_by_no_more_than_its_own_length() -> None:
    turns, left, passed = Turns(), [prompt(0, 1000)], 0
    for number in range(1, 1000):
        left = read([*left, prompt(number, 50)], 50, turns)
        passed += 50
        if next(one.n_left for one in left if one.number == 0) < 1000:
            break
    assert 900 <= passed <= 1100


@pytest.mark.parametrize("rank", [1, 2])
def test_no_class_starves(rank: int) -> None:
    turns, left, passed = Turns(), [prompt(0, 1000, rank)], 0
    for number in range(1, 40_000):
        left = read([*left, prompt(number, 50, 0)], 50, turns)
        passed += 50
        if not any(one.number == 0 for one in left):
            break
    assert rank * CLASS_STEP < passed < 8 * rank * (CLASS_STEP + 1000)


def test_many_prompts_of_one_client_bring_it_no_larger_part() -> None:
    turns = Turns()
    left = [prompt(i, 1000, 1, "many") for i in range(6)] + [prompt(6, 1000, 1, "one")]
    for _ in range(50):
        left = read(left, 50, turns)
    assert not any(one.client == "one" for one in left), "of 2500 tokens it had its 1000, not a seventh"


@settings(deadline=None)
@given(st.data())
def test_every_prompt_is_read_whatever_comes(data: st.DataObject) -> None:
    """Bounded waiting: by what has to be read before it, and what its class lets pass."""
    turns, waiting, number = Turns(), [prompt(0, 600, 2, "slow")], 1
    for _ in range(6000):
        if len(waiting) < 5:
            n, rank = data.draw(st.integers(1, 400)) if number < 30 else 300, number % 3 % 2
            waiting.append(prompt(number, n, rank, str(number % 4)))
            number += 1
        waiting = read(waiting, 512, turns)
        if not any(one.number == 0 for one in waiting):
            return
    raise AssertionError("the background prompt was never read")
