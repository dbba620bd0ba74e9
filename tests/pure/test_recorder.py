"""What the engine hands over while somebody records: every decode step, whose tokens it computed, and the end."""

from __future__ import annotations

import base64
import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from daemon.engine import recorder
from daemon.engine.loop import Loop
from daemon.engine.ports import Ids, Source
from daemon.engine.recorder import Recorder, source
from daemon.engine.roster import Limits
from daemon.engine.wanted import Off
from daemon.messages import Record, Recorded, RecordingScope, Residency, ResidencySpec, RoutedLayer, Shutdown, Submit
from daemon.native.hotset import Layer, Memory, Mode, Reason
from tests.engine_fakes import EOS, FakeContext, FakePipe, FakeVocab

N_LAYER, TOP_K = 3, 2


def layer(index: int, il: int, **changes: Any) -> Layer:
    values: dict[str, Any] = {"n_expert": 8, "n_expert_used": TOP_K, "n_slots": 0, "n_resident": 0, "mode": Mode.COLD}
    values |= {"reason": Reason.MANAGED, "device": 0, "expert_bytes": 1, "device_bytes": 0, "hits": 0, "misses": 0}
    return Layer(index=index, il=il, memory=Memory.PINNED, **(values | changes))


class FakeResidency:
    """Experts whose ids tell the step and the row: `log` has those of each step that was known, in parts' order."""

    def __init__(self) -> None:
        self.chosen: Ids | None = None
        self.off = ""
        self.unknown = False
        self.log: list[Ids] = []
        self._random = np.random.default_rng(7)

    def prepare(self, width: int) -> None:
        pass

    def decoded(self, width: int, seconds: float) -> npt.NDArray[np.int64] | None:
        self.chosen = None
        if self.off or self.unknown:
            return None
        self.chosen = self._random.integers(8, size=(N_LAYER, width, TOP_K)).transpose(1, 0, 2)
        self.log.append(self.chosen)
        return np.zeros((2, width), np.int64)

    def recordable(self) -> Source | str:
        return self.off or source([layer(0, 0), layer(1, 1, reason=Reason.NOT_HOST), layer(2, 4)])

    def status(self) -> Residency:
        return Residency(reason=self.off)

    def synchronize(self) -> None:
        pass

    def adjust(self, spec: ResidencySpec) -> None:
        pass


class Bench:
    """A loop over fakes, and what was recorded of each answer by its number."""

    def __init__(self, residency: FakeResidency | Off | None = None) -> None:
        self.residency = FakeResidency()
        self.context, self.pipe = FakeContext(256), FakePipe()
        ticks = itertools.count()
        limits = Limits(n_ubatch=8, max_sequences=4, kv_cells=256, n_ctx=128)
        used = residency or self.residency
        clock = lambda: next(ticks) * 1e-3  # noqa: E731
        self.loop = Loop(self.context, FakeVocab(), self.pipe, limits, residency=used, eog=(EOS,), clock=clock)

    def turn(self, count: int = 1) -> None:
        for _ in range(count):
            self.loop.turn()

    def parts(self) -> list[Recorded]:
        return [step.recorded for step in self.pipe.sent if step.recorded is not None]

    def ids(self) -> dict[int, list[list[list[int]]]]:
        found: dict[int, list[list[list[int]]]] = {}
        for part in self.parts():
            rows = np.frombuffer(base64.b64decode(part.ids), np.uint8).reshape(len(part.answers), 2, TOP_K)
            for answer, row in zip(part.answers, rows.tolist(), strict=True):
                found.setdefault(answer, []).append(row)
        return found


def submit(request: str, n: int, prompt: tuple[int, ...] = (101, 102)) -> Submit:
    return Submit(id=request, prompt=list(prompt), max_tokens=n)


