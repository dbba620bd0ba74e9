"""Deltas on their way into a stream; what comes while the client does not read is merged."""

from __future__ import annotations

from typing import Protocol

from daemon.api.answer import Answer
from daemon.api.gathered import Gathered
from daemon.api.sse import EventStream
from daemon.messages import Done, Tokens


class StreamShape(Protocol):
    """How one endpoint writes its stream; every method returns finished bytes of one or more events."""

    def opening(self, answer: Answer) -> bytes:
        """What goes out when the answer is queued."""

    def delta(self, answer: Answer, tokens: Tokens) -> bytes:
        """New text; empty when there is nothing to show."""

    def finish(self, answer: Answer, done: Done) -> bytes:
        """The end of one answer."""

    def closing(self, answers: list[Answer]) -> bytes:
        """The end of the stream."""


class Outlet:
    """Writes the answers of one stream in the order in which their tokens come."""

    def __init__(self, stream: EventStream, shape: StreamShape) -> None:
        self._stream = stream
        self._shape = shape
        self._held: dict[Answer, Gathered] = {}
        self._held_bytes = 0
        self._held_ends: list[tuple[Answer, Done]] = []
        stream.on_unblocked = self.flush

    async def open(self, answers: list[Answer]) -> None:
        """The first bytes."""
        await self._stream.send(b"".join(self._shape.opening(answer) for answer in answers))

    async def put(self, answer: Answer, tokens: Tokens) -> None:
        """New tokens: written now, or held while the client lags.

        Raises:
            ConnectionError: the client is gone, or lags so far behind that it had to be given up.
        """
        if self._stream.blocked():
            self._hold(answer, tokens)
            return
        data = self._shape.delta(answer, tokens)
        if data:
            await self._stream.send(data)

    async def end(self, answer: Answer, done: Done) -> None:
        """The end of one answer; the text that the engine still held back goes out before it."""
        if done.text:
            await self.put(answer, Tokens(id=done.id, tokens=[], text=done.text))
        if self._stream.blocked():
            self._held_ends.append((answer, done))
            return
        await self._stream.send(self._shape.finish(answer, done))

    async def flush(self) -> None:
        """Write what was held, one delta for each answer."""
        held, self._held, self._held_bytes = self._held, {}, 0
        ends, self._held_ends = self._held_ends, []
        parts = [self._shape.delta(answer, gathered.merged(answer.ticket.id)) for answer, gathered in held.items()]
        parts += [self._shape.finish(answer, done) for answer, done in ends]
        if data := b"".join(parts):
            await self._stream.send(data)

    def _hold(self, answer: Answer, tokens: Tokens) -> None:
        self._held_bytes += self._held.setdefault(answer, Gathered()).add(tokens)
        if self._held_bytes > self._stream.max_lag:
            self._held.clear()
            self._stream.give_up()
