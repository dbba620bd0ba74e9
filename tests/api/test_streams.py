"""Streams over time: pings, lagging and vanished clients, at every stage."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import pytest

from daemon.api import sse
from daemon.messages import Failed, Tokens
from tests.api.conftest import Daemon, Start
from tests.fakes import FakeTicket, done, nothing

CHAT = "/v1/chat/completions"
PATHS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "x"}]},
    "/v1/completions": {"prompt": "x"},
    "/completion": {"prompt": "x"},
}

PATIENT = {"max_lag_kib": 200_000}
"""Room for the megabytes that these tests let a client lag."""


class Client:
    """A client on a raw socket that decides itself when to read and when to leave."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def send(cls, daemon: Daemon, path: str = CHAT, **fields: Any) -> Client:
        # A small buffer: the server soon notices that nobody reads.
        reader, writer = await asyncio.open_connection("127.0.0.1", daemon.port, limit=1024)
        body = json.dumps(PATHS[path] | fields).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        return cls(reader, writer)

    async def until(self, mark: bytes) -> bytes:
        """Read up to and including `mark`."""
        data = b""
        while mark not in data:
            part = await self.reader.read(65536)
            if not part:
                raise EOFError(data)
            data += part
        return data

    async def rest(self) -> bytes:
        """Read to the end of the connection, however it ends."""
        data = b""
        try:
            while part := await self.reader.read(1 << 20):
                data += part
        except ConnectionResetError:
            pass
        return data

    async def leave(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionResetError):
            await self.writer.wait_closed()


@pytest.mark.parametrize("path", PATHS)
async def test_pings_while_silent(start: Start, path: str) -> None:
    daemon: Daemon = await start(http={"ping_seconds": 0.05})
    daemon.fakes.admission.script = nothing
    daemon.fakes.admission.position = 0
    client = await Client.send(daemon, path, stream=True)
    data = await client.until(b": queued, position 1\n\n") + await client.until(b": queued, position 1\n\n")
    ticket = await daemon.fakes.admission.ticket()
    ticket.position = 11
    data += await client.until(b": queued, position 12\n\n")
    ticket.position = None
    data += await client.until(b": ping\n\n")
    ticket.text("word")
    data += await client.until(b"word")
    data += await client.until(b": ping\n\n")
    ticket.finish()
    data += await client.until(b"0\r\n\r\n")
    await client.leave()
    assert data.count(b": ping\n\n") >= 2
    assert b": queued, position" not in data.split(b"word")[1]


async def test_a_stream_that_runs_follows_new_limits(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "LOOK_SECONDS", 0.02)
    daemon: Daemon = await start(http={"ping_seconds": 300.0})
    daemon.fakes.admission.script = nothing
    client = await Client.send(daemon, "/v1/chat/completions", stream=True)
    await daemon.fakes.admission.ticket()
    await asyncio.sleep(0.1)  # it waits for the old time
    daemon.fakes.configure(http={"ping_seconds": 0.05})
    await client.until(b": ping\n\n")
    await client.leave()


async def test_no_ping_while_text_comes(start: Start) -> None:
    daemon: Daemon = await start(http={"ping_seconds": 300.0})
    reply = await daemon.chat(stream=True)
    assert b": ping" not in reply.body


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stage", ["queued", "prefill", "decode"])
async def test_a_closed_socket_cancels(daemon: Daemon, path: str, stage: str, stream: bool) -> None:
    daemon.fakes.admission.script = nothing
    daemon.fakes.admission.position = 2 if stage == "queued" else None
    client = await Client.send(daemon, path, stream=stream)
    ticket = await daemon.fakes.admission.ticket()
    if stage == "decode":
        ticket.text("word")
        await ticket.read(1)
    await client.leave()
    await ticket.cancelled.wait()
    await daemon.fakes.metrics.ended("cancelled")
    metrics = (await daemon.get("/metrics")).body.decode()
    assert f'hotset_cancelled_total{{stage="{stage}"}} 1.0' in metrics


async def test_a_failed_answer_is_not_counted_as_given_up(daemon: Daemon) -> None:
    daemon.fakes.admission.script = lambda submit: [Failed(id=submit.id, code="engine_failed", message="it died")]
    assert (await daemon.chat()).status == 500
    assert "hotset_cancelled_total{" not in (await daemon.get("/metrics")).body.decode()


async def test_a_closed_socket_cancels_every_answer(daemon: Daemon) -> None:
    daemon.fakes.admission.script = nothing
    client = await Client.send(daemon, stream=True, n=3)
    await daemon.fakes.admission.ticket(2)
    await client.leave()
    for ticket in daemon.fakes.admission.tickets:
        await ticket.cancelled.wait()