def test_each_answer_has_its_own_tokens() -> None:
    bench = Bench()
    bench.pipe.put(Record(number=3), submit("a", 6), submit("b", 4), submit("c", 9))
    bench.turn(30)
    assert {part.number for part in bench.parts()} == {3}
    first = bench.parts()[0]
    assert first.scope is not None
    assert [(one.layer, one.set, one.experts) for one in first.scope.layers] == [(0, 0, 8), (4, 0, 8)]
    assert (first.scope.top_k, first.scope.left_out) == (TOP_K, [1])
    assert [part.scope for part in bench.parts()[1:]] == [None] * (len(bench.parts()) - 1)
    assert {answer: len(rows) for answer, rows in bench.ids().items()} == {1: 5, 2: 3, 3: 8}
    expected: dict[int, list[list[list[int]]]] = {1: [], 2: [], 3: []}
    for step in bench.residency.log:
        running = [answer for answer, n in ((1, 5), (2, 3), (3, 8)) if len(expected[answer]) < n]
        for answer, row in zip(running, step[:, [0, 2]].tolist(), strict=True):
            expected[answer].append(row)
    assert bench.ids() == expected
    assert all(part.ended is None for part in bench.parts())


def test_steps_with_a_prompt_in_them_are_not_recorded() -> None:
    bench = Bench()
    bench.pipe.put(Record(number=1), submit("a", 10))
    bench.turn(4)
    bench.pipe.put(submit("b", 2, tuple(range(100, 130))))
    bench.turn(20)
    n_mixed = sum(len(batch) > 2 and len({row[2] for row in batch}) == 2 for batch in bench.context.batches)
    assert n_mixed >= 4
    assert {answer: len(rows) for answer, rows in bench.ids().items()} == {1: 9 - n_mixed, 2: 1}


def test_nothing_is_sent_while_nobody_records() -> None:
    bench = Bench()
    bench.pipe.put(submit("a", 6), Record(number=1, wanted=False))
    bench.turn(20)
    assert len(bench.residency.log) == 5
    assert bench.parts() == []


def test_an_idle_engine_answers_at_once_and_sends_all_that_is_left_with_the_end() -> None:
    bench = Bench()
    bench.turn(3)
    n_sent = len(bench.pipe.sent)
    bench.pipe.put(Record(number=1))
    bench.turn()
    assert [part.scope is not None for part in bench.parts()] == [True]
    assert len(bench.pipe.sent) == n_sent + 1
    bench.pipe.put(submit("a", 50))
    bench.turn(9)
    assert bench.ids() == {}
    bench.pipe.put(Record(number=9, wanted=False))
    bench.turn()
    assert len(bench.parts()) == 1
    bench.pipe.put(Record(number=1, wanted=False))
    bench.turn()
    assert bench.parts()[-1].ended == ""
    assert len(bench.ids()[1]) == len(bench.residency.log) - 1
    bench.turn(60)
    assert len(bench.parts()) == 2


def test_parts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MAX_BYTES", 40)
    bench = Bench()
    bench.pipe.put(Record(number=1), submit("a", 60), submit("b", 60))
    bench.turn(70)
    sizes = [len(base64.b64decode(part.ids)) for part in bench.parts()[1:]]
    assert max(sizes) == 40
    assert sum(sizes) == 2 * 59 * 2 * TOP_K


def test_a_second_one_takes_the_place_of_the_first() -> None:
    bench = Bench()
    bench.pipe.put(Record(number=1), submit("a", 60))
    bench.turn(10)
    bench.pipe.put(Record(number=2))
    bench.turn(10)
    bench.pipe.put(Record(number=1, wanted=False))
    bench.turn()
    bench.pipe.put(Record(number=2, wanted=False))
    bench.turn()
    assert [(part.number, part.scope is not None, part.ended) for part in bench.parts()] == [
        (1, True, None),
        (2, True, None),
        (2, False, ""),
    ]
    assert sum(len(part.answers) for part in bench.parts() if part.number == 2) == 11


