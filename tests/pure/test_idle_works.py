"""Several idle works: one at a time, in order, what has begun first; all give way."""

from __future__ import annotations

import os
from pathlib import Path

from daemon.engine.idle import IdleWorks
from daemon.engine.proofs import Proof
from daemon.engine.store import Key, Store


class Work:
    def __init__(self, n_steps: int, log: list[str], name: str) -> None:
        self.left, self.log, self.name = n_steps, log, name
        self.underway, self.stalled = False, False
        self.interrupts = 0

    @property
    def pending(self) -> bool:
        return self.left > 0 and not self.stalled

    def step(self) -> None:
        self.log.append(self.name)
        self.left -= 1
        self.underway = self.left > 0

    def interrupt(self) -> None:
        self.interrupts += 1
        self.underway = False


def test_one_after_the_other() -> None:
    log: list[str] = []
    works = IdleWorks([Work(2, log, "a"), Work(3, log, "b")])
    while works.pending:
        works.step()
        assert works.underway is (len(log) not in (2, 5))
    assert log == ["a", "a", "b", "b", "b"]
    works.step()
    assert len(log) == 5


def test_what_has_begun_goes_on_before_an_earlier_one_that_became_ready() -> None:
    log: list[str] = []
    first, second = Work(1, log, "a"), Work(2, log, "b")
    first.stalled = True
    works = IdleWorks([first, second])
    works.step()
    first.stalled = False
    works.step()
    works.step()
    assert log == ["b", "b", "a"]


def test_nobody_computes_beside_one_that_is_underway_and_waits() -> None:
    log: list[str] = []
    first, second = Work(1, log, "a"), Work(3, log, "b")
    first.stalled = True
    works = IdleWorks([first, second])
    works.step()
    second.stalled, first.stalled = True, False
    assert not works.pending
    works.step()
    assert log == ["b"]
    works.interrupt()
    assert works.pending
    works.step()
    assert log == ["b", "a"]


def test_all_are_interrupted() -> None:
    each = [Work(1, [], "a"), Work(1, [], "b")]
    IdleWorks(each).interrupt()
    assert [work.interrupts for work in each] == [1, 1]
    assert not IdleWorks([]).pending


def test_a_pipe_in_the_cache_is_no_record_and_nobody_waits_for_it(tmp_path: Path) -> None:
    key = Key(build="b", driver="d", device="v", model="m", settings="s")
    store = Store(tmp_path, Proof)
    assert store.add(Proof(key=key, kl=0.0, passed="now")) is None
    (path,) = tmp_path.iterdir()
    path.unlink()
    os.mkfifo(path)
    assert store.find(key) is None
