"""Streaming clients as light as can be: they share the machine with the servers they measure."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass

_MEASURED = "Write a long story about a harbour town. Number {i}: "


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
    prompts = [_MEASURED.format(i=round_number * n_clients + i) for i in range(n_clients)]
    return await asyncio.gather(*(_chat(port, _body(prompt, n_tokens), began) for prompt in prompts))


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


async def _chat(port: int, body: bytes, began: float) -> Answer:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    writer.write(head.encode() + body)
    try:
        return await _read(reader, began)
    finally:
        writer.close()


async def _read(reader: asyncio.StreamReader, began: float) -> Answer:
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError(f"the server answered {status.decode().strip()}: {(await reader.read())[:300]!r}")
    first = last = 0.0
    n_tokens = 0
    async for line in reader:
        if line.startswith(b"data: {"):
            last = time.perf_counter() - began
            first = first or last
            if b'"usage":{' in line or b'"usage": {' in line:
                n_tokens = json.loads(line[6:])["usage"]["completion_tokens"]
    return Answer(n_tokens, first, last)
