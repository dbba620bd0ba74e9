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
from daemon.messages import Done, Load, Record, Recorded, RequestEvent, Submit, Tokens
from daemon.model_files import load_command
from daemon.replacement import Replacement
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


class Recordings:
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.parts: list[Recorded] = []
        self.lost: list[str] = []

    def deliver(self, part: Recorded) -> None:
        self.parts.append(part)

    def engine_lost(self, why: str) -> None:
        self.lost.append(why)


async def test_who_records_is_told_what_comes_and_the_end_of_the_engine() -> None:
    async with supervised("good") as (supervisor, _):
        await until(lambda: supervisor.state == "ready")
        recordings = supervisor.recordings = Recordings()
        supervisor.send(Record(number=3))
        await until(lambda: bool(recordings.parts))
        assert (recordings.parts, recordings.lost) == ([Recorded(number=3)], [])
        assert supervisor.pid is not None
        os.kill(supervisor.pid, signal.SIGKILL)
        await until(lambda: bool(recordings.lost))
        assert recordings.lost == ["killed by SIGKILL"]


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


NEW = load_command(Config()).model_copy(update={"context": 7})
OLD_CONTEXT = 0


class Order:
    """An order to replace the engine; `told` is what `settled` was told, with the engine and the ear of that moment."""

    def __init__(self, supervisor: Supervisor, ear: Ear, load: Load = NEW) -> None:
        self.told: list[tuple[bool, int, int]] = []
        self._supervisor, self._ear = supervisor, ear
        self.replacement = Replacement(load, self._settled)

    def _settled(self, good: bool) -> None:
        assert self._supervisor.info is not None
        self.told.append((good, self._supervisor.info.n_ctx, self._ear.ready))

    async def __call__(self) -> str:
        async with asyncio.timeout(20):
            await self._supervisor.replace(self.replacement)
            return await self.replacement.outcome


@asynccontextmanager
async def ordered(*behaviours: str, settings: EngineSection = FAST) -> AsyncIterator[tuple[Supervisor, Ear, Order]]:
    """A good engine that is ready, and an order; the next engines behave as listed."""
    async with supervised("good", *behaviours, settings=settings) as (supervisor, ear):
        await until(lambda: supervisor.state == "ready")
        yield supervisor, ear, Order(supervisor, ear)


async def test_an_order_replaces_the_engine_and_says_so_before_anybody_hears_of_it() -> None:
    slow = FAST.model_copy(update={"restart_delay_seconds": 600.0, "restart_delay_max_seconds": 600.0})
    async with ordered("good", settings=slow) as (supervisor, ear, order):
        first = supervisor.pid
        assert await order() == ""
        assert order.told == [(True, 7, 1)]
        assert (supervisor.state, supervisor.capacity, ear.ready) == ("ready", 2, 2)
        assert supervisor.pid != first
        assert (ear.reasons, ear.unlikely) == (["reload"], [])


async def test_a_later_engine_loads_what_the_supervisor_is_told_then() -> None:
    """The order is over: what is in force decides."""
    async with ordered("good") as (supervisor, ear, order):
        assert await order() == ""
        assert supervisor.pid is not None
        os.kill(supervisor.pid, signal.SIGKILL)
        await until(lambda: ear.ready == 3)
        assert supervisor.info is not None
        assert supervisor.info.n_ctx == OLD_CONTEXT


async def test_a_load_that_is_refused_brings_back_the_engine_of_before() -> None:
    async with ordered("hopeless", "good") as (supervisor, ear, order):
        assert await order() == "no such model"
        assert order.told == [(False, OLD_CONTEXT, 1)]
        assert (supervisor.state, supervisor.capacity) == ("ready", 2)
        assert (ear.reasons, ear.unlikely) == (["reload", "load"], [])


async def test_a_new_engine_that_dies_is_tried_again() -> None:
    async with ordered("dies loading", "cannot start", "good") as (_, ear, order):
        assert await order() == ""
        assert order.told == [(True, 7, 1)]
        assert (ear.reasons, ear.unlikely) == (["reload", "signal", "start"], [])


async def test_a_new_engine_that_dies_always_brings_back_the_one_of_before() -> None:
    async with ordered("dies loading", "dies loading", "dies loading", "good") as (supervisor, ear, order):
        assert "SIGABRT" in await order()
        assert order.told == [(False, OLD_CONTEXT, 1)]
        assert (supervisor.state, ear.unlikely) == ("ready", [])


async def test_when_neither_can_be_loaded_it_is_said_and_the_attempts_go_on() -> None:
    async with ordered("hopeless", "hopeless", "good") as (supervisor, ear, order):
        why = await order()
        assert why == "no such model; and the engine of before cannot be started again: no such model"
        assert order.told == [(False, OLD_CONTEXT, 1)]
        assert ear.unlikely == ["The engine cannot be started: no such model."]
        await until(lambda: ear.ready == 2)
        assert supervisor.state == "ready"


async def test_an_order_in_the_delay_before_a_restart_does_not_wait_for_its_end() -> None:
    slow = FAST.model_copy(update={"restart_delay_seconds": 600.0, "restart_delay_max_seconds": 600.0})
    async with ordered("good", settings=slow) as (supervisor, ear, order):
        assert supervisor.pid is not None
        os.kill(supervisor.pid, signal.SIGKILL)
        await until(lambda: supervisor.pid is None and bool(ear.reasons))
        assert await order() == ""
        assert (order.told, ear.reasons) == ([(True, 7, 1)], ["signal"])


async def test_an_order_while_an_engine_starts_ends_that_one() -> None:
    async with supervised("good", "slow loading", "good") as (supervisor, ear):
        await until(lambda: supervisor.state == "ready")
        assert supervisor.pid is not None
        os.kill(supervisor.pid, signal.SIGKILL)
        await until(lambda: supervisor.progress == 0.5)
        order = Order(supervisor, ear)
        assert await order() == ""
        assert (order.told, ear.reasons) == ([(True, 7, 1)], ["signal", "reload"])


async def test_an_engine_that_will_not_end_is_killed_by_an_order() -> None:
    async with supervised("deaf", "good") as (supervisor, ear):
        await until(lambda: supervisor.state == "ready")
        order = Order(supervisor, ear)
        await supervisor.replace(order.replacement, seconds=0.2)
        async with asyncio.timeout(20):
            assert await order.replacement.outcome == ""


async def test_the_service_can_be_stopped_while_a_new_engine_loads() -> None:
    async with ordered("stuck loading") as (supervisor, _, order):
        under_way = asyncio.create_task(order())
        await until(lambda: supervisor.progress == 0.5)
        pid = supervisor.pid
        assert pid is not None
        under_way.cancel()
        await supervisor.stop(seconds=0.2)
        assert not psutil.pid_exists(pid)
        assert order.told == []
