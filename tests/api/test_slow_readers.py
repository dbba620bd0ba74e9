"""Clients that do not read, read byte by byte, or leave in the middle: what waits for them is bounded, then dropped."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any, ClassVar

import pytest

from daemon.api import connection, delivery, server
from daemon.api.connection import PROGRESS, Patience
from daemon.messages import Submit, Tokens
from tests.api.conftest import Daemon, Start
from tests.api.test_streams import CHAT, PATHS
from tests.fakes import Event, FakeTicket, done, logprob, nothing

MEGABYTE = "~" * 1_000_000
ENDLESS = {"write_timeout_seconds": 3600.0, "max_lag_kib": 1_048_576, "max_answer_mib": 1024}
"""No limit that a test could meet."""


class Peer:
    """A client on a socket with a small receive buffer, which reads when it is told to."""

    made: ClassVar[list[Peer]] = []

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.made.append(self)

    @classmethod
    async def connect(cls, daemon: Daemon) -> Peer:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", daemon.port))
        return cls(sock)

    @classmethod
    async def ask(cls, daemon: Daemon, path: str = CHAT, **fields: Any) -> Peer:
        peer = await cls.connect(daemon)
        await peer.send(request(path, PATHS[path] | fields))
        return peer

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.sock, data)

    async def read(self, count: int) -> bytes:
        return await asyncio.get_running_loop().sock_recv(self.sock, count)

    async def count(self, mark: bytes, most: int) -> int:
        """How often a byte came, read until there are so many."""
        found = 0
        while found < most and (part := await self.read(1 << 18)):
            found += part.count(mark)
            await asyncio.sleep(0)
        return found

    async def until(self, mark: bytes) -> bytes:
        """Up to a mark, whose pieces may come apart."""
        parts: list[bytes] = []
        while mark not in b"".join(parts[-2:]):
            parts.append(await self.read(1 << 18))
            assert parts[-1], "the connection has ended"
        return b"".join(parts)

    async def rest(self) -> bytes:
        """To the end of the connection, however it ends."""
        data = b""
        try:
            while part := await self.read(1 << 20):
                data += part
        except ConnectionResetError:
            pass
        return data

    def close(self) -> None:
        self.sock.close()


def request(path: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def long_story(submit: Submit) -> list[Event]:
    """Twelve megabytes, and their end."""
    return [*(Tokens(id=submit.id, tokens=[1], text=MEGABYTE) for _ in range(12)), done(submit)]


@pytest.fixture(autouse=True)
async def no_lost_errors() -> AsyncIterator[None]:
    """Nothing that goes wrong is left to the event loop to tell."""
    lost: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: lost.append(context))
    yield
    while Peer.made:
        Peer.made.pop().close()
    assert lost == []


async def fill(ticket: FakeTicket, size: int, count: int) -> None:
    """Push `count` tokens of `size` characters each, and wait until all are taken."""
    before = ticket.n_read
    for _ in range(count):
        ticket.text("~" * size)
    await ticket.read(before + count)


async def count(daemon: Daemon, sample: str) -> bool:
    return sample in (await daemon.get("/metrics")).body.decode().splitlines()


async def until_nobody_is_connected(daemon: Daemon) -> None:
    """All but the connection of this test's own session."""
    await daemon.session.close()
    while daemon.connections:  # noqa: ASYNC110 - aiohttp tells nobody
        await asyncio.sleep(0.01)


# -- patience


def test_a_reader_has_its_seconds_from_the_last_progress_on() -> None:
    patience = Patience(10 * PROGRESS, 100.0)
    assert patience.until(10 * PROGRESS, 105.0, 60.0) == 160.0
    assert patience.until(9 * PROGRESS + 1, 110.0, 60.0) == 160.0, "too little to count"
    assert patience.until(9 * PROGRESS, 120.0, 60.0) == 180.0
    assert patience.until(8 * PROGRESS + 1, 170.0, 60.0) == 180.0, "little by little counts from the last time"
    assert patience.until(3 * PROGRESS, 175.0, 5.0) == 180.0, "other seconds apply at once"


# -- clients that do not read


@pytest.mark.parametrize("path", PATHS)
async def test_who_does_not_read_a_whole_answer_loses_the_connection(start: Start, path: str, capsys: Any) -> None:
    daemon: Daemon = await start(http=ENDLESS | {"write_timeout_seconds": 0.2})
    daemon.fakes.admission.script = long_story
    peer = await Peer.ask(daemon, path)
    await daemon.fakes.metrics.gave_up("write_timeout")
    assert len(await peer.rest()) < 12_000_000
    assert await count(daemon, 'hotset_connections_given_up_total{reason="write_timeout"} 1.0')
    assert await count(daemon, f'hotset_requests_total{{endpoint="{path}",outcome="ok"}} 1.0')
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "connection given up" in line]
    assert "reason=write_timeout" in line
    await until_nobody_is_connected(daemon)


