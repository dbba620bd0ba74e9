"""Who runs and who waits: a bounded queue in front of the engine, and one ticket for each answer.

The order is that of `daemon.fair_queue`. An answer starts when `daemon.places` has a place for it. What the engine has
parked counts as running.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import structlog

from daemon.errors import EngineFailed, HotsetError, ModelLoading, QueueFull
from daemon.fair_queue import CLASSES, Entry, FairQueue
from daemon.messages import Cancel, Done, Failed, Priority, RequestEvent, Submit, Tokens
from daemon.places import Places
from daemon.queue_limits import Limits, Refusal, refusal
from daemon.service_times import ServiceTimes
from daemon.ticket import Again, Ticket

log = structlog.get_logger("hotset.admission")


class EnginePort(Protocol):
    """What admission needs from the supervisor."""

    @property
    def capacity(self) -> int:
        """Sequences that may run together; 0 while no engine is ready."""

    @property
    def retry_after(self) -> int:
        """Seconds until an engine is likely to be ready."""

    def send(self, command: Submit | Cancel) -> None:
        """Hand a command to the engine; only while `capacity` is above 0."""


@dataclass(frozen=True, slots=True)
class AdmissionStatistics:
    """How full it is; `waiting_in` has the number of each class."""

    running: int
    waiting: int
    max_waiting: int
    waiting_in: dict[Priority, int]


@dataclass(frozen=True, slots=True)
class Waiting:
    """One that waits; `position` from 0, `seconds` since it came."""

    id: str
    position: int
    priority: Priority
    client: str
    seconds: float


class Admission:
    """Decides who goes to the engine, and when. `limits` tells those that are in force now."""

    def __init__(
        self, engine: EnginePort, limits: Callable[[], Limits], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine, self._limits, self._clock = engine, limits, clock
        self._queue: FairQueue[Ticket] = FairQueue()
        self._anew: dict[Ticket, asyncio.Task[None]] = {}
        self._running: dict[str, Ticket] = {}
        self._live: dict[str, Ticket] = {}
        self._newest: dict[tuple[str, str], Ticket] = {}
        self._places, self._times = Places(), ServiceTimes()
        self._n_tickets = 0
        self._closing = self._held = False
        self.load = 0
        """Which load the requests are made for that are submitted now."""
        self._idle, self._none_runs = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._none_runs.set()

    def submit(self, submit: Submit, *, again: Again | None = None, replaces: str = "") -> Ticket:
        """Run it, or let it wait.

        `again` makes it anew when another load takes the place of the one it was made for. A `replaces` that is not
        empty ends the one of the same client that was submitted with the same text before, if that is not over.

        Raises:
            ModelLoading: no engine is ready to take it or to be waited for, or the service is about to stop.
            QueueFull, ClientQueueFull: as many wait as may.
        """
        if self._closing or not (self._engine.capacity or self._held):
            raise ModelLoading("The model is not ready.", retry_after=self._engine.retry_after)
        ticket = self._new_ticket(submit, again, replaces)
        older = self._newest.get((submit.client, replaces)) if replaces else None
        self._queue.push(self._entry(ticket))
        self._pump()
        if ticket in self._queue and (why := self._refusal(ticket, older)) is not None:
            error = self._queue_full(why)
            self._queue.remove(ticket)
            raise error
        self._idle.clear()
        self._live[ticket.id] = ticket
        if replaces:
            self._newest[submit.client, replaces] = ticket
        if older is not None:
            log.debug("a newer request takes its place", id=older.id, newer=ticket.id)
            self._give_up(older)
        return ticket

    def cancel(self, request_id: str) -> bool:
        """Cancel by id on behalf of someone else than its reader, who gets a `Done`; False: no such request."""
        ticket = self._live.get(request_id)
        if ticket is not None:
            self._give_up(ticket)
        return ticket is not None

    def withdraw(self, ticket: Ticket) -> None:
        """Its reader is gone: forget it if it waits, tell the engine if it runs."""
        if not ticket.over:
            self._give_up(ticket)

    def position(self, ticket: Ticket) -> int | None:
        """0-based place in the queue; None once it runs or is over."""
        return 0 if ticket in self._anew else self._queue.position(ticket)

    @property
    def closing(self) -> bool:
        """Whether nothing more is taken, because the service is about to stop."""
        return self._closing

    def statistics(self) -> AdmissionStatistics:
        """A picture of this moment."""
        anew = Counter(ticket.submit.priority for ticket in self._anew)
        waiting = {priority: self._queue.count(priority) + anew[priority] for priority in CLASSES}
        return AdmissionStatistics(len(self._running), sum(waiting.values()), self._limits().max_waiting, waiting)

    def waiting(self) -> list[Waiting]:
        """All that wait, those that are next first."""
        now = self._clock()
        return [
            Waiting(one.id, one.position or 0, one.submit.priority, one.submit.client, now - one.arrived)
            for one in (*self._anew, *self._queue.order())
        ]

    def refresh(self) -> None:
        """Limits may be others now: start what they let start. One that is lower ends nothing."""
        self._pump()

    # -- called while one load takes the place of another

    def hold(self) -> None:
        """Start nothing until `release`, but take new requests, whether there is an engine or not."""
        self._held = True

    async def finish_running(self, seconds: float, why: str) -> int:
        """Give what runs up to `seconds` to finish; returns how many had to be ended, with `why`."""
        try:
            async with asyncio.timeout(seconds):
                await self._none_runs.wait()
        except TimeoutError:
            n_late = len(self._running)
            self.engine_lost(why)
            return n_late
        return 0

    def renew(self) -> None:
        """Another load: what waits now was made for the one before, and is made anew before it starts."""
        self.load += 1

    def release(self) -> None:
        """Go on as before `hold`."""
        self._held = False
        self._pump()

    # -- called by the supervisor

    def engine_ready(self) -> None:
        """An engine takes commands: start what waits."""
        self._pump()

    def engine_lost(self, why: str) -> None:
        """The engine is gone and with it everything that ran; what waits goes on waiting."""
        lost, self._running = list(self._running.values()), {}
        self._none_runs.set()
        for ticket in lost:
            self._places.leave(ticket.submit, ticket.cost)
            self._end(ticket, Failed(id=ticket.id, code=EngineFailed.code, message=why))

    def engine_unlikely(self, why: str) -> None:
        """No engine is to be expected soon: who waits is told instead of kept."""
        self._fail_waiting(why)

    def deliver(self, event: RequestEvent) -> None:
        """Hand an event of the engine to its reader; the end of one answer starts the next."""
        ticket = self._running.get(event.id)
        if ticket is None:
            return
        if isinstance(event, Tokens):
            ticket.push(event)
            return
        del self._running[event.id]
        if not self._running:
            self._none_runs.set()
        if isinstance(event, Done):
            self._times.learn(event)
        self._places.leave(ticket.submit, ticket.cost)
        self._end(ticket, event)
        self._pump()

    async def drain(self, seconds: float) -> None:
        """Take nothing more, fail what waits, and give what runs up to `seconds` to finish."""
        self._closing = True
        self._fail_waiting("The service is stopping.")
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            self.engine_lost("The service is stopping.")

    # -- who waits

    def _new_ticket(self, submit: Submit, again: Again | None, replaces: str) -> Ticket:
        ticket = Ticket(submit, self, again, replaces)
        self._n_tickets += 1
        ticket.number, ticket.load, ticket.arrived = self._n_tickets, self.load, self._clock()
        ticket.cost = self._cost(submit)
        return ticket

    def _cost(self, submit: Submit) -> int:
        """Tokens: those of the prompt, and as many of the answer as answers have these days."""
        return len(submit.prompt) + self._times.tokens(submit.max_tokens)

    def _entry(self, ticket: Ticket) -> Entry[Ticket]:
        return Entry(ticket, ticket.submit.priority, ticket.submit.client, ticket.cost, ticket.number)

    def _refusal(self, ticket: Ticket, older: Ticket | None) -> Refusal | None:
        """Why it may not wait; it is in the queue, and `older` leaves that for it.

        What is made anew has its place, and does not count.
        """
        leave = [one for one in (ticket, older) if one is not None and one in self._queue]
        return refusal(
            ticket.submit,
            self._limits(),
            waiting=len(self._queue) - len(leave),
            background=self._queue.count("background") - sum(one.submit.priority == "background" for one in leave),
            of_client=self._queue.count_of(ticket.submit.client) - len(leave),
        )

    def _queue_full(self, why: Refusal) -> QueueFull:
        """With the whole seconds until there is likely to be room."""
        now, ahead, n_seen = self._clock(), list[Submit](), 0
        for ticket in self._queue.order():
            ahead.append(ticket.submit)
            n_seen += why.counts(ticket.submit)
            if n_seen == why.n_starts:
                break
        running = [(one.submit, now - (one.started or now)) for one in self._running.values()]
        seconds = self._times.until_start(running, ahead, max(1, self._engine.capacity))
        engine = 0 if self._engine.capacity else self._engine.retry_after
        return why.error(why.message, retry_after=max(1, math.ceil(engine + seconds)))

    def _give_up(self, ticket: Ticket) -> None:
        """Wherever it is; its reader gets a `Done`."""
        if self._running.get(ticket.id) is not ticket:
            self._forget(ticket)
        elif self._engine.capacity:
            self._engine.send(Cancel(id=ticket.id))

    def _forget(self, ticket: Ticket) -> None:
        """One that waits."""
        if task := self._anew.pop(ticket, None):
            task.cancel()
            self._places.leave(ticket.submit, ticket.cost)
        else:
            self._queue.remove(ticket)
        self._end(ticket, ticket.cancelled())
        self._pump()

    def _fail_waiting(self, why: str) -> None:
        anew, self._anew = self._anew, {}
        for ticket, task in anew.items():
            task.cancel()
            self._places.leave(ticket.submit, ticket.cost)
        waiting = list(self._queue.order())
        for ticket in waiting:
            self._queue.remove(ticket)
        for ticket in (*anew, *waiting):
            self._end(ticket, Failed(id=ticket.id, code=EngineFailed.code, message=why))

    # -- who runs

    def _pump(self) -> None:
        while not self._held and not self._places.all_taken(self._engine.capacity):
            ticket = self._queue.pop(self._may_start)
            if ticket is None:
                return
            self._places.take(ticket.submit, ticket.cost)
            if ticket.load == self.load:
                self._start(ticket)
            else:
                self._anew[ticket] = asyncio.create_task(self._make_anew(ticket), name="request made anew")

    def _may_start(self, entry: Entry[Ticket], due: bool) -> bool:
        return self._places.may_start(entry, due, self._engine.capacity, self._limits())

    def _start(self, ticket: Ticket) -> None:
        ticket.started = self._clock()
        self._running[ticket.id] = ticket
        self._none_runs.clear()
        self._engine.send(ticket.submit)

    async def _make_anew(self, ticket: Ticket) -> None:
        """It has its place meanwhile, and is first in line again; one that cannot be made ends with the reason."""
        failed = None
        try:
            if ticket.again is None:
                raise EngineFailed("The model was replaced while the request waited.")
            submit = await ticket.again()
        except HotsetError as error:
            failed = Failed(id=ticket.id, code=error.code, message=error.message)
        except Exception:
            log.exception("a request could not be made anew", id=ticket.id)
            failed = Failed(id=ticket.id, code=EngineFailed.code, message="The server failed while reading it again.")
        del self._anew[ticket]
        self._places.leave(ticket.submit, ticket.cost)
        if failed is not None:
            self._end(ticket, failed)
        else:
            self._line_up_again(ticket, submit)
        self._pump()

    def _line_up_again(self, ticket: Ticket, submit: Submit) -> None:
        credit = ticket.cost
        ticket.submit, ticket.load, ticket.cost = submit, self.load, self._cost(submit)
        self._queue.give_back(self._entry(ticket), credit)

    def _end(self, ticket: Ticket, event: RequestEvent) -> None:
        ticket.over = True
        del self._live[ticket.id]
        key = ticket.submit.client, ticket.replaces
        if self._newest.get(key) is ticket:
            del self._newest[key]
        ticket.push(event)
        if not self._live:
            self._idle.set()
