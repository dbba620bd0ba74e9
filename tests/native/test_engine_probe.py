"""The probe with the real library: a CPU behind the RPC backend is the device, so both sides are the same processor.

How fast either side is decides nothing here: where a verdict is asserted, the clock is the test's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from daemon.engine.arms import Arms
from daemon.engine.loop import Loop
from daemon.engine.probe import Compared, Measured, Probe
from daemon.engine.roster import Limits
from daemon.engine.store import Key, Store
from daemon.hotset.curves import uniform
from daemon.hotset.gate import State
from daemon.hotset.judge import Judge
from daemon.hotset.planner import Kind
from daemon.hotset.prices import Arm, intervals, off_seconds
from daemon.messages import Done, Sampling, Submit
from daemon.native import hotset
from daemon.native.hotset import Mode, Move, Residency
from daemon.native.vocab import Vocab
from tests.engine_fakes import FakePipe
from tests.minigguf import write_moe
from tests.residency_bench import Bench, fill, open_bench

N_LAYER, N_EXPERT, N_SLOTS = 6, 8, 4
SIZES: dict[str, Any] = {"n_layer": N_LAYER, "n_embd": 256, "n_head": 4, "n_head_kv": 2, "head_size": 64}
SIZES |= {"n_vocab": 512, "n_expert": N_EXPERT, "n_expert_used": 2, "n_ff": 256}
KEY = Key(build="b", driver="d", device="v", model="m", settings="s")
TOKENS = [7 * i % 500 for i in range(8)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_moe(tmp_path_factory.mktemp("model") / "m.gguf", experts="F32", layers="F32", vocab="F32", **SIZES)


@pytest.fixture(scope="module")
def bench(rpc_device: str, model: Path) -> Iterator[Bench]:
    with open_bench(rpc_device, model) as opened:
        yield opened


@pytest.fixture
def experts(bench: Bench) -> Iterator[Residency]:
    with Residency(bench.context.pointer, [N_SLOTS] * N_LAYER) as hs:
        fill(hs, {index: [(index + n) % N_EXPERT for n in range(N_SLOTS)] for index in range(N_LAYER)})
        yield hs


class Placement:
    """A placement that does not change by itself."""

    frozen = False

    def __init__(self, bench: Bench, experts: Residency) -> None:
        self._bench, self._experts = bench, experts
        self.settled = True

    def hold(self) -> None:
        self.settled = False

    @property
    def held(self) -> bool:
        return not self.settled

    def compute_as(self, state: hotset.State) -> None:
        self._bench.context.synchronize()
        self._experts.set_state(state)

    def synchronize(self) -> None:
        self._bench.context.synchronize()

    def release(self, missing: Sequence[Move]) -> None:
        self.compute_as(hotset.State.ON)
        for index, slot, expert in missing:
            self._experts.stage(index, expert, slot)
        self._experts.publish(missing)
        self.settled = True


class Timed:
    """The real context with a clock that moves by what the test says for the state that a step is computed in."""

    def __init__(self, bench: Bench, experts: Residency, seconds: Callable[[bool], float]) -> None:
        self._context, self._experts, self._seconds = bench.context, experts, seconds
        self.now = 0.0
        self.modes: set[tuple[Mode, ...]] = set()

    def decode(self, rows: Iterable[tuple[int, int, int, bool]]) -> int:
        on = self._experts.statistics().state == hotset.State.ON
        if on:
            self.modes.add(tuple(layer.mode for layer in self._experts.layers()))
        self.now += self._seconds(on)
        return self._context.decode(rows)

    def logits(self, row: int) -> Any:
        return self._context.logits(row)

    def remove(self, seq_id: int) -> None:
        self._context.remove(seq_id)

    def clock(self) -> float:
        return self.now


class Told:
    def __init__(self) -> None:
        self.measured: list[Measured] = []
        self.comparisons: list[Compared] = []
        self.reasons: list[str] = []

    def priced(self, measured: Measured, _note: str) -> None:
        self.measured.append(measured)

    def compared(self, compared: Compared) -> None:
        self.comparisons.append(compared)

    def unmeasured(self, why: str) -> None:
        self.reasons.append(why)


def run(probe: Probe) -> None:
    for _ in range(5000):
        if not probe.pending:
            return
        probe.step()
    raise AssertionError("the probe never ends")


def residents(experts: Residency) -> list[list[int]]:
    return [experts.resident(index) for index in range(N_LAYER)]


def logits(bench: Bench) -> np.ndarray[Any, Any]:
    rows = [bench.logits([(token, position, 0)]) for position, token in enumerate(TOKENS)]
    bench.clear()
    return np.concatenate(rows)


def test_it_comes_to_prices_and_leaves_everything_as_it_was(bench: Bench, experts: Residency, tmp_path: Path) -> None:
    former, before = residents(experts), logits(bench)
    bytes_before = experts.statistics().device_bytes
    told = Told()
    probe = Probe(bench.context, Arms(experts, Placement(bench, experts)), TOKENS, Store(tmp_path, Measured), KEY, told)
    probe.compare()
    run(probe)
    assert told.reasons == []
    ((measured,), (compared,)) = told.measured, told.comparisons
    assert measured.setup.whole, "some layers were made whole"
    prices = measured.prices()
    values = [prices.base, prices.partial, prices.cold, prices.cpu_rate, prices.device_rate]
    assert all(math.isfinite(value) and value >= 0 for value in values)
    assert prices.cpu_rate > 0, "the CPU's chains take time"
    assert all(low <= high for low, high in intervals(measured.setup, measured.rounds).values())
    assert off_seconds(prices, measured.setup.layers) > 0
    assert all(seconds > 0 for seconds in (*compared.offs, *compared.ons))
    assert compared.slots == [N_SLOTS] * N_LAYER
    assert all(0 <= rate <= 1 for rate in compared.hit_rates)
    assert any(0 < rate < 1 for rate in compared.hit_rates)
    assert residents(experts) == former
    assert experts.statistics().device_bytes == bytes_before
    assert experts.statistics().state == hotset.State.ON
    np.testing.assert_array_equal(logits(bench), before)
    assert Store(tmp_path, Measured).find(KEY) == measured


def test_the_arms_are_what_the_formulas_say(bench: Bench, experts: Residency, tmp_path: Path) -> None:
    told = Told()
    context = Timed(bench, experts, lambda on: 0.2 if on else 0.1)
    arms = Arms(experts, Placement(bench, experts))
    run(Probe(context, arms, TOKENS, Store(tmp_path, Measured), KEY, told, context.clock))
    ((measured,)) = told.measured
    setup = measured.setup
    slotted = [Mode.PARTIAL if place in setup.slotted else Mode.COLD for place in range(N_LAYER)]
    whole = [Mode.FULL if place in setup.whole else mode for place, mode in enumerate(slotted)]
    assert context.modes == {tuple(slotted), tuple(whole)}
    for one in measured.rounds:
        assert one[Arm.OFF].cpu == 0, "upstream's path has no chain"
        assert one[Arm.EMPTY].cpu > 0
        assert {arm: times.wall for arm, times in one.items()} == pytest.approx(
            {arm: 0.1 if arm is Arm.OFF else 0.2 for arm in one}
        )


def test_where_residency_does_not_pay_the_gate_says_so(bench: Bench, experts: Residency, tmp_path: Path) -> None:
    """Ten seconds more with experts on the device, whatever they are: chains of microseconds cannot win that back."""
    told = Told()
    context = Timed(bench, experts, lambda on: 30.0 if on else 20.0)
    arms = Arms(experts, Placement(bench, experts))
    probe = Probe(context, arms, TOKENS, Store(tmp_path, Measured), KEY, told, context.clock)
    probe.compare()
    run(probe)
    (measured,), (compared,) = told.measured, told.comparisons
    judge = Judge(measured.prices(), measured.setup.layers)
    judge.compared(compared.offs, compared.ons, compared.slots, compared.hit_rates)
    judge.review(compared.slots, [uniform(N_EXPERT)[N_SLOTS]] * N_LAYER)
    verdict = judge.gate.verdict
    assert verdict.state is State.CLOSED
    assert verdict.reason.startswith("closed: residency does not pay: 0.0")
    assert "at a hit rate of 0.50" in verdict.reason
    budget = N_LAYER * (N_SLOTS + 1) * measured.setup.layers[0].expert_bytes
    plan = judge.place([uniform(N_EXPERT)] * N_LAYER, budget)
    assert plan.kind is Kind.OFF, "no placement pays, so no layer has slots"


@pytest.mark.parametrize("n_turns", [3, 9, 40])
def test_a_request_takes_the_engine_at_once(bench: Bench, experts: Residency, tmp_path: Path, n_turns: int) -> None:
    former = residents(experts)
    placement, told = Placement(bench, experts), Told()
    probe = Probe(bench.context, Arms(experts, placement), TOKENS, Store(tmp_path, Measured), KEY, told)
    pipe = FakePipe()
    limits = Limits(n_ubatch=64, max_sequences=8, kv_cells=512, n_ctx=512)
    loop = Loop(bench.context, Vocab.of_model(bench.model.pointer), pipe, limits, idle=probe)
    for _ in range(n_turns):
        loop.turn()
    assert probe.underway
    pipe.put(Submit(id="a", prompt=TOKENS, max_tokens=3, sampling=Sampling(temperature=0, ignore_eos=True)))
    loop.turn()
    assert not probe.underway
    assert placement.settled
    assert residents(experts) == former
    while not isinstance(pipe.end("a"), Done):
        loop.turn()
    assert not told.reasons
    bench.clear()
