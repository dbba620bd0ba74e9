"""Server-sent events: one response that stays alive while it waits and never waits for ever for its reader."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self

from aiohttp import web
from aiohttp.http_writer import StreamWriter

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
    not read for `write_timeout_seconds` loses its connection, which cancels the handler like any closed socket;
    `too_slow` tells the two apart.
    """

    def __init__(self, request: web.Request, http: Callable[[], HttpSection]) -> None:
        self._request = request
        self._http = http
        self.response = web.StreamResponse(headers=HEADERS)
        self._loop = asyncio.get_running_loop()
        self._written = self._loop.time()
        self._pinger: asyncio.Task[None] | None = None
        self._waiter: asyncio.Task[None] | None = None
        self.comment: Callable[[], bytes] = lambda: PING
        """Makes the comment for a silence."""
        self.on_unblocked: Callable[[], Awaitable[None]] | None = None
        self.too_slow = False

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

    async def send(self, data: bytes) -> None:
        """Hand bytes to the socket without waiting for the reader.

        Raises:
            ConnectionError: the client is gone.
        """
        await self._writer.write(data, drain=False)
        self._written = self._loop.time()

    def blocked(self) -> bool:
        """Whether the reader lags so far that the socket's buffers are full; `on_unblocked` tells when it is over."""
        if self._waiter is not None:
            return True
        transport = self._request.transport
        if transport is None or transport.get_write_buffer_size() <= _high_water(transport):
            return False
        self._waiter = asyncio.create_task(self._await_reader())
        return True

    async def caught_up(self) -> None:
        """Wait until the reader has taken everything but the last few kilobytes."""
        while self.blocked():
            assert self._waiter is not None
            await asyncio.shield(self._waiter)
            if self._waiter is not None:
                raise ConnectionResetError("the client does not read")

    async def finish(self) -> web.StreamResponse:
        """Wait for the reader and end the stream."""
        await self.caught_up()
        await self.response.write_eof()
        return self.response

    async def _await_reader(self) -> None:
        try:
            async with asyncio.timeout(self._http().write_timeout_seconds):
                await self._writer.drain()
        except TimeoutError:
            self.too_slow = True
            transport = self._request.transport
            if transport is not None:
                transport.abort()
            return
        except ConnectionError:
            return
        self._waiter = None
        if self.on_unblocked is not None:
            await self.on_unblocked()

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


def _high_water(transport: asyncio.BaseTransport) -> int:
    assert isinstance(transport, asyncio.WriteTransport)
    return transport.get_write_buffer_limits()[1]
