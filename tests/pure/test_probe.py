"""The probe: interleaved rounds, only when idle, gives way at once, leaves nothing behind, is remembered."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from daemon.engine.arms import Selections
from daemon.engine.idle import IdleWorks
from daemon.engine.loop import Loop
from daemon.engine.probe import (
    LEAST_ROUNDS,
    MOST_ROUNDS,
    N_CELLS,
    QUIET_SECONDS,
    TIMED,
    WARM,
    Compared,
    Measured,
    Probe,
)
from daemon.engine.roster import Limits
from daemon.engine.store import Key, Store
from daemon.hotset.prices import Arm, LayerFacts, Setup
from daemon.messages import Done, Submit
from daemon.native.hotset import ResidencyError, Status
from tests.engine_fakes import FakeContext, FakePipe, FakeVocab

KEY = Key(build="b", driver="d", device="v", model="m", settings="s")
LIMITS = Limits(n_ubatch=64, max_sequences=4, kv_cells=256, n_ctx=256)
FACTS = LayerFacts(n_expert=8, n_used=2, expert_bytes=100)
SECONDS = {Arm.OFF: 0.060, Arm.EMPTY: 0.064, Arm.NEARLY: 0.046, Arm.WHOLE: 0.040, Arm.ON: 0.045}
CPU = {Arm.OFF: 0.0, Arm.EMPTY: 0.030, Arm.NEARLY: 0.012, Arm.WHOLE: 0.010, Arm.ON: 0.015}
SHOWN = (Arm.OFF, Arm.EMPTY, Arm.NEARLY, Arm.WHOLE)


class Arms:
    """Three layers, the first of them whole; remembers what was asked."""

    def __init__(self) -> None:
        self.ready, self.fits_whole = True, True
        self.slots = [4, 4, 0]
        self.arm: Arm | None = None
        self.shown: list[Arm] = []
        self.begun: list[bool] = []
        self.ended = 0
        self.pieces, self._left = 3, 0
        self.whole = [0]
        self.fault: ResidencyError | None = None
        self.cpu = 0.0
        self.hits, self.misses = [0, 0, 0], [0, 0, 0]

    @property
    def layers(self) -> list[LayerFacts]:
        return [FACTS] * 3

    @property
    def held(self) -> bool:
        return len(self.begun) > self.ended

    def setup(self) -> Setup:
        return Setup(layers=self.layers, slotted=[0, 1], whole=self.whole)

    def begin(self, whole: bool) -> None:
        assert not self.held
        self.begun.append(whole)
        self._left = self.pieces if whole else 0

    def advance(self) -> bool:
        assert self.held
        if self.fault is not None:
            raise self.fault
        self._left -= 1
        return self._left < 0

    def show(self, arm: Arm) -> None:
        assert self.held
        assert self._left < 0
        self.arm = arm
        self.shown.append(arm)

    def cpu_seconds(self) -> float:
        return self.cpu

    def selections(self) -> list[Selections]:
        return list(zip(self.hits, self.misses, strict=True))

    def end(self) -> None:
        assert self.held
        self.arm = None
        self.ended += 1

    def computed(self) -> None:
        """A step of the arm that is shown."""
        if self.arm is None:
            return
        self.cpu += CPU[self.arm]
        if self.arm is Arm.NEARLY:
            self.hits[0] += 15
            self.misses[0] += 1
        if self.arm is Arm.ON:
            self.hits[0] += 3
            self.misses[0] += 1
            self.misses[1] += 4


class Context(FakeContext):
    """A clock that steps move by what their arm takes; in the first steps after a change, by more."""

    def __init__(self, arms: Arms) -> None:
        super().__init__(256)
        self.arms, self.now = arms, 100.0
        self.refuse: Callable[[], int] = lambda: 0
        self.waited = 0
        self._since, self._last = 0, arms.arm

    def decode(self, rows: Iterable[tuple[int, int, int, bool]]) -> int:
        if code := self.refuse():
            return code
        self._since = self._since + 1 if self.arms.arm is self._last else 1
        self._last = self.arms.arm
        self.now += SECONDS[self.arms.arm] if self.arms.arm is not None else 0.05
        self.now += 1.0 if self._since <= 2 else 0.0
        self.arms.computed()
        return super().decode(rows)

    def logits(self, row: int) -> Any:
        self.waited += 1
        return super().logits(row)

    def clock(self) -> float:
        return self.now


class Told:
    def __init__(self, arms: Arms) -> None:
        self._arms = arms
        self.prices: list[tuple[Measured, str]] = []
        self.comparisons: list[Compared] = []
        self.reasons: list[str] = []

    def priced(self, measured: Measured, note: str) -> None:
        assert not self._arms.held
        self.prices.append((measured, note))

    def compared(self, compared: Compared) -> None:
        assert not self._arms.held
        self.comparisons.append(compared)

    def unmeasured(self, why: str) -> None:
        assert not self._arms.held
        self.reasons.append(why)


class Bench:
    """An engine loop with a probe, over fakes."""

    def __init__(self, directory: Path) -> None:
        self.arms = Arms()
        self.context = Context(self.arms)
        self.told = Told(self.arms)
        self.store = Store(directory, Measured)
        self.probe = Probe(self.context, self.arms, [97, 98, 99], self.store, KEY, self.told, self.context.clock)
        self.pipe = FakePipe()
        self.loop = Loop(
            self.context, FakeVocab(), self.pipe, LIMITS, idle=IdleWorks([self.probe]), clock=self.context.clock
        )

    def turn_until_over(self) -> int:
        for n in range(2000):
            if not self.probe.pending:
                return n
            self.loop.turn()
        raise AssertionError("the probe never ends")

    def answer(self, name: str = "a") -> str:
        self.pipe.put(Submit(id=name, prompt=[97, 98], max_tokens=5))
        while not isinstance(self.pipe.end(name), Done):
            self.loop.turn()
        return self.pipe.text(name)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_it_measures_the_arms_in_turn_and_comes_to_prices(bench: Bench) -> None:
    bench.turn_until_over()
    ((measured, note),) = bench.told.prices
    n = len(measured.rounds)
    assert LEAST_ROUNDS <= n <= MOST_ROUNDS
    assert bench.arms.shown == [arm for i in range(n) for arm in (SHOWN if i % 2 == 0 else SHOWN[::-1])]
    for one in measured.rounds:
        assert {arm: times.wall for arm, times in one.items()} == pytest.approx({arm: SECONDS[arm] for arm in SHOWN})
        assert {arm: times.cpu for arm, times in one.items()} == pytest.approx({arm: CPU[arm] for arm in SHOWN})
    assert measured.setup.missed == pytest.approx(1 / 16)
    assert measured.prices().cpu_rate * FACTS.picked() == pytest.approx(0.030 / 2)
    assert measured.prices().partial - measured.prices().cold == pytest.approx(0.004 / 2)
    assert note == "measured now"
    assert bench.context.cells == {}
    assert not bench.probe.underway


def test_every_step_is_waited_for_and_the_first_ones_do_not_count(bench: Bench) -> None:
    bench.turn_until_over()
    n_visits = len(bench.arms.shown)
    assert bench.context.waited == len(bench.context.batches) == n_visits * (WARM + TIMED)
    assert all(len(batch) == 1 for batch in bench.context.batches)
    visits = [bench.context.batches[i : i + N_CELLS] for i in range(0, len(bench.context.batches), N_CELLS)]
    assert all(visit == visits[0] for visit in visits), "the same tokens at the same positions"
    assert [rows[0][1] for rows in visits[0]] == list(range(N_CELLS))


def test_slow_machines_get_fewer_rounds(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SECONDS, Arm.OFF, 30.0)
    bench.turn_until_over()
    assert len(bench.told.prices[0][0].rounds) == LEAST_ROUNDS


def test_without_a_whole_layer_two_arms_are_left(bench: Bench) -> None:
    bench.arms.whole, bench.arms.fits_whole = [], False
    bench.turn_until_over()
    assert set(bench.arms.shown) == {Arm.OFF, Arm.EMPTY}
    ((measured, _),) = bench.told.prices
    assert (measured.setup.whole, measured.setup.missed, measured.prices().whole) == ([], 0.0, False)


def test_what_is_known_is_not_measured_again(tmp_path: Path) -> None:
    first = Bench(tmp_path)
    first.turn_until_over()
    again = Bench(tmp_path)
    again.turn_until_over()
    assert again.context.batches == []
    assert again.arms.begun == []
    ((measured, note),) = again.told.prices
    assert measured == first.told.prices[0][0]
    assert note == f"measured on {measured.measured}, with the same build, driver, device and settings"


@pytest.mark.parametrize("change", ["layers", "whole"])
def test_what_is_known_of_other_slots_is(tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Bench(tmp_path)
    if change == "whole":
        first.arms.whole, first.arms.fits_whole = [], False
    first.turn_until_over()
    if change == "layers":
        monkeypatch.setattr(Arms, "layers", property(lambda _: [FACTS, FACTS, FACTS.model_copy(update={"n_used": 1})]))
    again = Bench(tmp_path)
    again.turn_until_over()
    assert again.told.prices[0][1] == "measured now"


def test_it_waits_for_a_settled_placement(bench: Bench) -> None:
    bench.arms.ready = False
    assert not bench.probe.pending
    bench.loop.turn()
    assert bench.arms.begun == []
    bench.arms.ready = True
    bench.turn_until_over()
    assert bench.told.prices


@pytest.mark.parametrize("n_turns", [1, 2, 4, 5, 9, 12, 13, 14, 25, 60])
def test_a_request_interrupts_it_anywhere_and_it_begins_anew_after_a_while(bench: Bench, n_turns: int) -> None:
    for _ in range(n_turns):
        bench.loop.turn()
    assert bench.probe.underway
    steps = len(bench.context.batches)
    assert bench.answer()
    assert not bench.arms.held
    assert not bench.probe.underway
    assert bench.context.cells == {}
    assert len(bench.context.batches) - steps == 5, "not a step of the probe in between"
    assert not bench.probe.pending, "others may ask soon"
    bench.context.now += 2 * QUIET_SECONDS
    bench.turn_until_over()
    assert len(bench.told.prices) == 1
    assert bench.arms.begun == [True, True]


def test_each_interruption_makes_it_wait_longer(bench: Bench) -> None:
    waits = []
    for n in range(9):
        for _ in range(8):
            bench.loop.turn()
        assert bench.probe.underway
        bench.answer(f"a{n}")
        before = bench.context.now
        while not bench.probe.pending:
            bench.context.now += 0.5
        waits.append(bench.context.now - before)
    assert waits[:3] == pytest.approx([4, 8, 16], abs=0.6)
    assert waits[-1] == pytest.approx(120, abs=0.6)


def test_snapshots_meanwhile_do_not_take_its_cells_for_a_leak(bench: Bench) -> None:
    for _ in range(12):
        bench.loop.turn()
        assert bench.loop.snapshot().kv_cells_used == 0
    assert bench.context.cells


@pytest.mark.parametrize("where", ["arranging", "decoding"])
def test_what_is_refused_is_said_and_all_given_back(bench: Bench, where: str) -> None:
    if where == "arranging":
        bench.arms.fault = ResidencyError(Status.FAILED, "the device is lost")
    else:
        bench.context.refuse = lambda: 1
    bench.turn_until_over()
    assert bench.told.reasons == [
        "the device is lost" if where == "arranging" else "a step of one token cannot be computed (code 1)"
    ]
    assert (bench.told.prices, bench.arms.held, bench.context.cells) == ([], False, {})
    assert not bench.probe.pending


def test_the_placement_as_it_stands_can_be_compared(bench: Bench) -> None:
    bench.turn_until_over()
    bench.arms.shown.clear()
    assert not bench.probe.pending
    bench.probe.compare()
    bench.turn_until_over()
    assert set(bench.arms.shown) == {Arm.OFF, Arm.ON}
    assert bench.arms.begun == [True, False]
    (compared,) = bench.told.comparisons
    assert len(compared.offs) == len(compared.ons) >= LEAST_ROUNDS
    assert (compared.offs, compared.ons) == (
        pytest.approx([0.060] * len(compared.offs)),
        pytest.approx([0.045] * len(compared.ons)),
    )
    assert (compared.layers, compared.slots) == ([FACTS] * 3, [4, 4, 0])
    assert compared.hit_rates == [0.75, 0.0, 0.0]


def test_a_comparison_that_is_asked_for_early_comes_after_the_prices(bench: Bench) -> None:
    bench.probe.compare()
    bench.turn_until_over()
    assert len(bench.told.prices) == len(bench.told.comparisons) == 1
    assert bench.arms.begun == [True, False]


def test_a_cache_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    bench = Bench(tmp_path / "file" / "below")
    bench.turn_until_over()
    assert bench.told.prices[0][1] == "measured now; it cannot be remembered: Not a directory"


def spoiled(**setup: object) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda record: record | {"setup": record["setup"] | setup}


@pytest.mark.parametrize(
    "damage",
    [
        spoiled(slotted=[0, 7]),
        spoiled(slotted=[]),
        spoiled(missed=2.0),
        spoiled(more=1),
        lambda record: record | {"rounds": record["rounds"][:2]},
        lambda record: record | {"rounds": [{"off": {"wall": 1.0, "cpu": 0.0}}] * 3},
        lambda record: record | {"rounds": record["rounds"] * 24},
        lambda record: record | {"format": 2},
    ],
)
def test_a_record_that_gives_no_prices_is_none(tmp_path: Path, damage: Callable[[dict[str, Any]], Any]) -> None:
    Bench(tmp_path).turn_until_over()
    (path,) = tmp_path.iterdir()
    assert Store(tmp_path, Measured).find(KEY) is not None
    path.write_text(json.dumps(damage(json.loads(path.read_text()))))
    assert Store(tmp_path, Measured).find(KEY) is None
    again = Bench(tmp_path)
    again.turn_until_over()
    assert again.told.prices[0][1] == "measured now"
