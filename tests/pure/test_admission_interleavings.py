"""Admission under random interleavings: one end for each ticket, nothing lost, nothing twice, limits hold."""

from __future__ import annotations

import asyncio
import math
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.admission import Admission
from daemon.config import QueueSection
from daemon.errors import EngineFailed, ModelLoading, QueueFull
from daemon.fair_queue import CLASSES
from daemon.messages import Cancel, Done, Failed, Submit, Tokens
from daemon.ticket import Ticket
from tests.pure.test_admission import Clock, done, settle, tokens


class Engine:
    """Keeps what it was given until the test ends it; checks each start against the limits of that moment."""

    def __init__(self, world: World, capacity: int) -> None:
        self.world, self.full, self.capacity, self.retry_after = world, capacity, capacity, 3
        self.has: dict[str, Submit] = {}
        self.told_to_cancel: list[str] = []
        self.got: list[str] = []

    def send(self, command: Submit | Cancel) -> None:
        assert self.capacity, "nothing is sent while no engine is ready"
        if isinstance(command, Cancel):
            self.told_to_cancel.append(command.id)
            return
        assert command.id not in self.got, "sent twice"
        self._check_place(command)
        self.world.check_client(command, list(self.has.values()))
        self.got.append(command.id)
        self.has[command.id] = command

    def _check_place(self, new: Submit) -> None:
        beside = sum(one.priority != "background" for one in self.has.values())
        assert len(self.has) < self.capacity or (new.priority != "background" and beside < self.capacity)


class World:
    """Admission with an engine, and what the test knows of every ticket."""

    def __init__(self, capacity: int) -> None:
        self.engine, self.clock, self.limits = Engine(self, capacity), Clock(), QueueSection(max_waiting=4)
        self.admission = Admission(self.engine, lambda: self.limits, self.clock)
        self.tickets: list[Ticket] = []
        self.left: set[str] = set()
        self.held = False
        self.n_refused = 0

    def check_client(self, new: Submit, running: list[Submit]) -> None:
        mine = [one for one in running if one.client == new.client]
        assert not self.limits.client_running or len(mine) < self.limits.client_running
        # No answer of these is longer than its max_tokens, and the first guess is longer than all of them.
        n_tokens = sum(len(one.prompt) + one.max_tokens for one in (*mine, new))
        assert not self.limits.client_tokens or not mine or n_tokens <= self.limits.client_tokens

    # -- moves

    def submit(self, detail: tuple[str, Any, int, str]) -> None:
        client, priority, size, replaces = detail
        submit = Submit(id=f"r{len(self.tickets) + self.n_refused}", prompt=[1] * size, max_tokens=3)
        submit = submit.model_copy(update={"client": client, "priority": priority})

        async def again() -> Submit:
            await asyncio.sleep(0)
            if size % 5 == 0:
                raise EngineFailed("not for this model")
            return submit.model_copy(update={"prompt": [2] * size})

        before = self.queued()
        try:
            ticket = self.admission.submit(submit, again=again, replaces=replaces)
        except (QueueFull, ModelLoading) as error:
            self.n_refused += 1
            self.check_refusal(error)
            assert self.queued() == before
            return
        self.tickets.append(ticket)
        if ticket in self.waiting():
            self.check_room(submit)

    def check_refusal(self, error: QueueFull | ModelLoading) -> None:
        assert isinstance(error.retry_after, int)
        assert error.retry_after >= 1
        assert isinstance(error, QueueFull) or not (self.engine.capacity or self.held)

    def check_room(self, new: Submit) -> None:
        queued = [self.ticket(name).submit for name in self.queued()]
        assert len(queued) <= self.limits.max_waiting
        mine = sum(one.client == new.client for one in queued)
        assert not self.limits.client_waiting or mine <= self.limits.client_waiting
        if new.priority == "background":
            n = sum(one.priority == "background" for one in queued)
            assert n <= math.ceil(0.75 * self.limits.max_waiting)

    def end(self, number: int, *, fail: bool = False) -> None:
        if self.engine.has:
            name = list(self.engine.has)[number % len(self.engine.has)]
            del self.engine.has[name]
            failed = Failed(id=name, code="engine_failed", message="?")
            self.admission.deliver(failed if fail else done(name, n_predicted=3))

    def obey(self) -> None:
        """The engine gives up what it was told to, and says so."""
        for name in self.engine.told_to_cancel:
            if self.engine.has.pop(name, None) is not None:
                self.admission.deliver(done(name, finish_reason="cancelled", n_predicted=0))
        self.engine.told_to_cancel.clear()

    def speak(self, number: int) -> None:
        if self.engine.has:
            name = list(self.engine.has)[number % len(self.engine.has)]
            self.admission.deliver(tokens(name, "x"))

    def cancel(self, number: int) -> None:
        if self.tickets:
            ticket = self.tickets[number % len(self.tickets)]
            was_over, waited = ticket.over, ticket.position is not None
            assert self.admission.cancel(ticket.id) != was_over
            assert ticket.over == (was_over or waited), "the engine says when one that runs has ended"

    def leave(self, number: int) -> None:
        if self.tickets:
            ticket = self.tickets[number % len(self.tickets)]
            self.left.add(ticket.id)
            ticket.cancel()

    def lose(self) -> None:
        self.engine.capacity = 0
        self.engine.has.clear()
        self.engine.told_to_cancel.clear()
        self.admission.engine_lost("it died")

    def come_back(self) -> None:
        self.engine.capacity = self.engine.full
        self.admission.engine_ready()

    def hold(self) -> None:
        self.held = True
        self.admission.hold()

    def release(self, renew: bool) -> None:
        if renew and self.engine.has:
            return  # what runs has ended before another load is served
        if renew:
            self.admission.renew()
        self.held = False
        self.admission.release()

    def limit(self, limits: tuple[int, int, int, int]) -> None:
        names = ("max_waiting", "client_waiting", "client_running", "client_tokens")
        before = self.waiting() | set(self.tickets)
        self.limits = QueueSection(**dict(zip(names, limits, strict=True)))
        ends = {ticket.id for ticket in before if ticket.over}
        self.admission.refresh()
        assert {ticket.id for ticket in before if ticket.over} == ends, "other limits end nothing"

    # -- what is known

    def ticket(self, name: str) -> Ticket:
        return next(ticket for ticket in self.tickets if ticket.id == name)

    def waiting(self) -> set[Ticket]:
        return {ticket for ticket in self.tickets if ticket.position is not None}

    def queued(self) -> list[str]:
        """Without those that are made anew, which have a place."""
        anew = {ticket.id for ticket in self.admission._anew}
        return [one.id for one in self.admission.waiting() if one.id not in anew]

    def check(self) -> None:
        statistics, queue = self.admission.statistics(), self.admission.waiting()
        assert statistics.running == len(self.engine.has)
        assert sum(statistics.waiting_in.values()) == statistics.waiting == len(queue)
        live = {ticket.id for ticket in self.tickets if not ticket.over}
        assert live == {one.id for one in queue} | set(self.engine.has), "nothing is lost"
        n_anew = len(self.admission._anew)
        limits = self.limits
        free = not self.held and statistics.running + n_anew < self.engine.capacity
        if free and not (limits.client_running or limits.client_tokens):
            assert not self.queued(), "a place stays empty although somebody waits"
        for client in "abc":
            newest = [t for t in self.tickets if t.submit.client == client and t.replaces and not t.over]
            kept = [t for t in newest if t.id not in self.engine.told_to_cancel and t.id not in self.left]
            assert len(kept) <= 1, "only the newest counts"

    async def finish(self) -> None:
        """Everything ends that is left."""
        self.limit((100, 0, 0, 0))
        self.come_back()
        self.release(renew=False)
        for _ in range(10 * len(self.tickets) + 10):
            await settle()
            self.obey()
            self.end(0)
        assert all(ticket.over for ticket in self.tickets)
        assert self.admission.statistics().running == self.admission.statistics().waiting == 0
        for ticket in self.tickets:
            ends = [event async for event in ticket if not isinstance(event, Tokens)]
            assert len(ends) == (ticket.id not in self.left), "exactly one end for each reader that stayed"
            if ends and isinstance(ends[0], Done) and ends[0].finish_reason == "stop":
                assert ticket.id in self.engine.got
        await asyncio.wait_for(self.admission.drain(60), 1)
        probes = [Submit(id=f"probe{number}", prompt=[1], max_tokens=1) for number in range(self.engine.full)]
        self.admission._closing = False
        for probe in probes:
            self.admission.submit(probe)
        assert [probe.id for probe in probes] == list(self.engine.has), "every place is free again"


