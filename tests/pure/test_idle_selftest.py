"""The engine's self-test: only when idle, gives way at once, leaves nothing behind, says what it found."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from daemon.engine.counts import Counts
from daemon.engine.loop import IDLE_SECONDS, Loop
from daemon.engine.proofs import Key, Proofs
from daemon.engine.roster import Limits
from daemon.engine.selftest import N_CELLS, SelfTest
from daemon.messages import Done, SelfTestState, Submit
from daemon.native import drivers
from daemon.native.hotset import Layer, Mode, Reason, ResidencyError, State, Status
from tests.engine_fakes import N_VOCAB, FakeContext, FakePipe, FakeVocab

KEY = Key(build="b", driver="d", device="v", model="m", settings="s")
LIMITS = Limits(n_ubatch=64, max_sequences=4, kv_cells=256, n_ctx=256)


class Experts:
    """Remembers every call."""

    def __init__(self) -> None:
        self.filled = self.complete = True
        self.state = State.ON
        self.counting = True
        self.off = ""
        self.told: list[tuple[SelfTestState, str]] = []

    def compute_as(self, state: State) -> None:
        self.state = state

    def switch_off(self, reason: str) -> None:
        self.state, self.off = State.OFF, reason

    def stop_counting(self) -> None:
        assert self.counting
        assert self.state is State.ON
        self.counting = False

    def count_again(self) -> None:
        assert not self.counting
        self.counting = True

    def tell(self, state: SelfTestState, detail: str = "") -> None:
        self.told.append((state, detail))


class Context(FakeContext):
    """Whose logits depend on whether residency is on, by `wrong`."""

    def __init__(self, experts: Experts, wrong: float = 0.0) -> None:
        super().__init__(256)
        self.experts, self.wrong = experts, wrong
        self.refuse: Callable[[State], int] = lambda _: 0
        self.states: list[State] = []

    def decode(self, rows: Iterable[tuple[int, int, int, bool]]) -> int:
        self.states.append(self.experts.state)
        return self.refuse(self.experts.state) or super().decode(rows)

    def logits(self, row: int) -> np.ndarray[Any, Any]:
        logits = super().logits(row)
        if self.experts.state is State.ON:
            logits[: N_VOCAB // 2] += np.float32(self.wrong)
        return logits


class Bench:
    """An engine loop with a self-test, over fakes."""

    def __init__(self, directory: Path, wrong: float = 0.0, known: bool = False) -> None:
        self.experts = Experts()
        self.context = Context(self.experts, wrong)
        self.proofs = Proofs(directory)
        if known:
            self.proofs.add(KEY, 0.0)
        self.key = KEY
        self.test = SelfTest(self.context, self.experts, [97, 98, 99], self.proofs, lambda: self.key)
        self.pipe = FakePipe()
        self.loop = Loop(self.context, FakeVocab(), self.pipe, LIMITS, idle=self.test)

    @property
    def told(self) -> tuple[SelfTestState, str]:
        return self.experts.told[-1]

    def turn_until_over(self) -> int:
        for n in range(100):
            if not self.test.pending:
                return n
            self.loop.turn()
        raise AssertionError("the self-test never ends")

    def answer(self, name: str = "a") -> str:
        self.pipe.put(Submit(id=name, prompt=[97, 98], max_tokens=5))
        while not isinstance(self.pipe.end(name), Done):
            self.loop.turn()
        return self.pipe.text(name)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_the_same_numbers_pass_and_are_remembered(bench: Bench) -> None:
    assert bench.told == ("waiting", "")
    n_turns = bench.turn_until_over()
    assert bench.told[0] == "passed"
    assert bench.context.states == [State.OFF] * (n_turns // 2) + [State.ON] * (n_turns // 2)
    assert (bench.experts.state, bench.experts.off, bench.experts.counting) == (State.ON, "", True)
    assert bench.context.cells == {}
    assert bench.proofs.find(KEY) is not None


def test_what_is_remembered_are_the_slots_that_were_tested(bench: Bench) -> None:
    other = KEY.model_copy(update={"settings": "other slots"})
    bench.key = other
    bench.turn_until_over()
    assert bench.told[0] == "passed"
    assert bench.proofs.find(KEY) is None
    assert bench.proofs.find(other) is not None


def test_a_test_of_fewer_experts_than_planned_is_not_remembered(bench: Bench) -> None:
    bench.experts.complete = False
    bench.turn_until_over()
    assert bench.told[0] == "passed"
    assert bench.told[1].endswith("it cannot be remembered: experts are missing")
    assert bench.proofs.find(KEY) is None


def test_other_numbers_switch_residency_off(tmp_path: Path) -> None:
    bench = Bench(tmp_path, wrong=3.0)
    bench.turn_until_over()
    assert bench.told[0] == "failed"
    assert bench.experts.off.startswith("the self-test failed: the mean divergence is")
    assert (bench.experts.state, bench.experts.counting, bench.context.cells) == (State.OFF, True, {})
    assert bench.proofs.find(KEY) is None
    assert bench.answer()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_numbers_that_are_not_finite_switch_it_off(tmp_path: Path, value: float) -> None:
    bench = Bench(tmp_path, wrong=value)
    bench.turn_until_over()
    assert bench.told[0] == "failed"
    assert bench.experts.off


def test_rounding_is_no_failure(tmp_path: Path) -> None:
    bench = Bench(tmp_path, wrong=0.05)
    bench.turn_until_over()
    assert bench.told[0] == "passed"


def test_what_is_known_is_not_tested_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path, wrong=3.0, known=True)
    assert bench.told[0] == "passed"
    assert "the same build, driver, device, model and settings" in bench.told[1]
    bench.loop.turn()
    assert bench.context.states == []


def test_it_waits_for_the_upload(bench: Bench) -> None:
    bench.experts.filled = False
    bench.loop.turn()
    assert bench.context.states == []
    assert bench.pipe.timeouts == [IDLE_SECONDS], "nothing is to be done at once"
    bench.experts.filled = True
    bench.turn_until_over()
    assert bench.told[0] == "passed"
    assert set(bench.pipe.timeouts[1:]) == {0}


@pytest.mark.parametrize("n_turns", [1, 5, 10, 11, 15, 19])
def test_a_request_interrupts_it_at_every_step_and_is_served_with_residency(bench: Bench, n_turns: int) -> None:
    undisturbed = FakeContext(256)
    loop, pipe = Loop(undisturbed, FakeVocab(), FakePipe(), LIMITS), FakePipe()
    loop = Loop(undisturbed, FakeVocab(), pipe, LIMITS)
    pipe.put(Submit(id="a", prompt=[97, 98], max_tokens=5))
    while pipe.end("a") is None:
        loop.turn()

    for _ in range(n_turns):
        bench.loop.turn()
    assert bench.test.underway
    before = len(bench.context.states)
    assert bench.answer() == pipe.text("a")
    served = bench.context.states[before:]
    assert set(served) == {State.ON}
    assert len(served) == len(undisturbed.batches), "not a step of the test in between"
    assert (bench.experts.counting, bench.context.cells) == (True, {})
    n_steps = bench.turn_until_over()
    assert bench.told[0] == "passed"
    assert n_steps == 20, "it began anew"


def test_snapshots_during_the_test_do_not_take_its_cells_for_a_leak(bench: Bench) -> None:
    for _ in range(5):
        bench.loop.turn()
        assert bench.loop.snapshot().kv_cells_used == 0
    assert bench.test.underway
    bench.context.cells[3] = [1]
    bench.turn_until_over()
    with pytest.raises(RuntimeError, match="still hold cells"):
        bench.loop.snapshot()


@pytest.mark.parametrize(("state", "told"), [(State.OFF, "skipped"), (State.ON, "failed")])
def test_a_step_that_is_refused_tells_of_residency_only_where_it_is_on(bench: Bench, state: State, told: str) -> None:
    bench.context.refuse = lambda now: 1 if now is state else 0
    bench.turn_until_over()
    assert bench.told[0] == told
    assert bench.experts.state is (State.ON if told == "skipped" else State.OFF)
    assert bench.context.cells == {}


def test_a_model_without_finite_numbers_is_no_failure_of_residency(bench: Bench, monkeypatch: Any) -> None:
    monkeypatch.setattr(bench.context, "logits", lambda _row: np.full(N_VOCAB, np.nan, np.float32))
    bench.turn_until_over()
    assert bench.told[0] == "skipped"
    assert bench.experts.state is State.ON


def test_shutdown_ends_it(bench: Bench) -> None:
    bench.loop.turn()
    bench.pipe.inbox.append(b'{"kind": "shutdown"}')
    bench.loop.run()
    assert not bench.test.underway
    assert bench.context.cells == {}


def test_it_needs_no_more_cells_than_it_says(bench: Bench) -> None:
    used = []
    while bench.test.pending:
        bench.loop.turn()
        used.append(sum(map(len, bench.context.cells.values())))
    assert 32 < max(used) <= N_CELLS


class TestProofs:
    def test_every_part_of_the_key_matters(self, tmp_path: Path) -> None:
        proofs = Proofs(tmp_path / "new" / "directory")
        assert proofs.find(KEY) is None
        assert proofs.add(KEY, 1e-5) is None
        found = proofs.find(KEY)
        assert found is not None
        assert found.kl == 1e-5
        for name in Key.model_fields:
            assert proofs.find(KEY.model_copy(update={name: "other"})) is None
        assert [path.stat().st_mode & 0o777 for path in (tmp_path / "new" / "directory").iterdir()] == [0o600]

    @pytest.mark.parametrize(
        "damage",
        [
            lambda data: b"",
            lambda data: data[:-5],
            lambda data: data.replace(b'"m"', b'"n"'),
            lambda data: data.replace(b'"format": 1', b'"format": 2'),
            lambda data: b"\xff" * 100,
            lambda data: b"[" * 50_000,
            lambda data: data + b" " * 70_000,
            lambda data: json.dumps({**json.loads(data), "more": 1}).encode(),
        ],
    )
    def test_a_damaged_file_is_none_and_is_replaced(self, tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
        proofs = Proofs(tmp_path)
        proofs.add(KEY, 0.0)
        (path,) = tmp_path.iterdir()
        data = path.read_bytes()
        assert damage(data) != data
        path.write_bytes(damage(data))
        assert proofs.find(KEY) is None
        assert proofs.add(KEY, 0.0) is None
        assert proofs.find(KEY) is not None
        assert len(list(tmp_path.iterdir())) == 1

    def test_a_link_is_not_followed(self, tmp_path: Path) -> None:
        proofs = Proofs(tmp_path)
        proofs.add(KEY, 0.0)
        (path,) = tmp_path.iterdir()
        os.rename(path, tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
        assert proofs.find(KEY) is None

    def test_a_cache_that_cannot_be_written_is_said_and_changes_nothing(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        bench = Bench(tmp_path / "file" / "below")
        bench.turn_until_over()
        assert bench.told[0] == "passed"
        assert "cannot be remembered: Not a directory" in bench.told[1]
        assert bench.experts.state is State.ON


class TestCounts:
    def test_what_is_selected_in_between_is_left_out_and_never_shown(self) -> None:
        library = Library()
        counts = Counts(library)  # type: ignore[arg-type]
        library.select(hits=3, misses=1)
        counts.stop()
        library.select(hits=100, misses=100)
        assert self.seen(counts) == (3, 1, [4, 0])
        counts.resume()
        assert self.seen(counts) == (3, 1, [4, 0])
        library.select(hits=1, misses=0)
        assert self.seen(counts) == (4, 1, [5, 0])
        counts.stop()
        library.select(hits=7, misses=0)
        counts.resume()
        counts.resume()
        assert self.seen(counts) == (4, 1, [5, 0])

    @staticmethod
    def seen(counts: Counts) -> tuple[int, int, list[int]]:
        (layer,) = counts.layers()
        return layer.hits, layer.misses, counts.by_expert(0).tolist()


class Library:
    """A residency of one layer with two experts."""

    def __init__(self) -> None:
        self.hits = self.misses = 0

    def select(self, hits: int, misses: int) -> None:
        self.hits, self.misses = self.hits + hits, self.misses + misses

    def layers(self) -> list[Layer]:
        return [Layer(0, 0, 2, 1, 1, 1, Mode.PARTIAL, Reason.MANAGED, 0, 1, 1, self.hits, self.misses)]

    def counts(self, index: int) -> np.ndarray[Any, Any]:
        if index:
            raise ResidencyError(Status.INVALID, "no such layer")
        return np.array([self.hits + self.misses, 0], np.uint64)

    def all_counts(self) -> list[np.ndarray[Any, Any]]:
        return [self.counts(0)]


class TestDrivers:
    def test_every_driver_is_named(self, tmp_path: Path) -> None:
        module = tmp_path / "sys/module/nvidia/version"
        module.parent.mkdir(parents=True)
        module.write_text("570.1\n")
        library = tmp_path / "libvulkan_x.so"
        library.write_bytes(b"12345")
        manifests = tmp_path / "etc/vulkan/icd.d"
        manifests.mkdir(parents=True)
        manifest = {"ICD": {"library_path": str(library), "api_version": "1.3"}}
        (manifests / "x.json").write_text(json.dumps(manifest))
        (manifests / "broken.json").write_text("{")
        (manifests / "odd.json").write_text('{"ICD": []}')
        text = drivers.identity(tmp_path, {}, "6.1")
        assert text == f"kernel 6.1; nvidia 570.1; x.json 1.3 5@{library.stat().st_mtime_ns}"
        library.write_bytes(b"123456")
        assert drivers.identity(tmp_path, {}, "6.1") != text

    def test_those_that_the_environment_names_count(self, tmp_path: Path) -> None:
        (tmp_path / "named.json").write_text('{"ICD": {"library_path": "libx.so"}}')
        named = {"VK_ICD_FILENAMES": f"{tmp_path}/named.json:{tmp_path}/none.json"}
        assert drivers.identity(tmp_path, named, "6.1") == "kernel 6.1; named.json"

    def test_a_machine_without_any_has_its_kernel(self, tmp_path: Path) -> None:
        assert drivers.identity(tmp_path, {}) == f"kernel {os.uname().release}"
