"""Admission: who runs, who waits, who is told what when the engine dies."""

from __future__ import annotations

import asyncio

import pytest

from daemon.admission import Admission, Ticket
from daemon.errors import ModelLoading, QueueFull
from daemon.messages import Cancel, Done, Failed, Submit, Tokens


class FakeEngine:
    """Counts what it is told; `capacity` 0 is "not ready"."""

    def __init__(self, capacity: int = 2) -> None:
        self.capacity = capacity
        self.retry_after = 7
        self.sent: list[Submit | Cancel] = []

    def send(self, command: Submit | Cancel) -> None:
        assert self.capacity, "nothing is sent while no engine is ready"
        self.sent.append(command)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Scene:
    def __init__(self, capacity: int = 2, max_waiting: int = 3) -> None:
        self.engine, self.clock, self.max_waiting = FakeEngine(capacity), Clock(), max_waiting
        self.admission = Admission(self.engine, lambda: self.max_waiting, self.clock)

    def submit(self, name: str) -> Ticket:
        return self.admission.submit(Submit(id=name, prompt=[1], max_tokens=5))

    def finish(self, name: str) -> None:
        self.admission.deliver(done(name))

    @property
    def started(self) -> list[str]:
        return [command.id for command in self.engine.sent if isinstance(command, Submit)]

    @property
    def cancelled(self) -> list[str]:
        return [command.id for command in self.engine.sent if isinstance(command, Cancel)]


def done(name: str) -> Done:
    return Done(
        id=name, finish_reason="stop", n_prompt=1, n_cached=0, n_predicted=1, wait_ms=0, prompt_ms=0, predicted_ms=0
    )


def tokens(name: str, text: str) -> Tokens:
    return Tokens(id=name, tokens=[1], text=text)


async def read(ticket: Ticket) -> list[str]:
    return [event.kind if not isinstance(event, Tokens) else event.text async for event in ticket]


async def test_first_come_first_served_and_the_end_of_one_starts_the_next() -> None:
    scene = Scene()
    tickets = {name: scene.submit(name) for name in "abcd"}
    assert scene.started == ["a", "b"]
    assert [tickets[name].position for name in "abcd"] == [None, None, 0, 1]
    scene.finish("b")
    assert scene.started == ["a", "b", "c"]
    assert tickets["d"].position == 0
    assert scene.admission.statistics().running == 2
    assert scene.admission.statistics().waiting == 1


async def test_a_ticket_gives_its_own_events_in_order_and_ends() -> None:
    scene = Scene()
    a, b = scene.submit("a"), scene.submit("b")
    reader = asyncio.create_task(read(a))
    await asyncio.sleep(0)
    for event in (tokens("a", "x"), tokens("b", "other"), tokens("a", "y"), done("a"), tokens("a", "late")):
        scene.admission.deliver(event)
    assert await reader == ["x", "y", "done"]
    scene.finish("b")
    assert await read(b) == ["other", "done"]
    assert await read(b) == [], "an ended ticket stays ended"


async def test_a_full_queue_is_told_when_to_come_back() -> None:
    scene = Scene(capacity=1, max_waiting=1)
    scene.submit("a")
    scene.submit("b")
    scene.clock.now += 10
    scene.finish("a")
    scene.submit("c")
    with pytest.raises(QueueFull) as caught:
        scene.submit("d")
    assert caught.value.retry_after == 10


async def test_no_queue_at_all_still_serves_what_fits() -> None:
    scene = Scene(capacity=1, max_waiting=0)
    scene.submit("a")
    with pytest.raises(QueueFull):
        scene.submit("b")
    scene.finish("a")
    scene.submit("c")
    assert scene.started == ["a", "c"]


async def test_while_no_engine_is_ready_new_requests_are_refused() -> None:
    scene = Scene(capacity=0)
    with pytest.raises(ModelLoading) as caught:
        scene.submit("a")
    assert caught.value.retry_after == 7


async def test_a_lost_engine_fails_what_ran_and_keeps_what_waits() -> None:
    scene = Scene(capacity=2)
    tickets = [scene.submit(name) for name in "abcd"]
    scene.engine.capacity = 0
    scene.admission.engine_lost("it was killed")
    for ticket in tickets[:2]:
        event = await anext(ticket)
        assert isinstance(event, Failed)
        assert (event.code, event.message) == ("engine_failed", "it was killed")
    assert scene.started == ["a", "b"]
    scene.engine.capacity = 2
    scene.admission.engine_ready()
    assert scene.started == ["a", "b", "c", "d"]


async def test_nobody_is_left_waiting_for_an_engine_that_will_not_come() -> None:
    scene = Scene(capacity=1)
    scene.submit("a")
    b = scene.submit("b")
    scene.engine.capacity = 0
    scene.admission.engine_lost("it died")
    scene.admission.engine_unlikely("the model is gone")
    event = await anext(b)
    assert isinstance(event, Failed)
    assert event.message == "the model is gone"
    assert scene.admission.statistics().waiting == 0


async def test_leaving_while_waiting_frees_the_place() -> None:
    scene = Scene(capacity=1, max_waiting=1)
    scene.submit("a")
    b = scene.submit("b")
    b.cancel()
    b.cancel()
    assert await read(b) == []
    c = scene.submit("c")
    scene.finish("a")
    assert scene.started == ["a", "c"]
    assert c.position is None


async def test_leaving_while_running_tells_the_engine_and_the_place_is_taken_when_it_answers() -> None:
    scene = Scene(capacity=1)
    a, b = scene.submit("a"), scene.submit("b")
    reader = asyncio.create_task(read(a))
    await asyncio.sleep(0)
    a.cancel()
    assert await reader == []
    assert scene.cancelled == ["a"]
    assert scene.started == ["a"], "the engine still works on it"
    scene.finish("a")
    assert scene.started == ["a", "b"]
    assert b.position is None


async def test_leaving_between_engines_needs_no_engine() -> None:
    scene = Scene(capacity=1)
    a = scene.submit("a")
    scene.engine.capacity = 0
    a.cancel()
    scene.admission.engine_lost("gone")
    assert await read(a) == []


async def test_cancelling_by_id() -> None:
    scene = Scene(capacity=1)
    scene.submit("a")
    b = scene.submit("b")
    assert scene.admission.cancel("a")
    assert scene.cancelled == ["a"]
    assert scene.admission.cancel("b")
    assert await read(b) == ["done"]
    assert not scene.admission.cancel("nobody")
    scene.finish("a")
    assert not scene.admission.cancel("a")


async def test_draining_fails_what_waits_and_lets_what_runs_finish() -> None:
    scene = Scene(capacity=1)
    a, b = scene.submit("a"), scene.submit("b")
    drain = asyncio.create_task(scene.admission.drain(60))
    assert await read(b) == ["failed"]
    with pytest.raises(ModelLoading):
        scene.submit("c")
    scene.finish("a")
    await drain
    assert await read(a) == ["done"]


async def test_draining_ends_when_its_time_is_up() -> None:
    scene = Scene(capacity=1)
    a = scene.submit("a")
    await scene.admission.drain(0)
    assert await read(a) == ["failed"]