@pytest.mark.parametrize(
    ("residency", "why"),
    [
        (Off("not applicable: a dense model has no experts to place"), "dense model"),
        (Off("off: the model is on the CPU alone, there is no device to keep experts on"), "CPU alone"),
    ],
)
def test_an_engine_without_experts_in_vram_refuses(residency: Off, why: str) -> None:
    bench = Bench(residency)
    bench.pipe.put(Record(number=4), submit("a", 4))
    bench.turn(9)
    (part,) = bench.parts()
    assert (part.number, part.scope, part.answers) == (4, None, [])
    assert why in (part.ended or "")


def test_a_loop_without_residency_refuses() -> None:
    engine = Recorder(None)
    engine.obey(Record(number=1))
    assert not engine.records
    part = engine.take(due=False)
    assert part is not None
    assert part.ended == "this engine has nothing to record"
    assert engine.take(due=True) is None


def test_it_ends_when_residency_is_switched_off_but_not_with_a_step_that_is_not_known() -> None:
    bench = Bench()
    bench.pipe.put(Record(number=1), submit("a", 60))
    bench.turn(5)
    bench.residency.unknown = True
    bench.turn(3)
    assert [part.ended for part in bench.parts()] == [None]
    bench.residency.unknown = False
    bench.turn(2)
    bench.residency.off = "off: closed: residency does not pay"
    bench.turn(3)
    assert bench.parts()[-1].ended == "off: closed: residency does not pay"
    assert len(bench.ids()[1]) == 6
    bench.residency.off = ""
    bench.turn(20)
    assert len(bench.parts()) == 2


def test_an_engine_that_ends_sends_what_there_is() -> None:
    bench = Bench()
    bench.pipe.put(Record(number=1), submit("a", 60))
    bench.turn(8)
    bench.pipe.put(Shutdown())
    bench.turn()
    assert bench.parts()[-1].ended == "the engine was told to end"
    assert len(bench.ids()[1]) == 7


def test_a_preempted_answer_stays_one() -> None:
    bench = Bench()
    bench.pipe.put(Record(number=1), submit("a", 12), submit("b", 12))
    bench.turn(5)
    bench.context.refuse_once = 1
    bench.turn(40)
    assert bench.loop.snapshot().n_preempted == 1
    lengths = {answer: len(rows) for answer, rows in bench.ids().items()}
    assert lengths.keys() == {1, 2}
    assert sum(lengths.values()) == sum(map(len, bench.residency.log))


def test_layers_are_in_ascending_order_and_sets_of_one_apart() -> None:
    found = source([layer(0, 3), layer(1, 1, n_expert=300), layer(2, 1), layer(3, 2, reason=Reason.ON_DEVICE)])
    routed = [RoutedLayer(layer=1, set=0, experts=300), RoutedLayer(layer=1, set=1, experts=8)]
    routed.append(RoutedLayer(layer=3, set=0, experts=8))
    assert found == Source(RecordingScope(top_k=TOP_K, layers=routed, left_out=[2]), [1, 2, 0])


def test_layers_that_choose_different_numbers_are_refused_where_both_are_read() -> None:
    assert source([layer(0, 0), layer(1, 1, n_expert_used=3)]) == (
        "layers that select [2, 3] experts cannot stand in one recording"
    )
    found = source([layer(0, 0), layer(1, 1, n_expert_used=3, reason=Reason.REPACKED)])
    assert isinstance(found, Source)
    assert found.scope.left_out == [1]


def test_without_any_layer_that_is_read_there_is_nothing() -> None:
    assert source([layer(0, 0, reason=Reason.ON_DEVICE)]) == "the routing of no layer is read"


def test_large_ids_take_two_bytes() -> None:
    residency = FakeResidency()
    residency.recordable = lambda: source([layer(0, 0, n_expert=300)])  # type: ignore[method-assign]
    engine = Recorder(residency)
    engine.obey(Record(number=1))
    residency.chosen = np.array([[[299, 1]]])
    engine.step([5])
    part = engine.take(due=True)
    assert part is not None
    assert (part.answers, base64.b64decode(part.ids)) == ([5], bytes([299 - 256, 1, 1, 0]))
