"""Prices, corrections, gate and planner together: a machine that differs from its prices is found out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from daemon.hotset.bursts import Reference
from daemon.hotset.curves import expected, uniform
from daemon.hotset.gate import Gate, State
from daemon.hotset.judge import Judge
from daemon.hotset.planner import Kind
from daemon.hotset.prices import LayerFacts, Prices, off_seconds, on_seconds

LAYER = LayerFacts(n_expert=128, n_used=8, expert_bytes=2_650_000)
LAYERS = [LAYER] * 48
US = 1e-6
HOME = Prices(4000 * US, 110 * US, 120 * US, 620 * US / LAYER.picked(), 40 * US / LAYER.picked())
SAME = replace(HOME, partial=400 * US, cold=0.0, device_rate=HOME.cpu_rate)
"""A processor that is its own device."""
SLOTS = [32] * 48
LOCAL, UNIFORM = ([curve(128)[32]] * 48 for curve in (expected, uniform))


def truth(prices: Prices, rates: list[float], width: int = 1, context: float = 0.0) -> Reference:
    off, on = off_seconds(prices, LAYERS, width), on_seconds(prices, LAYERS, SLOTS, rates, width)
    return Reference(off + context, on + context, width)


def test_uniform_routing_closes_where_the_device_is_no_faster() -> None:
    judge = Judge(SAME, LAYERS)
    assert judge.review(SLOTS, UNIFORM)
    assert judge.gate.state is State.CLOSED
    assert "does not pay" in judge.gate.verdict.reason
    assert judge.place([uniform(128)] * 48, 48 * 33 * 2_650_000).kind is Kind.OFF


def test_local_routing_opens_where_it_is_faster() -> None:
    judge = Judge(HOME, LAYERS)
    assert judge.review(SLOTS, LOCAL)
    assert judge.gate.state is State.OPEN
    assert set(judge.place([expected(128)] * 48, 48 * 33 * 2_650_000).slots) == {32}


def test_layers_of_one_device_are_placed_by_themselves() -> None:
    plan = Judge(HOME, LAYERS).place([expected(128)] * 2, 2 * 33 * 2_650_000, among=[3, 7])
    assert plan.slots == (32, 32)


def test_a_gate_that_waited_goes_on() -> None:
    gate = Gate()
    judge = Judge(HOME, LAYERS, gate)
    judge.review(SLOTS, LOCAL)
    assert gate.state is State.OPEN


def test_what_the_probe_measured_of_the_placement_is_believed() -> None:
    """As where both sides share one memory: prices promise more than comes."""
    judge = Judge(HOME, LAYERS)
    judge.compared([0.050] * 3, [0.055] * 3, SLOTS, LOCAL)
    prices = judge.prices()
    assert off_seconds(prices, LAYERS) - on_seconds(prices, LAYERS, SLOTS, LOCAL) == pytest.approx(-0.005)
    judge.review(SLOTS, LOCAL)
    assert judge.gate.state is State.CLOSED


@pytest.mark.parametrize(("n_other", "weight"), [(0, 1.0), (1, 1.0), (2, 0.25), (3, 0.25), (4, 1.0)])
def test_rounds_that_disagree_count_less(n_other: int, weight: float) -> None:
    judge = Judge(HOME, LAYERS)
    ons = [0.049] * n_other + [0.0505] * (5 - n_other)
    gain = -0.0005 if n_other <= 2 else 0.001
    predicted = off_seconds(HOME, LAYERS) - on_seconds(HOME, LAYERS, SLOTS, LOCAL)
    judge.compared([0.050] * 5, ons, SLOTS, LOCAL)
    moved = judge.prices().partial - HOME.partial
    assert moved == pytest.approx(weight * (predicted - gain) / 48)


def test_chains_that_seemed_cheap_are_found_out() -> None:
    """As where a small model's steps are too short to tell c from p."""
    judge = Judge(replace(HOME, cold=900 * US), LAYERS)
    judge.compared([0.050] * 3, [0.055] * 3, SLOTS, LOCAL)
    judge.review(SLOTS, LOCAL)
    assert judge.gate.state is State.CLOSED


def test_two_references_in_a_row_close_it() -> None:
    judge = Judge(HOME, LAYERS)
    judge.review(SLOTS, LOCAL)
    good, bad = truth(HOME, LOCAL), truth(SAME, UNIFORM)
    assert not judge.refer(bad, SLOTS, UNIFORM)
    assert not judge.refer(good, SLOTS, LOCAL)
    assert not judge.refer(bad, SLOTS, UNIFORM)
    assert judge.refer(bad, SLOTS, UNIFORM)
    assert judge.gate.state is State.CLOSED
    assert judge.gate.verdict.reason.endswith("(measured)")


def test_a_long_context_is_no_price() -> None:
    judge = Judge(HOME, LAYERS)
    for _ in range(10):
        judge.refer(truth(HOME, LOCAL, context=0.5), SLOTS, LOCAL)
    assert judge.prices().partial == pytest.approx(HOME.partial)


def test_each_number_of_sequences_has_its_own_correction() -> None:
    judge = Judge(HOME, LAYERS)
    dearer = replace(HOME, partial=200 * US)
    for _ in range(40):
        judge.refer(truth(dearer, LOCAL, 4), SLOTS, LOCAL)
    assert judge.prices(4).partial == judge.prices(3).partial == pytest.approx(dearer.partial, abs=US)
    assert judge.prices(1) == judge.prices(2) == judge.prices(5) == HOME


def test_a_closed_gate_opens_for_the_hit_rates_that_slots_would_have() -> None:
    judge = Judge(HOME, LAYERS)
    judge.compared([0.050] * 3, [0.0525] * 3, SLOTS, [0.05] * 48)
    judge.review(SLOTS, [0.05] * 48)
    assert judge.gate.state is State.CLOSED
    changes = [judge.review(SLOTS, LOCAL, tokens=64, now=0.2) for _ in range(8)]
    assert changes == [False] * 7 + [True]
    assert judge.gate.verdict.off == pytest.approx(1 / 0.2)
    assert judge.gate.verdict.on is not None
    assert judge.gate.verdict.on > judge.gate.verdict.off


def test_what_a_step_takes_now_dilutes_the_gain() -> None:
    speeds = []
    for now in (None, 0.1, 1.0):
        judge = Judge(HOME, LAYERS)
        judge.review(SLOTS, LOCAL, now=now)
        verdict = judge.gate.verdict
        assert verdict.on is not None
        assert verdict.off is not None
        speeds.append(verdict.on / verdict.off)
    assert speeds == sorted(speeds, reverse=True)
    assert speeds[-1] > 1


def test_a_gain_larger_than_the_step_is_no_division_by_zero() -> None:
    judge = Judge(HOME, LAYERS)
    judge.review(SLOTS, [0.0] * 48, decisive=True)
    judge.gate = Gate()
    judge.review([128] * 48, [1.0] * 48, now=1e-6)
    assert judge.gate.state is State.OPEN
    assert not Judge(Prices(0.0, 0.0, 0.0, 0.0, 0.0), LAYERS).review(SLOTS, LOCAL)
