"""Recordings of live routing: from the engine's decode steps to the operator who asked over the control socket."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import structlog
from pydantic import BaseModel

from daemon.messages import ModelInfo, Record, Recorded, Recording

HEARTBEAT_SECONDS = 10.0
"""Who records hears this often that it goes on."""
FLUSH_SECONDS = 5.0
"""How long an engine that was told to end a recording may take to send what is left of it."""

Say = Callable[[BaseModel], bool]
"""Hands a line to who records; False when too much waits to be read."""

log = structlog.get_logger("hotset.recording")


class EnginePort(Protocol):
    """What a recording needs of the supervisor."""

    @property
    def capacity(self) -> int:
        """0 while no engine takes commands."""

    reason: str
    info: ModelInfo | None

    def send(self, command: BaseModel) -> None:
        """Hand a command to the engine."""


class _Current:
    """The recording that runs, until `over` is set. It holds nothing: what comes is said at once."""

    def __init__(self, number: int, say: Say) -> None:
        self.number, self._say = number, say
        self.over = asyncio.Event()
        self.n_tokens = 0
        self.why = ""

    def say(self, line: BaseModel) -> bool:
        """Hand on a line; where the reader is too slow, that ends it."""
        if self.over.is_set():
            return False
        if isinstance(line, Recorded):
            self.n_tokens += len(line.answers)
            if line.ended is not None:
                self._end(line.ended)
        if not self._say(line) and not self.over.is_set():
            self.end("who records reads too slowly")
        return not self.over.is_set()

    def end(self, why: str) -> None:
        """Tell that nothing more comes."""
        if not self.over.is_set():
            self._end(why)
            self._say(Recorded(number=self.number, ended=why))

    def _end(self, why: str) -> None:
        self.why = why
        self.over.set()


class Recordings:
    """One at a time. Belongs to the event loop; the supervisor calls `deliver` and `engine_lost`."""

    def __init__(self, engine: EnginePort) -> None:
        self._engine = engine
        self._current: _Current | None = None
        self._n_begun = 0

    async def record(self, say: Say, leave: Callable[[], Awaitable[object]]) -> None:
        """Say a `Recording`, then parts of it until it has ended, which the last part tells.

        It ends when what `leave` gives is done, when the reader is too slow, with the engine, and when nothing can be
        recorded any more. Where it cannot begin, there is one part that says why.
        """
        if refusal := self._refusal():
            say(Recorded(number=0, ended=refusal))
            return
        self._n_begun += 1
        current = self._current = _Current(self._n_begun, say)
        try:
            self._engine.send(Record(number=current.number))
            await self._see_through(current, asyncio.ensure_future(leave()))
        except asyncio.CancelledError:
            current.end("the service is stopping")
            raise
        finally:
            self._current = None
            self._engine.send(Record(number=current.number, wanted=False))
            log.info("recording of routing ended", tokens=current.n_tokens, reason=current.why or "as ordered")

    def _refusal(self) -> str:
        if self._current is not None:
            return "somebody records already"
        return "" if self._engine.capacity else f"no engine is ready: {self._engine.reason}"

    async def _see_through(self, current: _Current, left: asyncio.Future[Any]) -> None:
        over: asyncio.Future[Any] = asyncio.ensure_future(current.over.wait())
        try:
            while not (over.done() or left.done()):
                await asyncio.wait({over, left}, timeout=HEARTBEAT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if not (over.done() or left.done()):
                    current.say(Recorded(number=current.number))
            if not over.done():
                self._engine.send(Record(number=current.number, wanted=False))
                await asyncio.wait({over}, timeout=FLUSH_SECONDS)
                current.end("")
        finally:
            for waiting in (over, left):
                waiting.cancel()
            await asyncio.gather(over, left, return_exceptions=True)

    # -- called by the supervisor

    def deliver(self, part: Recorded) -> None:
        """A part from the engine; one of a recording that is over is dropped."""
        current, info = self._current, self._engine.info
        if current is None or part.number != current.number or info is None:
            return
        if part.scope is not None:
            names = {"fingerprint": info.fingerprint, "name": info.name, "architecture": info.architecture}
            log.info("recording of routing began", layers=len(part.scope.layers))
            if not current.say(Recording(scope=part.scope, **names)):
                return
            part = part.model_copy(update={"scope": None})
        if part.answers or part.ended is not None:
            current.say(part)

    def engine_lost(self, why: str) -> None:
        """The engine is gone; what it had not sent is lost."""
        if self._current is not None:
            self._current.end(f"the engine ended: {why}")