async def test_who_does_not_read_what_is_no_answer_loses_the_connection_too(start: Start) -> None:
    """Many small replies in a row, which fill the socket."""
    daemon: Daemon = await start(http=ENDLESS | {"write_timeout_seconds": 0.2})
    peer = await Peer.connect(daemon)
    sending = asyncio.create_task(peer.send(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2000))
    await daemon.fakes.metrics.gave_up("write_timeout")
    sending.cancel()
    await asyncio.wait([sending])
    await until_nobody_is_connected(daemon)


@pytest.mark.parametrize("stream", [False, True])
async def test_who_reads_byte_by_byte_loses_the_connection(start: Start, stream: bool) -> None:
    daemon: Daemon = await start(http=ENDLESS | {"write_timeout_seconds": 0.3})
    daemon.fakes.admission.script = long_story
    peer = await Peer.ask(daemon, stream=stream)
    reading = asyncio.create_task(byte_by_byte(peer))
    await daemon.fakes.metrics.gave_up("write_timeout")
    reading.cancel()
    await asyncio.wait([reading])
    await until_nobody_is_connected(daemon)
    assert daemon.fakes.metrics.outcomes[0] == (CHAT, "slow_reader" if stream else "ok")


async def byte_by_byte(peer: Peer) -> None:
    try:
        while await peer.read(1):  # noqa: ASYNC110 - this is how it reads
            await asyncio.sleep(0.001)
    except ConnectionResetError:
        pass


@pytest.mark.parametrize("stream", [False, True])
async def test_who_reads_on_gets_everything(start: Start, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    """However long it takes altogether: it is looked at many times, and has always read on."""
    monkeypatch.setattr(connection, "LOOK_SECONDS", 0.001)
    daemon: Daemon = await start(http=ENDLESS | {"write_timeout_seconds": 30.0})
    daemon.fakes.admission.script = long_story
    peer = await Peer.ask(daemon, stream=stream)
    assert await peer.count(b"~", 12_000_000) == 12_000_000
    assert daemon.fakes.metrics.reasons == []


async def test_a_live_timeout_holds_for_who_stalls_already(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "LOOK_SECONDS", 0.02)
    daemon: Daemon = await start(http=ENDLESS)
    daemon.fakes.admission.script = long_story
    await Peer.ask(daemon)
    await daemon.fakes.metrics.ended("ok")
    daemon.fakes.configure(http={"write_timeout_seconds": 0.1})
    await daemon.fakes.metrics.gave_up("write_timeout")


# -- what is kept for them


async def test_a_stream_keeps_only_so_much_for_who_lags(start: Start) -> None:
    daemon: Daemon = await start(http=ENDLESS | {"max_lag_kib": 64})
    daemon.fakes.admission.script = nothing
    peer = await Peer.ask(daemon, stream=True)
    ticket = await daemon.fakes.admission.ticket()
    await fill(ticket, 1_000_000, 1)  # more than the socket takes
    n_sent = 0
    while not ticket.cancelled.is_set():
        ticket.text("y" * 1000)
        n_sent += 1
        await ticket.read(1 + n_sent)
        await asyncio.sleep(0)
    assert n_sent == 17, "each takes four bytes a character"
    await daemon.fakes.metrics.ended("slow_reader")
    assert await count(daemon, 'hotset_connections_given_up_total{reason="lag"} 1.0')
    await peer.rest()
    await until_nobody_is_connected(daemon)


async def test_logprobs_weigh_what_they_take(start: Start) -> None:
    daemon: Daemon = await start(http=ENDLESS | {"max_lag_kib": 64})
    daemon.fakes.admission.script = nothing
    await Peer.ask(daemon, stream=True, logprobs=True, top_logprobs=20)
    ticket = await daemon.fakes.admission.ticket()
    await fill(ticket, 1_000_000, 1)
    for _ in range(5):
        ticket.push(Tokens(id=ticket.id, tokens=[1], text="y", logprobs=[logprob("y", 20)]))
    await ticket.cancelled.wait()
    await daemon.fakes.metrics.gave_up("lag")


async def test_all_answers_of_a_stream_share_what_is_kept(start: Start) -> None:
    daemon: Daemon = await start(http=ENDLESS | {"max_lag_kib": 64})
    daemon.fakes.admission.script = nothing
    await Peer.ask(daemon, stream=True, n=3)
    tickets = [await daemon.fakes.admission.ticket(i) for i in range(3)]
    await fill(tickets[0], 1_000_000, 1)
    for ticket in tickets:
        ticket.text("y" * 6000)
    for ticket in tickets:
        await ticket.cancelled.wait()
    await daemon.fakes.metrics.ended("slow_reader")


async def test_what_was_kept_is_counted_anew_once_it_is_sent(start: Start) -> None:
    daemon: Daemon = await start(http=ENDLESS | {"max_lag_kib": 64})
    daemon.fakes.admission.script = nothing
    peer = await Peer.ask(daemon, stream=True)
    ticket = await daemon.fakes.admission.ticket()
    for _ in range(3):
        await fill(ticket, 1_000_000, 1)
        await fill(ticket, 10_000, 1)  # most of what may be kept
        assert await peer.count(b"~", 1_010_000) == 1_010_000
    ticket.finish()
    assert await peer.until(b"[DONE]")
    assert daemon.fakes.metrics.reasons == []


@pytest.mark.parametrize("path", PATHS)
async def test_a_whole_answer_that_grows_too_large_is_refused(start: Start, path: str) -> None:
    daemon: Daemon = await start(http={"max_answer_mib": 1})
    daemon.fakes.admission.script = nothing
    several = {"prompt": ["x", "y"]} if path == "/completion" else {"n": 2}
    waiting = asyncio.create_task(daemon.post(path, PATHS[path] | several))
    tickets = [await daemon.fakes.admission.ticket(i) for i in range(2)]
    for ticket in tickets:
        ticket.text("x" * 140_000)
    reply = await waiting
    assert reply.status == 400
    assert reply.json()["error"]["code"] == "answer_too_large"
    assert "http.max_answer_mib" in reply.json()["error"]["message"]
    assert all(ticket.cancelled.is_set() for ticket in tickets)


async def test_a_stream_may_be_longer_than_a_whole_answer(start: Start) -> None:
    daemon: Daemon = await start(http=ENDLESS | {"max_answer_mib": 1})
    daemon.fakes.admission.script = long_story
    assert (await daemon.chat(stream=True)).body.count(b"~") >= 12_000_000


async def test_a_large_answer_written_in_a_thread_is_the_same(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"logprobs": True, "top_logprobs": 5}
    small = (await daemon.chat(**fields)).json()
    monkeypatch.setattr(delivery, "LARGE", 1)
    large = await daemon.chat(**fields)
    assert large.json()["choices"] == small["choices"]
    assert large.headers["content-type"] == "application/json; charset=utf-8"


# -- clients that leave


async def test_who_lags_and_closes_half_a_socket_is_gone(start: Start) -> None:
    """The end of what it sends is all that is seen of a client that leaves while the socket is full."""
    daemon: Daemon = await start(http=ENDLESS)
    daemon.fakes.admission.script = nothing
    peer = await Peer.ask(daemon, stream=True)
    ticket = await daemon.fakes.admission.ticket()
    await fill(ticket, 1_000_000, 2)
    peer.sock.shutdown(socket.SHUT_WR)
    await ticket.cancelled.wait()
    await daemon.fakes.metrics.ended("cancelled")
    await until_nobody_is_connected(daemon)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n_read", [0, 1, 100_000])
async def test_who_leaves_while_it_is_written_to(start: Start, n_read: int, stream: bool) -> None:
    daemon: Daemon = await start(http=ENDLESS)
    daemon.fakes.admission.script = long_story
    peer = await Peer.ask(daemon, stream=stream)
    await (await daemon.fakes.admission.ticket()).read(13)
    while n_read > 0:
        n_read -= len(await peer.read(n_read))
    peer.close()
    await until_nobody_is_connected(daemon)


@pytest.mark.parametrize("rest", ["body", "requests"])
async def test_who_sends_more_behind_a_request_and_leaves_cancels_it(start: Start, rest: str) -> None:
    """A socket that is not read any more, because too much has come, would not tell that its client has left."""
    daemon: Daemon = await start(http=ENDLESS)
    daemon.fakes.admission.script = nothing
    peer = await Peer.ask(daemon)
    ticket = await daemon.fakes.admission.ticket()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9000000\r\n\r\n"
    )
    behind = head.encode() + b" " * 8_000_000 if rest == "body" else request(CHAT, PATHS[CHAT]) * 5000
    try:
        await peer.send(behind)
    except ConnectionError:
        pass
    peer.close()
    await ticket.cancelled.wait()
    await until_nobody_is_connected(daemon)
    assert daemon.fakes.metrics.reasons in ([], ["pipelining"])


