"""The supervisor with a child that does what the test wants: dies, hangs, refuses, ends late."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
from prometheus_client import CollectorRegistry

from daemon.config import Config, EngineSection
from daemon.expert_metrics import ExpertCounters
from daemon.messages import Done, RequestEvent, Submit, Tokens
from daemon.model_files import load_command
from daemon.supervisor import Supervisor

DOUBLE = Path(__file__).with_name("engine_double.py")
FAST = EngineSection(restart_delay_seconds=0.05, restart_delay_max_seconds=0.2, hang_seconds=5.0)


class Ear:
    """A listener that remembers, and wakes whoever waits for something to be true."""

    def __init__(self) -> None:
        self.ready = 0
        self.lost: list[str] = []
        self.unlikely: list[str] = []
        self.events: list[RequestEvent] = []
        self.reasons: list[str] = []
        self.counts = ExpertCounters(CollectorRegistry())

    def moves(self) -> float | None:
        """Counted over all engines."""
        return self.counts.registry.get_sample_value("hotset_expert_swaps_total")

    def engine_ready(self) -> None:
        self.ready += 1

    def engine_lost(self, why: str) -> None:
        self.lost.append(why)

    def engine_unlikely(self, why: str) -> None:
        self.unlikely.append(why)

    def deliver(self, event: RequestEvent) -> None:
        self.events.append(event)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - what another process does sets no event here
            await asyncio.sleep(0.01)


@asynccontextmanager
async def supervised(*behaviours: str, settings: EngineSection = FAST) -> AsyncIterator[tuple[Supervisor, Ear]]:
    """One engine after the other behaves as listed; the last behaviour stays."""
    lives = iter(behaviours[:-1])

    def command(fd: int) -> list[str]:
        behaviour = next(lives, behaviours[-1])
        program = "/no/such/program" if behaviour == "cannot start" else sys.executable
        return [program, str(DOUBLE), str(fd), behaviour]

    ear = Ear()
    supervisor = Supervisor(
        lambda: load_command(Config()),
        lambda: settings,
        command=command,
        restarted=ear.reasons.append,
        counts=ear.counts,
    )
    supervisor.listener = ear
    life = asyncio.create_task(supervisor.run())
    try:
        yield supervisor, ear
    finally:
        await supervisor.stop(seconds=1)
        life.cancel()
        await asyncio.gather(life, return_exceptions=True)


async def test_an_engine_gets_ready_and_answers() -> None:
    async with supervised("good") as (supervisor, ear):
        assert supervisor.capacity == 0
        await until(lambda: supervisor.state == "ready")
        assert (supervisor.capacity, supervisor.progress, ear.ready) == (2, 1.0, 1)
        supervisor.send(Submit(id="a", prompt=[1], max_tokens=1))
        await until(lambda: len(ear.events) == 2)
        assert isinstance(ear.events[0], Tokens)
        assert isinstance(ear.events[1], Done)
        pid = supervisor.pid
        assert pid is not None
    assert supervisor.state == "stopped"
    assert not psutil.pid_exists(pid)


async def test_a_killed_engine_is_replaced_and_its_loss_told() -> None:
    async with supervised("good") as (supervisor, ear):
        await until(lambda: supervisor.state == "ready")
        first = supervisor.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await until(lambda: "SIGKILL" in supervisor.reason)
        assert supervisor.state == "restarting"
        assert supervisor.capacity == 0
        await until(lambda: supervisor.state == "ready")
        assert supervisor.pid != first
        assert ear.lost == ["The engine ended: killed by SIGKILL."]
        assert (supervisor.restarts, ear.reasons) == (1, ["signal"])


async def test_what_an_engine_counted_stays_counted_when_it_is_replaced() -> None:
    async with supervised("moves experts") as (supervisor, ear):
        await until(lambda: ear.moves() == 5)
        assert supervisor.pid is not None
        os.kill(supervisor.pid, signal.SIGKILL)
        await until(lambda: supervisor.state == "restarting")
        assert ear.moves() == 5
        await until(lambda: ear.moves() == 10)
        assert supervisor.residency.moves == 5


async def test_a_signal_without_a_name_is_told_by_its_number() -> None:
    async with supervised("good") as (supervisor, ear):
        await until(lambda: supervisor.state == "ready")
        assert supervisor.pid is not None
        os.kill(supervisor.pid, signal.SIGRTMIN + 5)
        await until(lambda: ear.ready == 2)
        assert ear.lost == [f"The engine ended: killed by signal {signal.SIGRTMIN + 5}."]


async def test_an_engine_that_cannot_be_started_is_tried_again() -> None:
    """No memory for a fork, no file descriptor left: both pass."""
    async with supervised("good", "cannot start", "good") as (supervisor, ear):
        await until(lambda: supervisor.state == "ready")
        assert supervisor.pid is not None
        os.kill(supervisor.pid, signal.SIGKILL)
        await until(lambda: ear.ready == 2)
        assert ear.reasons == ["signal", "start"]


async def test_a_hung_engine_is_replaced() -> None:
    quick = FAST.model_copy(update={"hang_seconds": 0.3})
    async with supervised("silent", "good", settings=quick) as (supervisor, ear):
        await until(lambda: bool(ear.lost))
        assert "silent for too long" in ear.lost[0]
        await until(lambda: ear.ready == 2)
        assert (supervisor.state, ear.reasons) == ("ready", ["hang"])


async def test_a_model_that_can_never_load_ends_the_attempts() -> None:
    async with supervised("hopeless") as (supervisor, _):
        await asyncio.wait_for(supervisor.settled.wait(), 20)
        assert (supervisor.state, supervisor.reason) == ("failed", "no such model")
        assert supervisor.restarts == 0


async def test_a_model_that_is_gone_at_a_restart_is_tried_again() -> None:
    async with supervised("good", "hopeless", "good") as (supervisor, ear):
        await until(lambda: supervisor.state == "ready")
        assert supervisor.pid is not None
        os.kill(supervisor.pid, signal.SIGKILL)
        await until(lambda: ear.ready == 2)
        assert ear.reasons == ["signal", "load"]
        assert ear.unlikely == ["The engine cannot be started: no such model."]


async def test_a_crash_while_loading_is_told_and_tried_again() -> None:
    async with supervised("dies loading", "dies loading", "good") as (supervisor, ear):
        await until(lambda: len(ear.lost) == 1)
        assert supervisor.state == "loading"
        assert "SIGABRT" in supervisor.reason
        await until(lambda: supervisor.state == "ready")
        assert supervisor.restarts == 2


async def test_engines_that_die_before_they_are_ready_are_not_waited_for() -> None:
    async with supervised("dies loading", "dies loading", "dies loading", "good") as (supervisor, ear):
        await until(lambda: supervisor.state == "ready")
        assert len(ear.lost) == 3
        assert len(ear.unlikely) == 1


async def test_a_load_that_makes_no_progress_is_given_up() -> None:
    quick = FAST.model_copy(update={"load_hang_seconds": 4.0})
    async with supervised("stuck loading", "good", settings=quick) as (supervisor, ear):
        await until(lambda: supervisor.state == "ready")
        assert ear.reasons == ["hang"]


async def test_a_closed_socket_counts_before_the_process_is_gone() -> None:
    async with supervised("closes", "good") as (supervisor, ear):
        await until(lambda: ear.ready == 1)
        await until(lambda: supervisor.capacity == 0)
        assert ear.lost == [], "the process still runs"
        await until(lambda: ear.ready == 2)


async def test_an_engine_that_will_not_end_is_killed() -> None:
    async with supervised("deaf") as (supervisor, _):
        await until(lambda: supervisor.state == "ready")
        pid = supervisor.pid
        assert pid is not None
    assert not psutil.pid_exists(pid)
