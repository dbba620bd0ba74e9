"""One connection of a client: what of an answer waits for it is bounded, and so is how long."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any, Literal

import structlog
from aiohttp import web

from daemon.api.errors import error_response, from_http
from daemon.api.services import Services

LOOK_SECONDS = 1.0
"""A connection that waits for its reader looks this often how it gets on, and whether the limits are others now."""
SEND_BUFFER = 64 * 1024
"""Bytes that the kernel is asked to keep for a client. Its own choice grows to megabytes: thousands of small events,
where the newest few and one merged delta say the same."""
PROGRESS = 16 * 1024
"""Bytes that a client must take within http.write_timeout_seconds, or all that there is."""

_NO_LINGER = struct.pack("ii", 1, 0)

Reason = Literal["", "write_timeout", "lag", "pipelining"]
"""Why the service gave a connection up."""

log = structlog.get_logger("hotset.connection")


class Patience:
    """With a client that has `left` bytes to take since `now`, in seconds of any clock."""

    def __init__(self, left: int, now: float) -> None:
        self._left, self._since = left, now

    def until(self, left: int, now: float, seconds: float) -> float:
        """When it ends, as `left` bytes are left now: `seconds` after the last time that `PROGRESS` was made."""
        if self._left - left >= PROGRESS:
            self._left, self._since = left, now
        return self._since + seconds


class Connection(web.RequestHandler):
    """Gives up a client that does not read, and answers what is no HTTP at all in JSON, without quoting it.

    The transport keeps nothing but the write that the socket did not take whole: from then on writing is paused until
    all of it is gone. `given_up` says why the service closed the connection; "" while it did not.
    """

    def __init__(self, server: web.Server, services: Services, **options: Any) -> None:
        super().__init__(server, **options)
        self._services = services
        self._socket: asyncio.Transport | None = None
        self._look_again: asyncio.TimerHandle | None = None
        self._patience = Patience(0, 0.0)
        self.given_up: Reason = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Bound what may wait for the client."""
        assert isinstance(transport, asyncio.Transport)
        transport.set_write_buffer_limits(high=0)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        self._socket = transport  # aiohttp forgets it when it closes, which waits for the reader too
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        """It is gone."""
        self._stop_looking()
        self._socket = None
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The socket is full: from now on the client has to read."""
        super().pause_writing()
        assert self._socket is not None
        self._patience = Patience(self._socket.get_write_buffer_size(), self._loop.time())
        self._look()

    def resume_writing(self) -> None:
        """The client has everything."""
        self._stop_looking()
        super().resume_writing()

    def eof_received(self) -> None:
        """The client has closed its end, and nobody is answered after that: what waits to be sent is dropped."""
        if self.writing_paused:
            self._drop()

    def pause_reading(self) -> None:
        """Too much has come at once; whoever sends it behind a request that still runs is not listened to any more."""
        if not self._is_pipelining():
            super().pause_reading()

    def _pause_reading_for_buffer(self) -> None:
        if not self._is_pipelining():
            super()._pause_reading_for_buffer()

    def give_up(self, reason: Reason) -> None:
        """Close the connection at once, which cancels its handler; what the client has not read is lost."""
        if self._socket is None or self.given_up:
            return
        self.given_up = reason
        self._services.metrics.given_up(reason)
        log.info("connection given up", reason=reason, unsent=self._socket.get_write_buffer_size())
        self._drop()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to what aiohttp could not read or what went wrong beneath the middlewares."""
        if request.writer.output_size > 0:
            raise ConnectionError("the response has begun")
        raised = web.HTTPBadRequest() if status == 400 else web.HTTPInternalServerError()
        response = error_response(from_http(raised))
        response.force_close()
        return response

    def _is_pipelining(self) -> bool:
        """Give up who does: the end of a socket that is not read is not seen, and its request would run for nobody."""
        request = self._current_request
        if request is None or not request.content.is_eof():
            return False
        self.give_up("pipelining")
        return True

    def _look(self) -> None:
        """Whether the client still reads; again in a moment, for as long as writing is paused."""
        assert self._socket is not None
        left, now = self._socket.get_write_buffer_size(), self._loop.time()
        end = self._patience.until(left, now, self._services.config.http.write_timeout_seconds)
        if now >= end:
            self.give_up("write_timeout")
        else:
            self._look_again = self._loop.call_at(min(end, now + LOOK_SECONDS), self._look)

    def _drop(self) -> None:
        """Reset the connection: else the kernel would keep what it holds for a client that does not take it."""
        if self._socket is not None:
            self._socket.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            self._socket.abort()

    def _stop_looking(self) -> None:
        if self._look_again is not None:
            self._look_again.cancel()
            self._look_again = None


def connection_of(request: web.Request) -> Connection:
    """The one that this request came on."""
    assert isinstance(request.protocol, Connection)
    return request.protocol
