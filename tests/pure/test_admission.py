"""Admission: who runs, who waits, who is told what when the engine dies."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from daemon.admission import Admission, Ticket
from daemon.config import QueueSection
from daemon.errors import ContextLengthExceeded, ModelLoading, QueueFull
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
        self.engine, self.clock, self.limits = FakeEngine(capacity), Clock(), QueueSection(max_waiting=max_waiting)
        self.admission = Admission(self.engine, lambda: self.limits, self.clock)

    @staticmethod
    def made(name: str, **fields: Any) -> Submit:
        return Submit.model_validate({"id": name, "prompt": [1], "max_tokens": 5} | fields)

    def submit(self, name: str, *, replaces: str = "", **fields: Any) -> Ticket:
        return self.admission.submit(self.made(name, **fields), replaces=replaces)

    def limit(self, **limits: int) -> None:
        """Other limits come into force."""
        self.limits = self.limits.model_copy(update=limits)
        self.admission.refresh()

    def finish(self, *names: str, **changes: Any) -> None:
        for name in names:
            self.admission.deliver(done(name, **changes))

    @property
    def started(self) -> list[str]:
        return [command.id for command in self.engine.sent if isinstance(command, Submit)]

    @property
    def cancelled(self) -> list[str]:
        return [command.id for command in self.engine.sent if isinstance(command, Cancel)]


def done(name: str, **changes: Any) -> Done:
    """An answer of five tokens that took two seconds each, and nothing for its prompt."""
    values = {"n_prompt": 1, "n_cached": 0, "n_predicted": 5, "wait_ms": 0, "prompt_ms": 0, "predicted_ms": 10_000}
    return Done.model_validate({"id": name, "finish_reason": "stop"} | values | changes)


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
    scene.finish("a")
    scene.submit("c")
    with pytest.raises(QueueFull, match="1 requests are waiting") as caught:
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


class Again:
    """Makes Submits anew when the test lets it; `prompt` is what they then hold."""

    def __init__(self, name: str, error: Exception | None = None) -> None:
        self.name, self.error, self.n_asked = name, error, 0
        self.may = asyncio.Event()
        self.submit_as: Submit | None = None

    async def __call__(self) -> Submit:
        self.n_asked += 1
        await self.may.wait()
        if self.error is not None:
            raise self.error
        return self.submit_as or Submit(id=self.name, prompt=[2, self.n_asked], max_tokens=9)


def submit_with(scene: Scene, again: Again) -> Ticket:
    return scene.admission.submit(Submit(id=again.name, prompt=[1], max_tokens=5), again=again)


async def settle() -> None:
    """Let every task go on as far as it can."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_while_held_requests_wait_within_bounds_and_none_starts() -> None:
    scene = Scene(capacity=1, max_waiting=2)
    scene.submit("a")
    scene.admission.hold()
    b = scene.submit("b")
    scene.finish("a")
    scene.engine.capacity = 0
    scene.submit("c")
    with pytest.raises(QueueFull):
        scene.submit("d")
    assert (scene.started, b.position) == (["a"], 0)
    scene.engine.capacity = 2
    scene.admission.engine_ready()
    assert scene.started == ["a"], "an engine alone does not end it"
    scene.admission.release()
    assert scene.started == ["a", "b", "c"]


async def test_what_runs_is_waited_for_and_ended_when_its_time_is_up() -> None:
    scene = Scene(capacity=2)
    a, b, c = (scene.submit(name) for name in "abc")
    scene.admission.hold()
    waiting = asyncio.create_task(scene.admission.finish_running(60, "late"))
    scene.finish("a")
    await settle()
    assert not waiting.done()
    scene.finish("b")
    assert await waiting == 0
    assert [await read(ticket) for ticket in (a, b)] == [["done"], ["done"]]
    scene.admission.release()
    assert await scene.admission.finish_running(0, "late") == 1
    assert await anext(c) == Failed(id="c", code="engine_failed", message="late")
    scene.finish("c")
    assert await read(c) == [], "what comes later is nobody's"
    assert await scene.admission.finish_running(0, "late") == 0


async def test_after_another_load_what_waited_is_made_anew_and_what_came_later_is_not() -> None:
    scene = Scene(capacity=2, max_waiting=9)
    scene.admission.hold()
    old = [Again(name) for name in "abc"]
    tickets = [submit_with(scene, again) for again in old]
    scene.admission.renew()
    later = Again("d")
    submit_with(scene, later)
    scene.admission.release()
    await settle()
    assert [again.n_asked for again in old] == [1, 1, 0], "as many as have a place"
    assert [ticket.position for ticket in tickets[:2]] == [0, 0]
    assert scene.admission.statistics().waiting == 4
    old[1].may.set()
    await settle()
    assert scene.started == ["b"], "one that takes long holds up nobody"
    assert [command.prompt for command in scene.engine.sent if isinstance(command, Submit)] == [[2, 1]]
    old[0].may.set()
    old[2].may.set()
    await settle()
    scene.finish("b")
    await settle()
    scene.finish("a")
    assert scene.started == ["b", "a", "c", "d"]
    assert later.n_asked == 0


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [(ContextLengthExceeded(9, 4), "context_length_exceeded", "9 tokens"), (ValueError("?"), "engine_failed", "again")],
)
async def test_what_cannot_be_made_anew_ends_with_the_reason(error: Exception, code: str, message: str) -> None:
    scene = Scene(capacity=1)
    scene.admission.hold()
    a, b, c = Again("a", error), Again("b"), scene.submit("c")
    tickets = [submit_with(scene, again) for again in (a, b)]
    scene.admission.renew()
    scene.admission.release()
    a.may.set()
    b.may.set()
    await settle()
    event = await anext(tickets[0])
    assert isinstance(event, Failed)
    assert event.code == code
    assert message in event.message
    assert [event.kind async for event in c] == ["failed"], "it has nothing to be made from"
    assert scene.started == ["b"]


async def test_giving_up_while_it_is_made_anew_frees_the_place() -> None:
    scene = Scene(capacity=1)
    scene.admission.hold()
    agains = [Again(name) for name in "abc"]
    tickets = [submit_with(scene, again) for again in agains]
    scene.admission.renew()
    scene.admission.release()
    await settle()
    tickets[0].cancel()
    await settle()
    assert scene.admission.cancel("b")
    assert await read(tickets[1]) == ["done"]
    agains[2].may.set()
    await settle()
    assert scene.started == ["c"]
    assert [again.n_asked for again in agains] == [1, 1, 1]


async def test_one_that_is_made_anew_keeps_its_place_when_the_engine_is_lost_and_when_it_is_held_again() -> None:
    scene = Scene(capacity=1)
    scene.admission.hold()
    agains = [Again(name) for name in "ab"]
    for again in agains:
        submit_with(scene, again)
    scene.admission.renew()
    scene.admission.release()
    await settle()
    scene.engine.capacity = 0
    scene.admission.engine_lost("it died")
    agains[0].may.set()
    await settle()
    scene.admission.hold()
    scene.admission.renew()
    scene.engine.capacity = 1
    scene.admission.release()
    agains[1].may.set()
    await settle()
    assert [again.n_asked for again in agains] == [2, 0]
    scene.finish("a")
    await settle()
    assert scene.started == ["a", "b"]


async def test_stopping_ends_what_is_made_anew() -> None:
    scene = Scene(capacity=1)
    scene.admission.hold()
    ticket = submit_with(scene, Again("a"))
    scene.admission.renew()
    scene.admission.release()
    await settle()
    await scene.admission.drain(60)
    assert await read(ticket) == ["failed"]
