"""Clients of the soak: some read as fast as they can, some slowly or not at all, some leave, at any stage."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from hotset_tools.bench.clients import Endpoint
from hotset_tools.bench.soak_judge import Ended, Said, judge

SILENCE_SECONDS = 120.0
"""Longer than the service pings; a client that hears nothing for so long tells it as a fault."""
STALL_SECONDS = 10.0
MOST_PATIENCE = 3.0
"""Seconds that a rejected client waits at most, whatever it was told: it is here to ask."""


@dataclass(frozen=True, slots=True)
class Job:
    """A greedy chat of one message, which is answered with exactly so many tokens."""

    prompt: str
    n_tokens: int

    def body(self, *, stream: bool) -> bytes:
        """As JSON."""
        fields = {"messages": [{"role": "user", "content": self.prompt}], "max_tokens": self.n_tokens}
        fixed = {"temperature": 0, "ignore_eos": True, "logprobs": True, "top_logprobs": 5, "stream": stream}
        return json.dumps(fields | fixed).encode()


class Connection:
    """One request on a connection of its own; a small receive buffer makes the service feel who does not read."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def ask(cls, endpoint: Endpoint, client: str, body: bytes, *, small: bool) -> Connection:
        """Send a chat request on behalf of a user behind Open WebUI."""
        sock = socket.socket()
        try:
            if small:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, (endpoint.host, endpoint.port))
            reader, writer = await asyncio.open_connection(sock=sock, limit=2048 if small else 1 << 18)
        except BaseException:
            sock.close()
            raise
        head = endpoint.head("/chat/completions", len(body), {"X-OpenWebUI-User-Id": client})
        writer.write(head + body)
        return cls(reader, writer)

    async def read(self, count: int = 1 << 18) -> bytes:
        """What has come, at most `count` bytes; nothing at the end.

        Raises:
            ConnectionError: the service reset the connection.
            TimeoutError: nothing came for a long time.
        """
        async with asyncio.timeout(SILENCE_SECONDS):
            return await self._reader.read(count)

    async def rest(self, count: int = 1 << 18, pause: float = 0.0) -> bytes:
        """Everything, in pieces of at most `count` bytes with a pause after each."""
        parts: list[bytes] = []
        while part := await self.read(count):
            parts.append(part)
            if pause:
                await asyncio.sleep(pause)
        return b"".join(parts)

    def close(self, *, at_once: bool = False) -> None:
        """Leave; `at_once` drops what was not sent or read."""
        if at_once:
            self._writer.transport.abort()
        else:
            self._writer.close()


@dataclass(frozen=True, slots=True)
class Client:
    """One of them: who it says that it is, and its own dice."""

    endpoint: Endpoint
    name: str
    dice: random.Random

    async def ask(self, manner: str, job: Job, alone: Said | None) -> Ended:
        """Send one request and deal with its answer in this manner; what breaks is a fault, not an error."""
        try:
            return await MANNERS[manner](self, job, alone)
        except (OSError, TimeoutError) as error:
            return Ended("wrong", fault=f"{type(error).__name__}: {error}")

    async def _open(self, job: Job, *, stream: bool, small: bool = False) -> Connection:
        return await Connection.ask(self.endpoint, self.name, job.body(stream=stream), small=small)

    async def stream(self, job: Job, alone: Said | None) -> Ended:
        """Read a stream as it comes."""
        return await self._read(job, alone, stream=True)

    async def whole(self, job: Job, alone: Said | None) -> Ended:
        """Wait for a whole answer."""
        return await self._read(job, alone, stream=False)

    async def slow(self, job: Job, alone: Said | None) -> Ended:
        """Read a stream in small pieces, so that the service has to wait with it."""
        return await self._read(job, alone, stream=True, count=2048, pause=self.dice.uniform(0.002, 0.02))

    async def _read(
        self, job: Job, alone: Said | None, *, stream: bool, count: int = 1 << 18, pause: float = 0.0
    ) -> Ended:
        connection = await self._open(job, stream=stream, small=bool(pause))
        try:
            data = await connection.rest(count, pause)
        finally:
            connection.close()
        return judge(data, streamed=stream, n_tokens=job.n_tokens, alone=alone)

    async def leave_stream(self, job: Job, alone: Said | None) -> Ended:
        """Leave a stream before, at or after its first bytes."""
        connection = await self._open(job, stream=True)
        try:
            for _ in range(self.dice.choice((0, 1, 2, 5))):
                await connection.read()
        finally:
            connection.close(at_once=self.dice.random() < 0.5)
        return Ended("left")

    async def leave_whole(self, job: Job, alone: Said | None) -> Ended:
        """Do not wait for a whole answer."""
        connection = await self._open(job, stream=False)
        try:
            await asyncio.sleep(self.dice.choice((0.0, 0.01, 0.1, 0.5)))
        finally:
            connection.close(at_once=self.dice.random() < 0.5)
        return Ended("left")

    async def stall(self, job: Job, alone: Said | None) -> Ended:
        """Ask for a stream and read nothing of it, for longer than the service waits; then leave."""
        connection = await self._open(Job(job.prompt, max(job.n_tokens, 900)), stream=True, small=True)
        try:
            await asyncio.sleep(STALL_SECONDS)
        finally:
            connection.close()
        return Ended("left")


MANNERS: dict[str, Callable[[Client, Job, Said | None], Awaitable[Ended]]] = {
    "stream": Client.stream,
    "whole": Client.whole,
    "slow": Client.slow,
    "leave a stream": Client.leave_stream,
    "leave a whole answer": Client.leave_whole,
    "stall": Client.stall,
}
SHARES = (30, 30, 15, 11, 11, 3)
"""Of a hundred requests, in the order of `MANNERS`."""
