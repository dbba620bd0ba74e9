"""The thread that moves experts: what it is told while it may not, and what is left when it ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import numpy as np
import pytest

from daemon.engine.mover import Mover
from daemon.hotset.controller import Controller
from daemon.native.hotset import Residency, ResidencyError, Status
from tests.residency_fakes import MIB, FakeResidency, layer


@contextmanager
def moving(residency: FakeResidency, **seeds: list[int]) -> Iterator[Mover]:
    controller = Controller([8, 8], [MIB, MIB], bytes_per_second=1e12)
    mover = Mover(cast(Residency, residency), controller, {int(key[1:]): experts for key, experts in seeds.items()})
    mover.start()
    yield mover
    mover.stop(lambda: None)


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def done(mover: Mover) -> None:
    """Everything that was posted before."""
    passed = threading.Event()
    mover.post(passed.set)
    assert passed.wait(10)


def test_orders_do_not_wait_until_every_seed_has_come() -> None:
    residency = FakeResidency(layer(0), layer(1))
    seen: list[int] = []
    posted, stage = threading.Event(), residency.stage

    def while_staging(index: int, expert: int, slot: int) -> None:
        assert posted.wait(10)
        stage(index, expert, slot)

    residency.stage = while_staging  # type: ignore[method-assign]
    with moving(residency, l0=[1, 2, 3], l1=[4, 5]) as mover:
        until(lambda: mover._inbox.empty() and mover.running)
        mover.post(lambda: seen.append(len(residency.staged)))
        posted.set()
        until(lambda: mover.seeded)
    assert seen[0] in (0, 3), "before the first layer or behind it"
    assert len(residency.staged) == 5


CHOSEN = np.tile(np.array([4, 6], np.int32), (1, 2, 1))


def test_nothing_moves_while_the_placement_is_held_whatever_else_is_said() -> None:
    residency = FakeResidency(layer(0), layer(1))
    with moving(residency) as mover:
        mover.hold()
        until(lambda: mover.held)
        mover.pause(False)
        mover.observe(CHOSEN, 1)
        done(mover), done(mover)
        assert residency.staged == []
        mover.release((), paused=True)
        done(mover), done(mover)
        assert residency.staged == []
        mover.pause(False)
        until(lambda: len(residency.staged) == 4)


@pytest.mark.parametrize("error", [ResidencyError(Status.FAILED, "the device is gone"), ValueError("no such layer")])
def test_whatever_ends_it_is_a_fault_and_nothing_piles_up(error: Exception, capfd: pytest.CaptureFixture[str]) -> None:
    residency = FakeResidency(layer(0), layer(1))
    residency.refuse_resize = error
    with moving(residency) as mover:
        mover.post(lambda: mover.resize([2, 2]))
        until(lambda: not mover.running)
        assert str(error) in mover.fault
        for _ in range(100):
            mover.observe(CHOSEN, 1)
            mover.post(lambda: None)
        assert mover._inbox.empty()
    assert ("Traceback" in capfd.readouterr().err) is isinstance(error, ValueError)


def test_orders_that_came_before_its_end_do_not_stay_either() -> None:
    residency = FakeResidency(layer(0), layer(1))
    residency.refuse_resize = ResidencyError(Status.FAILED, "the device is gone")
    with moving(residency) as mover:
        posted = threading.Event()
        mover.post(lambda: posted.wait(10) and mover.resize([2, 2]))
        for _ in range(100):
            mover.observe(CHOSEN, 1)
        posted.set()
        until(lambda: not mover.running)
        assert mover._inbox.empty()