NUMBERS = st.integers(0, 40)
SUBMITS = st.tuples(
    st.sampled_from("abc"), st.sampled_from(CLASSES), st.integers(1, 12), st.sampled_from(["", "", "k"])
)
LIMITS = st.tuples(st.integers(0, 6), st.integers(0, 3), st.integers(0, 3), st.sampled_from([0, 5, 15, 40]))
MOVES = st.one_of(
    st.tuples(st.just("submit"), SUBMITS),
    st.tuples(st.just("submit"), SUBMITS),
    st.tuples(st.just("end"), NUMBERS),
    st.tuples(st.just("fail"), NUMBERS),
    st.tuples(st.just("speak"), NUMBERS),
    st.tuples(st.just("cancel"), NUMBERS),
    st.tuples(st.just("leave"), NUMBERS),
    st.tuples(st.just("limit"), LIMITS),
    st.tuples(st.just("release"), st.booleans()),
    st.tuples(st.sampled_from(["obey", "lose", "come_back", "hold", "settle", "wait"]), st.none()),
)


async def play(capacity: int, moves: list[tuple[str, Any]]) -> None:
    world = World(capacity)
    for move, detail in moves:
        if move == "settle":
            await settle()
        elif move == "wait":
            world.clock.now += 1.5
        elif move == "fail":
            world.end(detail, fail=True)
        elif detail is None:
            getattr(world, move)()
        else:
            getattr(world, move)(detail)
        world.check()
    await world.finish()


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 3), st.lists(MOVES, max_size=60))
def test_each_ticket_ends_once_and_limits_hold(capacity: int, moves: list[tuple[str, Any]]) -> None:
    asyncio.run(play(capacity, moves))
