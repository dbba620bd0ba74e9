"""Server-sent events: one response that stays alive while it waits and never waits for its reader."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self

from aiohttp import web
from aiohttp.http_writer import StreamWriter

from daemon.api.connection import connection_of
from daemon.config import HttpSection

PING = b": ping\n\n"
LOOK_SECONDS = 1.0
"""A stream that waits looks this often whether its limits are others now."""
DONE = b"data: [DONE]\n\n"
HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


def event(value: Any) -> bytes:
    """One data event."""
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class EventStream:
    """An open stream. Writes never wait; who writes much asks `blocked` first.

    `http` tells the limits that apply now. After `ping_seconds` without a write a comment goes out. A client that does
    not read loses its connection (`daemon.api.connection`), which cancels the handler like any closed socket;
    `too_slow` tells the two apart.
    """

    def __init__(self, request: web.Request, http: Callable[[], HttpSection]) -> None:
        self._request = request
        self._http = http
        self.response = web.StreamResponse(headers=HEADERS)
        self._connection = connection_of(request)
        self._loop = asyncio.get_running_loop()
        self._written = self._loop.time()
        self._pinger: asyncio.Task[None] | None = None
        self._waiter: asyncio.Task[None] | None = None
        self.comment: Callable[[], bytes] = lambda: PING
        """Makes the comment for a silence."""
        self.on_unblocked: Callable[[], Awaitable[None]] | None = None

    async def __aenter__(self) -> Self:
        await self.response.prepare(self._request)
        writer = self._request.writer
        assert isinstance(writer, StreamWriter)
        self._writer = writer
        self._pinger = asyncio.create_task(self._ping())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in (self._pinger, self._waiter):
            if task is not None:
                task.cancel()

    @property
    def too_slow(self) -> bool:
        """Whether the client lost its connection because it did not read."""
        return self._connection.given_up in ("write_timeout", "lag")

    @property
    def max_lag(self) -> int:
        """Bytes of memory that may be kept for a client that lags."""
        return self._http().max_lag_kib * 1024

    async def send(self, data: bytes) -> None:
        """Hand bytes to the socket without waiting for the reader.

        Raises:
            ConnectionError: the client is gone.
        """
        await self._writer.write(data, drain=False)
        self._written = self._loop.time()

    def blocked(self) -> bool:
        """Whether the socket is full, because the reader lags; `on_unblocked` tells when it is over."""
        if self._waiter is not None:
            return True
        if not self._connection.writing_paused:
            return False
        self._waiter = asyncio.create_task(self._await_reader())
        return True

    def give_up(self) -> None:
        """The client lags too far behind.

        Raises:
            ConnectionError: always; its connection is gone now.
        """
        self._connection.give_up("lag")
        raise ConnectionResetError("the client lags too far behind")

    async def caught_up(self) -> None:
        """Wait until the reader has taken everything.

        Raises:
            ConnectionError: the client is gone.
        """
        while self.blocked():
            assert self._waiter is not None
            await asyncio.shield(self._waiter)
            if self._waiter is not None:
                raise ConnectionResetError("the client is gone")

    async def finish(self) -> web.StreamResponse:
        """Wait for the reader and end the stream."""
        await self.caught_up()
        await self.response.write_eof()
        return self.response

    async def _await_reader(self) -> None:
        """Ends with `_waiter` None, or because the client is gone: then it stays, nothing is written any more."""
        waiter = self._waiter
        try:
            await self._writer.drain()
            if not self._connection.connected:
                return
            self._waiter = None
            if self.on_unblocked is not None:
                await self.on_unblocked()
        except ConnectionError:
            self._waiter = waiter

    async def _ping(self) -> None:
        while True:
            quiet = self._loop.time() - self._written
            if self.blocked():
                quiet = 0.0
            elif quiet >= self._http().ping_seconds:
                try:
                    await self.send(self.comment())
                except ConnectionError:
                    return
                quiet = 0.0
            await asyncio.sleep(min(self._http().ping_seconds - quiet, LOOK_SECONDS))
