"""An OpenAI-compatible server that answers byte for byte as a test says, well or badly."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def delta(text: str, finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]})


def usage(n_prompt: int, n_output: int) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": n_prompt, "completion_tokens": n_output}})


def whole(*texts: str, n_prompt: int = 5) -> bytes:
    """A good answer; each text is a token."""
    return HEAD + b"".join(map(delta, texts)) + delta("", "length") + usage(n_prompt, len(texts)) + DONE


def chunked(answer: bytes, size: int) -> bytes:
    """The same answer in HTTP's chunks of `size` bytes."""
    head, _, body = answer.partition(b"\r\n\r\n")
    parts = [body[i : i + size] for i in range(0, len(body), size)]
    return (
        head + b"\r\nTransfer-Encoding: chunked\r\n\r\n" + b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in parts)
    ) + b"0\r\n\r\n"


def refusal(status: int, message: str) -> bytes:
    """A JSON error with its length."""
    body = json.dumps({"error": {"message": message, "code": "x"}}).encode()
    return b"HTTP/1.1 %d Nope\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


@dataclass
class Request:
    """What came in, and how to answer it."""

    path: str
    head: bytes
    body: dict[str, Any]
    writer: asyncio.StreamWriter
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()


Handler = Callable[[Request], Awaitable[None]]


def counted(request: Request) -> bytes:
    """A good answer whose usage counts words as tokens and five for the template."""
    texts = [message["content"] for message in request.body.get("messages", [])] or [request.body["prompt"]]
    n_output = request.body["max_tokens"]
    return whole(*("w " for _ in range(n_output)), n_prompt=5 + sum(len(text.split()) for text in texts))


async def answer_well(request: Request) -> None:
    await request.send(counted(request))


@asynccontextmanager
async def openai_server(handler: Handler = answer_well) -> AsyncIterator[tuple[int, list[Request]]]:
    """A port of loopback and the requests so far. Handlers that never return are ended with the server."""
    requests: list[Request] = []
    running: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length"))
        request = Request(head.split()[1].decode(), head, json.loads(await reader.readexactly(length)), writer)
        requests.append(request)
        watch = asyncio.create_task(_watch(reader, request))
        try:
            await handler(request)
        except ConnectionError:
            pass
        finally:
            watch.cancel()
            writer.close()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(serve(reader, writer))
        running.add(task)
        task.add_done_callback(running.discard)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], requests
    finally:
        server.close()
        for task in tuple(running):
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await server.wait_closed()


async def _watch(reader: asyncio.StreamReader, request: Request) -> None:
    try:
        await reader.read()
    except ConnectionError:
        pass
    request.gone.set()
