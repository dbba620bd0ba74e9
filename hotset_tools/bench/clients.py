"""Streaming clients as light as can be: they share the machine with the servers they measure.

While an answer comes, a client only notes when which bytes arrived; JSON and figures wait until nobody is measured any
more (`hotset_tools.bench.heard`).
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from daemon.errors import HotsetError
from hotset_tools.bench import heard

_MEASURED = "Write a long story about a harbour town. Number {i}: "
_END = b"\ndata: [DONE]"
_MAX_BYTES = 64 * 1024 * 1024


class BadUrl(HotsetError):
    """A base URL that no client can use."""

    code = "bad_url"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where an OpenAI-compatible server is: `prefix` comes before "/chat/completions"."""

    host: str
    port: int
    prefix: str = "/v1"
    tls: bool = False
    key: str = ""

    def head(self, path: str, n_body: int, headers: Mapping[str, str]) -> bytes:
        """The head of a POST; `path` begins with a slash."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        fields = {
            "Host": f"{host}:{self.port}",
            "Content-Type": "application/json",
            "Content-Length": str(n_body),
            "Connection": "close",
            **({"Authorization": f"Bearer {self.key}"} if self.key else {}),
            **headers,
        }
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        return f"POST {self.prefix}{path} HTTP/1.1\r\n{lines}\r\n".encode()


def parse_url(url: str, key: str = "") -> Endpoint:
    """A base URL such as http://127.0.0.1:8080/v1; without a path, "/v1" is meant.

    Raises:
        BadUrl: it is none.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise BadUrl(f"{url} is no URL: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise BadUrl(f"{url} is no http:// or https:// URL")
    if parts.query or parts.fragment or parts.username or parts.password:
        raise BadUrl(f"{url}: a base URL has no query, fragment or password; a key is given with --key")
    if not (key.isascii() and key.isprintable()):
        raise BadUrl("a key is printable ASCII")
    tls = parts.scheme == "https"
    default = 443 if tls else 80
    return Endpoint(parts.hostname, default if port is None else port, parts.path.rstrip("/") or "/v1", tls, key)


@dataclass(slots=True)
class Reply:
    """What came back for one request, as it came. Times are of `time.perf_counter`.

    `pieces` pairs the time of an arrival with its bytes, the head of the response first. `failure` says why nothing
    more came: empty where the server ended the response by itself.
    """

    sent: float
    ended: float = 0.0
    failure: str = ""
    pieces: list[tuple[float, bytes]] = field(default_factory=list)


async def stream(
    endpoint: Endpoint,
    path: str,
    body: bytes,
    *,
    silence_seconds: float = 60.0,
    headers: Mapping[str, str] | None = None,
) -> Reply:
    """POST `body` and collect the answer until it ends, breaks, or nothing came for `silence_seconds`.

    Raises nothing of the network: `Reply.failure` tells it. Being cancelled closes the connection.
    """
    loop = asyncio.get_running_loop()
    reply = Reply(time.perf_counter())
    collector = _Collector(reply, loop.create_future())
    context = ssl.create_default_context() if endpoint.tls else None
    try:
        async with asyncio.timeout(silence_seconds):
            await loop.create_connection(lambda: collector, endpoint.host, endpoint.port, ssl=context)
        collector.send(endpoint.head(path, len(body), headers or {}) + body)
        await _until_over(collector, silence_seconds)
    except TimeoutError:
        reply.failure = f"nothing came for {silence_seconds:g} s"
    except (OSError, ssl.SSLError) as error:
        reply.failure = f"{type(error).__name__}: {error.strerror or error}"
    finally:
        reply.ended = time.perf_counter()
        collector.close()
    return reply


async def _until_over(collector: _Collector, silence_seconds: float) -> None:
    while True:
        left = collector.heard + silence_seconds - time.perf_counter()
        if left <= 0:
            raise TimeoutError
        done, _ = await asyncio.wait((collector.over,), timeout=left)
        if done:
            return


class _Collector(asyncio.Protocol):
    """Notes what arrives; `over` is done when the answer has ended or the connection has."""

    def __init__(self, reply: Reply, over: asyncio.Future[None]) -> None:
        self.over = over
        self.heard = reply.sent
        self._reply = reply
        self._tail = b""
        self._n_bytes = 0
        self._transport: asyncio.Transport | None = None

    def send(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self.heard = time.perf_counter()
        self._reply.pieces.append((self.heard, data))
        self._n_bytes += len(data)
        self._tail = (self._tail + data)[-64:]
        if _END in self._tail or self._body_is_whole():
            self._finish()
        elif self._n_bytes > _MAX_BYTES:
            self._reply.failure = f"more than {_MAX_BYTES >> 20} MiB came"
            self._finish()

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None and not self.over.done():
            self._reply.failure = f"the connection broke: {exc}"
        self._finish()

    def _body_is_whole(self) -> bool:
        """Whether a response with a length, an error as a rule, is complete; streams have none."""
        pieces = self._reply.pieces
        return len(pieces) <= 16 and heard.is_whole(b"".join(data for _, data in pieces))

    def _finish(self) -> None:
        if not self.over.done():
            self.over.set_result(None)


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed answer; seconds since the round began."""

    n_tokens: int
    first: float
    last: float


async def stream_together(port: int, n_clients: int, n_tokens: int, round_number: int) -> list[Answer]:
    """`n_clients` chats at once against 127.0.0.1:`port`, each `n_tokens` long whatever the model wants.

    Raises:
        RuntimeError: a server answered with an error.
    """
    began = time.perf_counter()
    endpoint = Endpoint("127.0.0.1", port)
    prompts = [_MEASURED.format(i=round_number * n_clients + i) for i in range(n_clients)]
    bodies = [_body(prompt, n_tokens) for prompt in prompts]
    replies = await asyncio.gather(*(stream(endpoint, "/chat/completions", body) for body in bodies))
    return [_answer(reply, began) for reply in replies]


def _answer(reply: Reply, began: float) -> Answer:
    answer = heard.understand(reply.pieces, reply.failure)
    if answer.fault:
        raise RuntimeError(f"the server failed: {answer.fault}")
    return Answer(answer.n_output, answer.events[0] - began, answer.events[-1] - began)


def _body(prompt: str, n_tokens: int) -> bytes:
    return json.dumps(
        {
            "messages": [{"role": "user", "content": prompt}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": n_tokens,
            "ignore_eos": True,
            "cache_prompt": False,
            "seed": 1,
            "temperature": 0.8,
        }
    ).encode()