async def test_one_request_behind_another_is_answered(daemon: Daemon) -> None:
    peer = await Peer.ask(daemon, n=2)
    await peer.send(request(CHAT, PATHS[CHAT] | {"stream": True}))
    data = b""
    while b"[DONE]" not in data:
        data += await peer.read(1 << 16)
    assert data.count(b"HTTP/1.1 200 OK") == 2


@pytest.mark.parametrize("sent", [b"", b"POST /v1/chat/comp", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"])
async def test_who_is_silent_between_requests_loses_the_connection(
    start: Start, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(server, "KEEPALIVE_SECONDS", 0.2)
    daemon: Daemon = await start()
    peer = await Peer.connect(daemon)
    await peer.send(sent)
    assert (b"200 OK" in await peer.rest()) is (b"/health" in sent)
    await until_nobody_is_connected(daemon)


async def test_an_answer_that_has_ended_holds_no_ticket_for_who_lags(start: Start) -> None:
    daemon: Daemon = await start(http=ENDLESS)
    daemon.fakes.admission.script = nothing
    peer = await Peer.ask(daemon, stream=True)
    ticket = await daemon.fakes.admission.ticket()
    await fill(ticket, 1_000_000, 2)
    ticket.finish()
    await ticket.read(3)
    assert ticket.over
    assert not ticket.cancelled.is_set()
    data = await peer.until(b"[DONE]")
    assert data.count(b"~") == 2_000_000
    assert data.count(b'"finish_reason":"stop"') == 1
