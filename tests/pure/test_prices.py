"""Prices from times: made from known prices they are found again, noise never makes them negative, and what serving
shows moves p within bounds."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from daemon.hotset.curves import expected, uniform
from daemon.hotset.planner import Kind, in_slots, plan
from daemon.hotset.prices import (
    Arm,
    Correction,
    LayerFacts,
    NoPrices,
    Prices,
    Round,
    Setup,
    Times,
    intervals,
    layer_states,
    off_seconds,
    on_seconds,
    solve,
)

LAYER = LayerFacts(n_expert=128, n_used=8, expert_bytes=2_650_000)
US = 1e-6
HOME = Prices(base=4000 * US, partial=110 * US, cold=120 * US, cpu_rate=620 * US / LAYER.picked(),
              device_rate=40 * US / LAYER.picked())  # fmt: skip
"""Eight threads beside a large card, one of 48 layers of a 30B model: 620 us on the CPU, 40 on the device."""


def setup(n_layers: int = 48, n_slotted: int = 32, n_whole: int = 4, missed: float = 1 / 128) -> Setup:
    layers = [LAYER] * n_layers
    return Setup(layers=layers, slotted=list(range(n_slotted)), whole=list(range(n_whole)), missed=missed)


def times(prices: Prices, of: Setup) -> Round:
    """What the model says that the arms take."""
    n, m, k = len(of.layers), len(of.slotted), len(of.whole)
    cpu, device = prices.cpu_rate * LAYER.picked(), prices.device_rate * LAYER.picked()
    cold = (n - m) * (prices.cold + cpu)
    nearly = max((1 - of.missed) * device, of.missed * cpu)
    off = prices.base + n * (prices.cold + cpu)
    empty = prices.base + m * (prices.partial + cpu) + cold
    rest = prices.base + (m - k) * (prices.partial + cpu) + cold
    return {
        Arm.OFF: Times(wall=off),
        Arm.EMPTY: Times(wall=empty, cpu=m * cpu),
        Arm.NEARLY: Times(wall=rest + k * (prices.partial + nearly), cpu=(m - k) * cpu + k * of.missed * cpu),
        Arm.WHOLE: Times(wall=rest + k * device, cpu=(m - k) * cpu),
    }


def shaken(one: Round, by: random.Random, noise: float) -> Round:
    """The same with noise, as a share of each value."""

    def shake(value: float) -> float:
        return max(0.0, value * by.gauss(1, noise))

    return {arm: Times(wall=shake(found.wall), cpu=min(found.wall, shake(found.cpu))) for arm, found in one.items()}


@given(
    st.tuples(*[st.floats(1, 1000) for _ in range(5)]),
    st.integers(1, 48),
    st.integers(1, 48),
    st.floats(0, 0.05),
)
def test_known_prices_are_found_again(values: tuple[float, ...], m: int, k: int, missed: float) -> None:
    base, partial, cold, cpu, device = (value * US for value in values)
    k = min(k, m)
    device = min(
        cpu, max(device, missed / (1 - missed) * cpu)
    )  # else the CPU's part of `nearly` hides it, or `empty` does
    picked = LAYER.picked()
    true = Prices(base, partial, cold, cpu / picked, device / picked)
    of = setup(48, m, k, missed)
    found = solve(of, [times(true, of)])
    assert found.base == pytest.approx(true.base, abs=0.1 * US)
    assert found.partial == pytest.approx(true.partial, abs=0.1 * US)
    assert found.cold == pytest.approx(true.cold, abs=0.1 * US)
    assert found.cpu_rate * picked == pytest.approx(cpu, abs=0.1 * US)
    assert found.device_rate * picked == pytest.approx(device, abs=0.1 * US)
    assert off_seconds(found, of.layers) == pytest.approx(times(true, of)[Arm.OFF].wall)


@given(
    st.lists(
        st.fixed_dictionaries({
            arm: st.builds(Times, wall=st.floats(0, 1), cpu=st.floats(0, 2))
            for arm in (Arm.OFF, Arm.EMPTY, Arm.NEARLY, Arm.WHOLE)
        }),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 3),
    st.floats(0, 1),
)  # fmt: skip
def test_whatever_was_measured_no_price_is_negative_or_endless(rounds: list[Round], k: int, missed: float) -> None:
    found = solve(setup(6, 3, k, missed), rounds)
    for value in (found.base, found.partial, found.cold, found.cpu_rate, found.device_rate):
        assert 0 <= value < 100
    assert found.whole is (k > 0 and missed < 0.5)


def test_noise_leaves_prices_that_can_be_used() -> None:
    chance = random.Random(1)
    of = setup()
    found = [solve(of, [shaken(times(HOME, of), chance, 0.004) for _ in range(5)]) for _ in range(40)]
    for name, true, within in (("partial", HOME.partial, 60 * US), ("cold", HOME.cold, 60 * US)):
        values = sorted(getattr(one, name) for one in found)
        assert abs(values[len(values) // 2] - true) < within / 3
        assert abs(values[4] - true) < within
        assert abs(values[-5] - true) < within


def test_one_disturbed_round_changes_nothing() -> None:
    of = setup()
    good = times(HOME, of)
    bad = {arm: Times(wall=10 * found.wall, cpu=5 * found.cpu) for arm, found in good.items()}
    found = solve(of, [good, bad, good])
    assert found.partial == pytest.approx(HOME.partial)
    assert found.cpu_rate == pytest.approx(HOME.cpu_rate)
    low, high = intervals(of, [good, bad, good])["cpu_rate"]
    assert (low, high) == (pytest.approx(HOME.cpu_rate), pytest.approx(5 * HOME.cpu_rate))


def test_without_a_whole_layer_the_difference_of_both_chains_is_known() -> None:
    of = setup(n_whole=0)
    for dearer in (50 * US, -50 * US):
        true = Prices(HOME.base, HOME.cold + dearer, HOME.cold, HOME.cpu_rate, HOME.device_rate)
        found = solve(of, [times(true, of)])
        assert found.partial - found.cold == pytest.approx(dearer)
        assert min(found.partial, found.cold) == pytest.approx(0)
        assert (found.device_rate, found.whole) == (0, False)


def test_times_that_are_none_are_refused() -> None:
    of = setup()
    with pytest.raises(NoPrices):
        solve(of, [])
    with pytest.raises(NoPrices):
        solve(of.model_copy(update={"slotted": []}), [times(HOME, of)])
    partly = {Arm.OFF: Times(wall=1), Arm.EMPTY: Times(wall=1)}
    with pytest.raises(NoPrices, match="1 rounds have no times of nearly"):
        solve(of, [times(HOME, of), partly])


@pytest.mark.parametrize("places", [[48], [-1], [3, 3]])
def test_places_must_be_layers(places: list[int]) -> None:
    with pytest.raises(ValidationError, match="a place is no layer's, or is there twice"):
        Setup(layers=[LAYER] * 48, slotted=places)
    with pytest.raises(ValidationError):
        Times(wall=-1.0)
    with pytest.raises(ValidationError):
        Times(wall=float("nan"))


def test_several_sequences_read_their_distinct_experts() -> None:
    assert LAYER.picked(1) == pytest.approx(8 * 2_650_000)
    assert LAYER.picked(4) < 4 * LAYER.picked(1)
    assert LAYER.picked(10_000) == pytest.approx(128 * 2_650_000)
    assert LayerFacts(n_expert=2, n_used=4, expert_bytes=10).picked(3) == 20
    assert off_seconds(HOME, [LAYER], 4) > off_seconds(HOME, [LAYER], 1)


class TestSteps:
    def test_the_sum_over_layers_is_the_step(self) -> None:
        layers = [LAYER] * 3
        slots, rates = [0, 64, 128], [0.0, 0.8, 1.0]
        cpu, device = HOME.cpu_rate * LAYER.picked(), HOME.device_rate * LAYER.picked()
        wanted = HOME.base + (HOME.cold + cpu) + (HOME.partial + max(0.8 * device, 0.2 * cpu)) + device
        assert on_seconds(HOME, layers, slots, rates) == pytest.approx(wanted)
        assert on_seconds(HOME, layers, [0, 0, 0], [0.5, 0.5, 0.5]) == pytest.approx(off_seconds(HOME, layers))

    def test_they_are_the_planner_s_own(self) -> None:
        layers = [LAYER] * 4
        states = layer_states(HOME, layers, [expected(128)] * 4)
        found = plan(states, sum(state.whole for state in states) // 4)
        rates = [expected(128)[n] for n in found.slots]
        assert found.kind is Kind.RESIDENCY
        assert on_seconds(HOME, layers, found.slots, rates) == pytest.approx(found.seconds)


class TestChoice:
    def choose(self, prices: Prices, curve: Sequence[float], share: float) -> tuple[Kind, tuple[int, ...]]:
        states = layer_states(prices, [LAYER] * 48, [curve] * 48)
        budget = int(share * sum(state.whole for state in states))
        found = in_slots(states, budget)
        assert sum(state.bytes(n) for state, n in zip(states, found.slots, strict=True)) <= budget
        return found.kind, found.slots

    def test_local_routing_makes_every_layer_partial(self) -> None:
        kind, slots = self.choose(HOME, expected(128), 0.25)
        assert (kind, set(slots)) == (Kind.RESIDENCY, {31})

    def test_without_preferences_and_with_dear_chains_whole_layers_are_left(self) -> None:
        dear = Prices(HOME.base, 500 * US, 10 * US, HOME.cpu_rate, HOME.device_rate)
        kind, slots = self.choose(dear, uniform(128), 0.25)
        assert kind is Kind.RESIDENCY
        assert slots == (0,) * 37 + (128,) * 11

    def test_where_the_device_is_no_faster_there_is_nothing(self) -> None:
        slow = Prices(HOME.base, 400 * US, 0.0, HOME.cpu_rate, HOME.cpu_rate)
        for curve in (uniform(128), expected(128)):
            assert self.choose(slow, curve, 0.5) == (Kind.OFF, (0,) * 48)


class TestCorrection:
    def test_it_comes_to_what_serving_shows(self) -> None:
        layers, slots, rates = [LAYER] * 48, [32] * 48, [0.6] * 48
        true = Prices(HOME.base, 300 * US, HOME.cold, HOME.cpu_rate, HOME.device_rate)
        correction = Correction(HOME, layers)
        for _ in range(30):
            now = correction.prices
            gain = off_seconds(now, layers) - on_seconds(now, layers, slots, rates)
            shown = off_seconds(true, layers) - on_seconds(true, layers, slots, rates)
            correction.observe(gain, shown, 48)
        assert correction.prices.partial == pytest.approx(true.partial, abs=1 * US)
        assert correction.prices == Prices(HOME.base, correction.prices.partial, HOME.cold, HOME.cpu_rate,
                                           HOME.device_rate)  # fmt: skip

    def test_one_comparison_is_a_quarter_unless_it_is_of_many_steps(self) -> None:
        correction = Correction(HOME, [LAYER] * 48)
        correction.observe(0.010, 0.010 - 48 * 40 * US, 48)
        assert correction.prices.partial == pytest.approx(HOME.partial + 10 * US)
        correction.observe(0.010, 0.010 + 48 * 40 * US, 48, weight=1.0)
        assert correction.prices.partial == pytest.approx(HOME.partial - 30 * US)

    @given(st.lists(st.tuples(st.floats(-10, 10), st.floats(-10, 10), st.integers(0, 48)), max_size=20))
    def test_it_has_bounds(self, shown: list[tuple[float, float, int]]) -> None:
        correction = Correction(HOME, [LAYER] * 48)
        for predicted, measured, n_partial in shown:
            correction.observe(predicted, measured, n_partial)
            assert 0 <= correction.prices.partial <= (120 + 620) * US + 1e-12
        if not any(n for *_, n in shown):
            assert correction.prices == HOME
