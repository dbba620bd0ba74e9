"""The residency benchmark without a library: what is kept open within memory, and the rounds of a race."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from hotset_tools.bench.child import WorkerFailed
from hotset_tools.bench.race import ENOUGH_ROUNDS, Race
from hotset_tools.bench.shelf import Place, Shelf
from tests.pure.test_bench_residency import DECODE, EXPERT, N_LAYERS, OURS, PREFILL, SAME, SETTINGS, SIZES, SLOTS


class FakeChild:
    """A worker that takes memory for what is opened, and answers as told."""

    def __init__(self, free: int) -> None:
        self.free, self.said, self.fails, self.ended = free, [], "", False
        self.seconds: list[float] = []
        self.total = 80 * EXPERT

    def ask(self, do: str, **fields: Any) -> dict[str, Any]:
        self.said.append((do, fields.get("context", fields.get("model", ""))))
        if self.fails and self.fails in str(fields):
            raise WorkerFailed("no memory", ended=self.ended)
        held = {
            "load": SIZES.device_bytes,
            "unload": SIZES.device_bytes,
            "open": lambda p: SIZES.slab_bytes(p.slots or ()),
        }
        if do in held:
            self.free -= held[do](self.place) * (-1 if do == "unload" else 1)
        seconds = self.seconds.pop(0) if self.seconds and do == "decode" else 1.0
        return {"free": self.free, "total": self.total, "seconds": seconds, "hits": [1], "misses": [1], "layers": []}

    place = Place("ours", N_LAYERS)


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> FakeChild:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 50))
    return FakeChild(40 * EXPERT)


class TestShelf:
    def shelf(self, child: FakeChild) -> Shelf:
        return Shelf({"ours": child}, {"ours": "Vulkan0"}, SIZES)  # type: ignore[dict-item]

    def test_what_is_open_is_not_opened_again(self, child: FakeChild) -> None:
        shelf = self.shelf(child)
        for _ in range(2):
            shelf.ask(Place("ours", 4), "decode")
        assert [do for do, _ in child.said if do != "memory"] == ["load", "open", "decode", "decode"]

    def test_contexts_share_a_model_and_get_their_experts(self, child: FakeChild) -> None:
        shelf, place = self.shelf(child), Place("ours", 4, SLOTS)
        shelf.open(Place("ours", 4))
        shelf.assign(place, [[0, 1, 2]] * N_LAYERS)
        shelf.open(place)
        assert [do for do, _ in child.said if do != "memory"] == ["load", "open", "open", "place"]

    def test_what_was_used_longest_ago_makes_room(self, child: FakeChild) -> None:
        shelf = self.shelf(child)
        child.place = Place("ours", 2)
        shelf.open(child.place)
        child.place = Place("ours", 1)
        child.free = 20 * EXPERT
        shelf.open(child.place)
        said = [(do, what) for do, what in child.said if do != "memory"]
        assert said[2:4] == [("close", "cpu2:None"), ("unload", "cpu2")]
        assert said[4][0] == "load"

    def test_a_full_device_is_not_one_that_does_not_tell(self, child: FakeChild) -> None:
        shelf = self.shelf(child)
        assert shelf.device_free() == 38 * EXPERT
        shelf.open(Place("ours", 2))
        child.free = 0
        shelf.open(Place("ours", 2, SLOTS))
        assert "close" in {do for do, _ in child.said}

    def test_a_device_that_does_not_tell_closes_nothing(self, child: FakeChild) -> None:
        shelf = self.shelf(child)
        child.total = child.free = 0
        shelf.open(Place("ours", 2))
        shelf.open(Place("ours", 1))
        assert "close" not in {do for do, _ in child.said}


class TestRace:
    def race(self, child: FakeChild) -> tuple[Race, list[str]]:
        notes: list[str] = []
        shelf = Shelf({"ours": child}, {"ours": "Vulkan0"}, SIZES)  # type: ignore[dict-item]
        walks = SimpleNamespace(
            tokens=lambda n, number: [0] * n, steps=lambda n, width, number: [[number] * width for _ in range(n)]
        )
        return Race(shelf, walks, SETTINGS, lambda _: None, notes.append), notes  # type: ignore[arg-type]

    def test_every_arm_runs_in_every_round(self, child: FakeChild) -> None:
        race, _ = self.race(child)
        times = race.rounds(DECODE, [OURS, *SAME], 10, float("inf"))
        assert [len(timed.seconds) for timed in times.values()] == [7, 7, 7]
        assert times[OURS].seconds[0] == 0.1
        assert times[OURS].hits == 7

    def test_rounds_are_cut_short_aloud(self, child: FakeChild) -> None:
        race, notes = self.race(child)
        times = race.rounds(DECODE, [OURS, SAME[0]], 10, 0.0)
        assert len(times[OURS].seconds) == ENOUGH_ROUNDS
        assert notes == ["decode of 1: 3 rounds only, the time is over"]

    def test_one_slow_try_drops_no_arm(self, child: FakeChild) -> None:
        """Six steps right after another arm's are slow now and then, by more than arms differ."""
        race, _ = self.race(child)
        child.seconds = [9.0, 6.0, 6.0, 12.0, 12.0, 12.0]
        assert race.scout(DECODE, SAME) == {SAME[0]: 1.0}

    def test_an_arm_that_cannot_be_opened_leaves_the_race(self, child: FakeChild) -> None:
        race, notes = self.race(child)
        child.fails = "cpu2"
        assert list(race.scout(DECODE, [OURS, *SAME])) == [OURS]
        assert len(notes) == 2
        assert "no memory" in notes[0]

    def test_a_worker_that_ended_ends_the_race(self, child: FakeChild) -> None:
        race, _ = self.race(child)
        child.fails, child.ended = "cpu2", True
        with pytest.raises(WorkerFailed):
            race.scout(DECODE, [OURS, *SAME])

    def test_time_decides_the_steps(self, child: FakeChild) -> None:
        race, _ = self.race(child)
        speeds = {OURS: 0.05, SAME[0]: 0.05}
        assert race.n_steps(DECODE, speeds, 14.0) == 20 - 3
        assert race.n_steps(DECODE, speeds, 1.0) == 8
        assert race.n_steps(DECODE, speeds, 1e6) == 64
        race._settings = replace(SETTINGS, steps=20)
        assert race.n_steps(DECODE, speeds, 1.0) == 20
        assert race.n_steps(PREFILL, speeds, 1e6) == 1
