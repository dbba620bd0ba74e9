"""The gate: what closes and opens it, that it does not flutter, what it says; and which steps tell it more."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.hotset import trace
from daemon.hotset.allotment import RankCounts
from daemon.hotset.bursts import BURST, PERIOD, REFERENCE_PERIOD, WARM, Compute, Reference, References, counting
from daemon.hotset.gate import CLOSE_TOKENS, MOST_TOKENS, OPEN_TOKENS, Gate, Review, State, hit_rate
from daemon.hotset.policy import Heat, Settings

TRACES = Path(__file__).resolve().parents[1] / "data"


def review(speed: float, tokens: int = 64, **more: float) -> Review:
    return Review(off=0.05 * speed, on=0.05, hit_rate=0.5, tokens=tokens, **more)  # type: ignore[arg-type]


def tokens_until_change(gate: Gate, speed: float) -> int:
    for n in range(1, 10_000):
        if gate.review(review(speed)):
            return 64 * n
    raise AssertionError("nothing changes")


def in_state(state: State) -> Gate:
    gate = Gate()
    assert gate.state is State.WAITING
    assert gate.review(review(2.0 if state is State.OPEN else 0.5))
    assert gate.state is state
    return gate


@pytest.mark.parametrize(("speed", "state"), [(0.5, State.CLOSED), (0.97, State.CLOSED), (0.99, State.OPEN),
                                              (1.5, State.OPEN)])  # fmt: skip
def test_the_first_review_decides(speed: float, state: State) -> None:
    gate = Gate()
    gate.review(review(speed))
    assert gate.state is state


def test_it_closes_and_opens_after_enough_tokens_in_a_row() -> None:
    gate = in_state(State.OPEN)
    assert tokens_until_change(gate, 0.9) == CLOSE_TOKENS
    assert gate.state is State.CLOSED
    assert tokens_until_change(gate, 1.1) == OPEN_TOKENS
    assert gate.state is State.OPEN


def test_one_better_review_begins_the_count_anew() -> None:
    gate = in_state(State.OPEN)
    for _ in range(50):
        for _ in range(CLOSE_TOKENS // 64 - 1):
            assert not gate.review(review(0.5))
        assert not gate.review(review(1.0))
    assert gate.state is State.OPEN


@pytest.mark.parametrize("state", [State.OPEN, State.CLOSED])
def test_in_between_it_stays_as_it_is(state: State) -> None:
    gate = in_state(state)
    for speed in (0.981, 1.0, 1.029):
        assert not any(gate.review(review(speed, 10_000)) for _ in range(20))
    assert gate.state is state


def test_every_closing_makes_opening_slower() -> None:
    gate = in_state(State.OPEN)
    waits = []
    for _ in range(12):
        tokens_until_change(gate, 0.5)
        waits.append(tokens_until_change(gate, 2.0))
    assert waits[:3] == [OPEN_TOKENS, 2 * OPEN_TOKENS, 4 * OPEN_TOKENS]
    assert waits[-1] == MOST_TOKENS


def test_a_decisive_review_is_believed_at_once() -> None:
    gate = in_state(State.OPEN)
    assert gate.review(review(0.5, 0, decisive=True))
    assert not gate.review(review(1.02, 0, decisive=True))
    assert gate.review(review(1.5, 0, decisive=True))


@given(st.lists(st.tuples(st.floats(0.2, 5), st.integers(0, 500)), max_size=80))
def test_it_never_changes_against_its_thresholds(steps: list[tuple[float, int]]) -> None:
    gate = Gate()
    for speed, tokens in steps:
        before, one = gate.state, review(speed, tokens)
        if gate.review(one) and before is not State.WAITING:
            assert one.speed < 0.98 if before is State.OPEN else one.speed > 1.03
        assert gate.verdict.reason.startswith(f"{gate.state.value}: ")


def test_it_says_why_in_numbers() -> None:
    gate = Gate()
    assert "not measured yet" in gate.verdict.reason
    gate.unmeasured("the device is lost")
    assert gate.verdict.reason == "waiting: the device is lost"
    gate.review(Review(off=0.050, on=0.0625, hit_rate=0.25, width=4))
    assert gate.verdict.reason == (
        "closed: residency does not pay: 64 tokens a second for 4 streams with experts in VRAM at a hit rate of 0.25, "
        "80 without (predicted from measured prices)"
    )
    assert (gate.verdict.on, gate.verdict.off) == (pytest.approx(64), pytest.approx(80))
    gate.unmeasured("too late")
    assert gate.state is State.CLOSED
    assert gate.verdict.reason.startswith("closed")
    gate.review(Review(off=0.1, on=0.05, hit_rate=0.9, measured=True, decisive=True))
    assert gate.verdict.reason == (
        "open: residency pays: 20 tokens a second with experts in VRAM at a hit rate of 0.90, 10 without (measured)"
    )


@pytest.mark.parametrize(
    "wrong", [{"off": 0.0}, {"on": -1.0}, {"hit_rate": 1.5}, {"width": 0}, {"tokens": -1}, {"on": float("nan")}]
)
def test_what_is_no_review_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="no review"):
        Review(**{"off": 1.0, "on": 1.0, "hit_rate": 0.5} | wrong)  # type: ignore[arg-type]


def test_layers_without_slots_do_not_count_for_the_hit_rate() -> None:
    assert hit_rate([4, 0, 8], [0.5, 0.0, 0.7]) == pytest.approx(0.6)
    assert hit_rate([0, 0], [0.0, 0.0]) == 0


class TestCounting:
    def test_a_closed_gate_counts_an_eighth_of_the_steps(self) -> None:
        steps = [counting(n) for n in range(4 * PERIOD)]
        assert {step.compute for step in steps} == {Compute.OFF, Compute.COUNT}
        assert sum(step.compute is Compute.COUNT for step in steps) * 8 == len(steps)
        assert all(step.compute is Compute.COUNT for step in steps if step.learn)
        assert sum(step.learn for step in steps) == 4 * (BURST - WARM)
        assert steps[0].compute is Compute.COUNT

    @pytest.mark.parametrize("name", ["six-domains", "all-domains"])
    def test_bursts_tell_the_hit_rates_of_all_steps(self, name: str) -> None:
        ids = trace.read(TRACES / f"{name}.trace").ids.astype(np.int64)
        n_layers, n_expert = ids.shape[1], 32
        every, sampled = (RankCounts(n_layers, n_expert, half_life=float("inf")) for _ in range(2))
        warm, cool = (Heat([n_expert] * n_layers, Settings()) for _ in range(2))
        for n, token in enumerate(ids):
            every.observe(warm.values, token[None])
            warm.observe(token[None])
            step = counting(n)
            if step.learn:
                sampled.observe(cool.values, token[None])
            if step.compute is Compute.COUNT:
                cool.observe(token[None])
        rates = [ranks.hits().sum(axis=0) for ranks in (every, sampled)]
        for slots in (4, 8, 16):
            true, found = (row[slots] / row[-1] for row in rates)
            assert abs(true - found) < 0.03


class TestReferences:
    def run(self, references: References, n: int, off: float = 0.05, on: float = 0.03) -> list[Reference]:
        found = []
        for _ in range(n):
            seconds = off if references.compute is Compute.OFF else on
            found += [one] if (one := references.observe(seconds, 2)) else []
        return found

    def test_a_few_steps_of_a_period_are_upstream_s(self) -> None:
        references, states = References(), []
        for _ in range(REFERENCE_PERIOD + 12):
            states.append(references.compute)
            references.observe(0.1, 1)
        assert states.index(Compute.OFF) == REFERENCE_PERIOD
        assert states.count(Compute.OFF) == 6

    def test_they_are_compared_with_their_neighbours(self) -> None:
        assert self.run(References(20), 100) == [Reference(0.05, 0.03, 2)] * 3

    def test_steps_in_which_the_graph_is_built_do_not_count(self) -> None:
        references, seconds, before = References(4), [], Compute.ON
        found = []
        for _ in range(16):
            now = references.compute
            seconds.append(9.0 if now is not before else 0.05 if now is Compute.OFF else 0.03)
            found += [one] if (one := references.observe(seconds[-1], 1)) else []
            before = now
        assert seconds.count(9.0) == 2
        assert found == [Reference(0.05, 0.03, 1)]

    def test_other_sequences_in_between_make_it_worthless(self) -> None:
        references = References(4)
        found = [references.observe(0.1, 2 if n == 7 else 1) for n in range(32)]
        assert [n for n, one in enumerate(found) if one] == [31]

    def test_what_comes_in_between_begins_it_anew(self) -> None:
        references = References(4)
        self.run(references, 6)
        assert references.compute is Compute.OFF
        references.restart()
        assert references.compute is Compute.ON
        assert self.run(references, 16) == [Reference(0.05, 0.03, 2)]
        self.run(references, 3)
        references.restart()
        assert self.run(references, 13) == [Reference(0.05, 0.03, 2)], "the steps behind are enough"