async def test_a_socket_closed_while_the_template_runs(daemon: Daemon) -> None:
    daemon.fakes.pool.gate = asyncio.Event()
    client = await Client.send(daemon)
    await daemon.fakes.pool.asked.wait()
    await client.leave()
    await daemon.fakes.metrics.ended("cancelled")
    daemon.fakes.pool.gate.set()
    assert (await daemon.chat()).status == 200
    assert len(daemon.fakes.admission.submits) == 1


async def test_a_cancelled_request_is_logged_and_counted_once(daemon: Daemon, capsys: Any) -> None:
    daemon.fakes.admission.script = nothing
    client = await Client.send(daemon, stream=True)
    ticket = await daemon.fakes.admission.ticket()
    await client.leave()
    await ticket.cancelled.wait()
    await daemon.fakes.metrics.ended("cancelled")
    lines = [line for line in capsys.readouterr().out.splitlines() if CHAT in line]
    assert len(lines) == 1
    assert "outcome=cancelled" in lines[0]


async def fill(ticket: FakeTicket, size: int, count: int) -> None:
    """Push `count` tokens of `size` characters each, and wait until all are taken."""
    for _ in range(count):
        ticket.text("x" * size)
    await ticket.read(count)


async def test_slow_reader_loses_its_stream(start: Start) -> None:
    daemon: Daemon = await start(http=PATIENT | {"write_timeout_seconds": 0.2, "ping_seconds": 0.05})
    daemon.fakes.admission.script = nothing
    client = await Client.send(daemon, stream=True)
    ticket = await daemon.fakes.admission.ticket()
    await fill(ticket, 1_000_000, 20)
    await ticket.cancelled.wait()
    assert b"[DONE]" not in await client.rest()
    await client.leave()
    await daemon.fakes.metrics.ended("slow_reader")
    assert daemon.fakes.metrics.outcomes == [(CHAT, "slow_reader")]


async def test_slow_reader_of_a_finished_answer(start: Start) -> None:
    daemon: Daemon = await start(http=PATIENT | {"write_timeout_seconds": 0.2})
    daemon.fakes.admission.script = lambda submit: [
        *(Tokens(id=submit.id, tokens=[1], text="x" * 1_000_000) for _ in range(20)),
        done(submit),
    ]
    client = await Client.send(daemon, stream=True)
    await daemon.fakes.metrics.ended("slow_reader")
    assert b"[DONE]" not in await client.rest()
    await client.leave()


async def test_deltas_are_merged_while_the_client_lags(start: Start) -> None:
    """The lagging client gets every character, in far fewer events than tokens; another stream is not held up."""
    daemon: Daemon = await start(http=PATIENT)
    daemon.fakes.admission.script = nothing
    client = await Client.send(daemon, stream=True)
    ticket = await daemon.fakes.admission.ticket()
    await fill(ticket, 1_000_000, 12)
    for number in range(1000):
        ticket.text(f"<{number}>")
    ticket.finish()
    await ticket.read(1013)
    daemon.fakes.admission.script = lambda submit: [Tokens(id=submit.id, tokens=[1], text="other"), done(submit)]
    assert (await daemon.chat(stream=True)).status == 200
    data = await client.until(b"0\r\n\r\n")
    await client.leave()
    assert data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert data.count(b"x") >= 12_000_000
    assert b"<0><1><2>" in data
    assert data.index(b"<999>") < data.index(b'"finish_reason":"stop"')
    assert data.count(b"data: ") < 40


async def test_failure_while_the_client_lags_comes_after_the_text(start: Start) -> None:
    daemon: Daemon = await start(http=PATIENT)
    daemon.fakes.admission.script = nothing
    client = await Client.send(daemon, stream=True)
    ticket = await daemon.fakes.admission.ticket()
    await fill(ticket, 1_000_000, 12)
    ticket.text("<last>")
    ticket.push(Failed(id=ticket.id, code="engine_failed", message="it died"))
    await ticket.read(14)
    data = await client.until(b"0\r\n\r\n")
    await client.leave()
    assert data.index(b"<last>") < data.index(b"it died")
    assert b"[DONE]" not in data


async def test_keep_alive_after_a_stream(daemon: Daemon) -> None:
    client = await Client.send(daemon, stream=True)
    await client.until(b"0\r\n\r\n")
    client.writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert b"200 OK" in await client.until(b'"ok"}')
    await client.leave()
