"""One answer on its way from the queue to its reader."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol

from daemon.messages import Done, RequestEvent, Submit, Tokens

Again = Callable[[], Awaitable[Submit]]
"""Makes a Submit anew for the engine and the vocabulary that are there now; raises a HotsetError where it cannot be."""


class Desk(Protocol):
    """What a ticket needs from the admission that gave it out."""

    def position(self, ticket: Ticket) -> int | None:
        """0-based place in the queue; None once it runs or is over."""

    def withdraw(self, ticket: Ticket) -> None:
        """Its reader is gone."""


class Ticket:
    """One answer on its way: iterate over it for any number of `Tokens`, then one `Done` or `Failed`.

    Belongs to the event loop; one reader. `number` counts tickets in the order of their arrival, `load` says which
    load its Submit is made for, `cost` is what it counts for in tokens, times are seconds of admission's clock.
    """

    def __init__(self, submit: Submit, desk: Desk, again: Again | None, replaces: str) -> None:
        self.submit = submit
        self.again = again
        self.replaces = replaces
        self.number = self.load = self.cost = 0
        self.arrived = 0.0
        self.started: float | None = None
        self.over = False
        self._desk = desk
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
        return self._desk.position(self)

    @property
    def begun(self) -> bool:
        """Whether the engine has got it, also once it is over."""
        return self.started is not None

    def cancel(self) -> None:
        """Give up, wherever it is; what has not been read is dropped and the iteration ends. Idempotent."""
        self._events.clear()
        self._read_all = True
        self._wake_reader()
        self._desk.withdraw(self)

    def cancelled(self) -> Done:
        """Its end where the engine has never got it, or gave no answer."""
        none = {"n_prompt": 0, "n_cached": 0, "n_predicted": 0, "wait_ms": 0.0, "prompt_ms": 0.0, "predicted_ms": 0.0}
        return Done.model_validate({"id": self.id, "finish_reason": "cancelled"} | none)

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

    def _wake_reader(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
