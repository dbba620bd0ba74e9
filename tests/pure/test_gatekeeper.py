"""How the gate is followed: which step is computed how, what is let move, and when slots may change hands."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from daemon.engine.gatekeeper import REFIT_SECONDS, Gatekeeper
from daemon.engine.probe import Compared, Measured
from daemon.engine.store import Key
from daemon.hotset.bursts import BURST, PERIOD, REFERENCE_PERIOD, REFERENCE_STEPS, Compute
from daemon.hotset.gate import State
from daemon.hotset.judge import Judge
from daemon.hotset.prices import Arm, LayerFacts, Setup, Times

N_LAYER, N_EXPERT, N_SLOTS = 4, 8, 4
LAYERS = [LayerFacts(n_expert=N_EXPERT, n_used=2, expert_bytes=1000) for _ in range(N_LAYER)]
KEY = Key(build="b", driver="d", device="v", model="m", settings="s")


@dataclass
class FakeExperts:
    gated: bool = True
    frozen: bool = False
    rate: float = 0.8
    moving: list[bool] = field(default_factory=list)
    refits: list[Judge] = field(default_factory=list)

    def slots(self) -> list[int]:
        return [N_SLOTS] * N_LAYER

    def hit_rates(self) -> list[float]:
        return [float("nan")] * N_LAYER

    def potential(self, width: int) -> list[float]:
        return [self.rate] * N_LAYER

    def let_move(self, moving: bool) -> None:
        self.moving.append(moving)

    def refit(self, judge: Judge) -> None:
        self.refits.append(judge)


def measured(off: float, empty: float, cpu: float) -> Measured:
    """Seconds of a step without residency and with empty slots, of which `cpu` are the CPU's."""
    setup = Setup(layers=LAYERS, slotted=list(range(N_LAYER)), whole=[])
    one = {Arm.OFF: Times(wall=off, cpu=0.0), Arm.EMPTY: Times(wall=empty, cpu=cpu)}
    return Measured(key=KEY, setup=setup, rounds=[one] * 5, measured="2026-12-01T00:00:00Z")


PAYS = measured(off=0.040, empty=0.042, cpu=0.030)
COSTS = measured(off=0.010, empty=0.060, cpu=0.004)


class Case:
    def __init__(self, found: Measured | None = None, **experts: object) -> None:
        self.now = 0.0
        self.experts = FakeExperts(**experts)  # type: ignore[arg-type]
        self.keeper = Gatekeeper(self.experts, clock=lambda: self.now)
        self.n_compared = 0
        self.keeper.compare = self.compare
        if found is not None:
            self.keeper.priced(found, "measured now")
            self.compared(found)

    def compare(self) -> None:
        self.n_compared += 1

    def compared(self, found: Measured) -> None:
        """The placement as it stands is as the prices say."""
        off, on = found.rounds[0][Arm.OFF].wall, found.rounds[0][Arm.EMPTY].wall
        rate = 0.0
        self.keeper.compared(Compared([off] * 5, [on] * 5, LAYERS, self.experts.slots(), [rate] * N_LAYER))

    def step(self, seconds: float = 0.01, width: int = 1) -> Compute:
        how = self.keeper.compute(width)
        self.keeper.computed(how, seconds, width)
        return how


def test_until_something_is_measured_residency_is_used() -> None:
    case = Case()
    assert {case.step() for _ in range(2 * REFERENCE_PERIOD)} == {Compute.ON}
    assert case.keeper.report().state == "waiting"
    assert not case.keeper.closed


def test_prices_that_pay_open_it_and_ask_for_a_comparison_and_better_slots() -> None:
    case = Case(PAYS)
    assert case.keeper.report().state == "open"
    assert (case.n_compared, len(case.experts.refits)) == (1, 1)
    report = case.keeper.report()
    assert report.on is not None
    assert report.off == pytest.approx(25.0)
    assert report.on > report.off


def test_prices_that_do_not_close_it_and_stop_the_moves() -> None:
    case = Case(COSTS)
    assert case.keeper.closed
    assert case.experts.moving == [False]
    assert case.keeper.report().reason.startswith("closed: residency does not pay")
    steps = [case.step() for _ in range(PERIOD)]
    assert steps[:BURST] == [Compute.COUNT] * BURST
    assert set(steps[BURST:]) == {Compute.OFF}
    assert case.keeper.compute(0) is Compute.OFF, "prompts are upstream's"


def test_a_gate_that_is_switched_off_says_so_and_closes_nothing() -> None:
    case = Case(COSTS, gated=False)
    assert not case.keeper.closed
    assert {case.step() for _ in range(100)} == {Compute.ON}
    report = case.keeper.report()
    assert (report.state, report.reason) == ("none", "residency.gate is false")
    assert report.off is not None


def test_a_closed_gate_opens_when_the_traffic_would_be_served() -> None:
    layers_cost = measured(off=0.040, empty=0.050, cpu=0.030)
    case = Case(layers_cost, rate=0.05)
    assert case.keeper.closed
    case.experts.rate = 0.95
    for _ in range(4 * PERIOD):
        case.step(seconds=0.040)
        if not case.keeper.closed:
            break
    assert case.keeper.gate.state is State.OPEN
    assert case.experts.moving == [False, True]


def test_an_open_gate_closes_by_what_serving_shows() -> None:
    case = Case(PAYS)
    for _ in range(6):
        for _ in range(REFERENCE_PERIOD + 2 * REFERENCE_STEPS):
            how = case.keeper.compute(1)
            case.keeper.computed(how, 0.010 if how is Compute.OFF else 0.020, 1)
            if case.keeper.closed:
                assert "100 without (measured)" in case.keeper.report().reason
                return
    pytest.fail("it stayed open")


def test_frozen_experts_compute_every_step_alike() -> None:
    case = Case(PAYS, frozen=True)
    assert {case.step() for _ in range(2 * REFERENCE_PERIOD)} == {Compute.ON}
    assert case.experts.refits == []


def test_slots_change_hands_every_ten_minutes_at_most() -> None:
    case = Case(PAYS)
    case.now = REFIT_SECONDS - 1
    case.step()
    assert len(case.experts.refits) == 1
    case.now = REFIT_SECONDS + 1
    case.step(), case.step()
    assert len(case.experts.refits) == 2


def test_a_comparison_of_other_layers_is_not_believed() -> None:
    case = Case()
    case.keeper.priced(PAYS, "")
    other = [LAYERS[0].model_copy(update={"n_expert": 16})] * N_LAYER
    case.keeper.compared(Compared([0.04], [0.01], other, case.experts.slots(), [0.0] * N_LAYER))
    assert case.keeper.gate.state is State.WAITING


def test_what_cannot_be_measured_is_told() -> None:
    case = Case()
    case.keeper.unmeasured("a step of one token cannot be computed (code -1)")
    assert case.keeper.report().reason == "waiting: a step of one token cannot be computed (code -1)"
