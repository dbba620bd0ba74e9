"""Who runs and who waits: a bounded queue in front of the engine, and one ticket for each answer."""

from __future__ import annotations

import asyncio
import bisect
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

import structlog

from daemon.errors import EngineFailed, HotsetError, ModelLoading, QueueFull
from daemon.messages import Cancel, Done, Failed, RequestEvent, Submit, Tokens

_SMOOTHING = 0.2
"""Weight of the newest request in the running mean of their durations."""

Again = Callable[[], Awaitable[Submit]]
"""Makes a Submit anew for the engine and the vocabulary that are there now; raises a HotsetError where it cannot be."""

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
    """How full it is."""

    running: int
    waiting: int
    max_waiting: int


class Ticket:
    """One answer on its way: iterate over it for any number of `Tokens`, then one `Done` or `Failed`.

    Belongs to the event loop; one reader.
    """

    def __init__(self, submit: Submit, admission: Admission, client: str, again: Again | None) -> None:
        self.submit = submit
        self.client = client
        self.again = again
        self.arrived = admission.now()
        self.load = admission.load
        self.number = 0
        self.started: float | None = None
        self.over = False
        self._admission = admission
        self._events: deque[RequestEvent] = deque()
        self._wake: asyncio.Future[None] | None = None
        self._read_all = False

    @property
    def id(self) -> str:
        """The request's id."""
        return self.submit.id

    @property
    def position(self) -> int | None:
        """0-based place in the queue; None once it runs or is over."""
        return self._admission.position(self)

    def cancel(self) -> None:
        """Give up, wherever it is; what has not been read is dropped and the iteration ends. Idempotent."""
        self._events.clear()
        self._read_all = True
        self._wake_reader()
        self._admission.withdraw(self)

    def push(self, event: RequestEvent) -> None:
        """Add an event for the reader (admission only)."""
        if not self._read_all:
            self._events.append(event)
            self._wake_reader()

    def __aiter__(self) -> Ticket:
        return self

    async def __anext__(self) -> RequestEvent:
        while not self._events:
            if self._read_all:
                raise StopAsyncIteration
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        event = self._events.popleft()
        self._read_all = not isinstance(event, Tokens)
        return event

    def waiting_events(self) -> int:
        """Events that could be read without waiting."""
        return len(self._events)

    def _wake_reader(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


class Admission:
    """First come, first served; at most `capacity` answers run, at most `max_waiting` wait."""

    def __init__(
        self, engine: EnginePort, max_waiting: Callable[[], int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine, self._max_waiting, self._clock = engine, max_waiting, clock
        self._waiting: deque[Ticket] = deque()
        self._anew: dict[Ticket, asyncio.Task[None]] = {}
        self._running: dict[str, Ticket] = {}
        self._n_tickets = 0
        self._mean_seconds = 0.0
        self._closing = self._held = False
        self.load = 0
        """Which load the requests are made for that are submitted now."""
        self._idle, self._none_runs = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._none_runs.set()

    def submit(self, submit: Submit, *, client: str = "", again: Again | None = None) -> Ticket:
        """Run it, or let it wait. `again` makes it anew when another load takes the place of the one it was made for.

        Raises:
            ModelLoading: no engine is ready to take it or to be waited for, or the service is about to stop.
            QueueFull: as many wait as may.
        """
        if self._closing or not (self._engine.capacity or self._held):
            raise ModelLoading("The model is not ready.", retry_after=self._engine.retry_after)
        if len(self._waiting) >= self._max_waiting() and not self._has_room():
            raise QueueFull("Too many requests are waiting.", retry_after=self._seconds_of_queue())
        ticket = Ticket(submit, self, client, again)
        self._n_tickets += 1
        ticket.number = self._n_tickets
        self._waiting.append(ticket)
        self._idle.clear()
        self._pump()
        return ticket

    def now(self) -> float:
        """Seconds of its clock."""
        return self._clock()

    def cancel(self, request_id: str) -> bool:
        """Cancel by id on behalf of someone else than its reader, who gets a `Done`; False: no such request."""
        if request_id in self._running:
            self._engine.send(Cancel(id=request_id))
            return True
        for ticket in (*self._anew, *self._waiting):
            if ticket.id == request_id:
                self._forget(ticket)
                return True
        return False

    def withdraw(self, ticket: Ticket) -> None:
        """Its reader is gone: forget it if it waits, tell the engine if it runs."""
        if ticket.over:
            return
        if self._running.get(ticket.id) is ticket:
            if self._engine.capacity:
                self._engine.send(Cancel(id=ticket.id))
        else:
            self._forget(ticket)

    def position(self, ticket: Ticket) -> int | None:
        """0-based place in the queue; None once it runs or is over."""
        if ticket in self._anew:
            return 0
        return self._waiting.index(ticket) if ticket in self._waiting else None

    @property
    def closing(self) -> bool:
        """Whether nothing more is taken, because the service is about to stop."""
        return self._closing

    def statistics(self) -> AdmissionStatistics:
        """A picture of this moment."""
        return AdmissionStatistics(len(self._running), len(self._anew) + len(self._waiting), self._max_waiting())

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
        self._learn(ticket)
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

    # -- inside

    def _fail_waiting(self, why: str) -> None:
        anew, self._anew = self._anew, {}
        waiting, self._waiting = list(self._waiting), deque()
        for task in anew.values():
            task.cancel()
        for ticket in (*anew, *waiting):
            self._end(ticket, Failed(id=ticket.id, code=EngineFailed.code, message=why))

    def _has_room(self) -> bool:
        return not self._waiting and self._has_place()

    def _has_place(self) -> bool:
        """One that is made anew has its place already: it starts before those that came later."""
        return not self._held and len(self._running) + len(self._anew) < self._engine.capacity

    def _pump(self) -> None:
        while self._waiting and self._has_place():
            ticket = self._waiting.popleft()
            if ticket.load != self.load:
                self._anew[ticket] = asyncio.create_task(self._make_anew(ticket), name="request made anew")
                continue
            ticket.started = self._clock()
            self._running[ticket.id] = ticket
            self._none_runs.clear()
            self._engine.send(ticket.submit)

    async def _make_anew(self, ticket: Ticket) -> None:
        """Then it is first in line again; one that cannot be made ends with the reason."""
        failed = None
        try:
            if ticket.again is None:
                raise EngineFailed("The model was replaced while the request waited.")
            ticket.submit = await ticket.again()
            ticket.load = self.load
        except HotsetError as error:
            failed = Failed(id=ticket.id, code=error.code, message=error.message)
        except Exception:
            log.exception("a request could not be made anew", id=ticket.id)
            failed = Failed(id=ticket.id, code=EngineFailed.code, message="The server failed while reading it again.")
        del self._anew[ticket]
        if failed is not None:
            self._end(ticket, failed)
        else:
            bisect.insort(self._waiting, ticket, key=lambda one: one.number)
        self._pump()

    def _forget(self, ticket: Ticket) -> None:
        """One that waits."""
        if task := self._anew.pop(ticket, None):
            task.cancel()
        elif ticket in self._waiting:
            self._waiting.remove(ticket)
        else:
            return
        self._end(ticket, _cancelled(ticket.id))
        self._pump()

    def _end(self, ticket: Ticket, event: RequestEvent) -> None:
        ticket.over = True
        ticket.push(event)
        if not self._running and not self._waiting and not self._anew:
            self._idle.set()

    def _learn(self, ticket: Ticket) -> None:
        seconds = self._clock() - (ticket.started or ticket.arrived)
        self._mean_seconds += _SMOOTHING * (seconds - self._mean_seconds) if self._mean_seconds else seconds

    def _seconds_of_queue(self) -> int:
        """When a place in the queue is likely to be free: one of those that run has to end."""
        return max(1, math.ceil(self._mean_seconds / max(1, self._engine.capacity)))


def _cancelled(request_id: str) -> Done:
    return Done(
        id=request_id,
        finish_reason="cancelled",
        n_prompt=0,
        n_cached=0,
        n_predicted=0,
        wait_ms=0,
        prompt_ms=0,
        predicted_ms=0,
    )
