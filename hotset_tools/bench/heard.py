"""What the bytes of a streamed answer say: pure, and done after the measurement.

HTTP/1.1 with or without chunks (RFC 9112), and server-sent events as OpenAI's API sends them. An event counts from the
arrival of the bytes that complete its line.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

Pieces = Sequence[tuple[float, bytes]]
"""(time, bytes) in the order of arrival."""

_SHOWN = 300
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})(?: |$)")


@dataclass(frozen=True, slots=True)
class Heard:
    """One answer understood.

    `events` are the times of all data events, `texts` of those that brought text. `n_prompt` and `n_output` are the
    server's own counts (`usage`). `fault` is empty for a whole answer; `status` is 0 where there was none.
    """

    status: int = 0
    events: tuple[float, ...] = ()
    texts: tuple[float, ...] = ()
    n_prompt: int = 0
    n_output: int = 0
    finish: str = ""
    fault: str = ""


class _Bad(Exception):
    """The bytes are not what they should be."""


def is_whole(data: bytes) -> bool:
    """Whether `data` is a complete response with a Content-Length."""
    head, separator, body = data.partition(b"\r\n\r\n")
    length = _header(head, b"content-length") if separator else b""
    return length.isdigit() and len(body) >= int(length)


def understand(pieces: Pieces, failure: str = "") -> Heard:
    """The answer in `pieces`; `failure` is why the connection ended, if it did not end well."""
    data = b"".join(piece for _, piece in pieces)
    if not data:
        return Heard(fault=failure or "the connection was closed without an answer")
    head, separator, _ = data.partition(b"\r\n\r\n")
    status = _STATUS.match(head)
    if status is None or not separator:
        return Heard(fault=failure or f"no HTTP response: {_show(data)}")
    code = int(status[1])
    chunked = b"chunked" in _header(head, b"transfer-encoding").lower()
    try:
        body = list(_dechunk(data, len(head) + 4)) if chunked else [(len(head) + 4, data[len(head) + 4 :])]
    except _Bad as error:
        return Heard(status=code, fault=str(error))
    if code != 200:
        return Heard(status=code, fault=_refusal(code, b"".join(part for _, part in body)))
    return _events(code, _lines(body, pieces), failure)


def _header(head: bytes, name: bytes) -> bytes:
    """The value of a header, empty where there is none."""
    match = re.search(rb"^" + name + rb":[ \t]*([^\r\n]*?)[ \t]*\r?$", head, re.IGNORECASE | re.MULTILINE)
    return match[1] if match else b""


def _dechunk(data: bytes, at: int) -> Iterator[tuple[int, bytes]]:
    """(offset in `data`, bytes) of the body's parts; a last chunk that is cut off gives what there is of it."""
    while True:
        end = data.find(b"\r\n", at)
        if end < 0:
            return
        size = data[at:end].split(b";")[0].strip()
        if not re.fullmatch(rb"[0-9a-fA-F]{1,8}", size):
            raise _Bad(f"no chunk of HTTP: {_show(data[at : at + 80])}")
        n = int(size, 16)
        if n == 0:
            return
        yield end + 2, data[end + 2 : end + 2 + n]
        at = end + 2 + n + 2


def _lines(body: Sequence[tuple[int, bytes]], pieces: Pieces) -> Iterator[tuple[float, bytes]]:
    """(time, line) of every complete line, without its end."""
    arrived = list(accumulate(len(piece) for _, piece in pieces))
    rest = b""
    for offset, part in body:
        at = 0
        while (end := part.find(b"\n", at)) >= 0:
            yield pieces[bisect_left(arrived, offset + end + 1)][0], (rest + part[at:end]).rstrip(b"\r")
            rest, at = b"", end + 1
        rest += part[at:]


def _events(code: int, lines: Iterator[tuple[float, bytes]], failure: str) -> Heard:
    events: list[float] = []
    texts: list[float] = []
    usage: dict[str, Any] = {}
    finish, done = "", False
    for at, line in lines:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            done = True
            break
        value = _object(data)
        if value is None:
            return Heard(code, tuple(events), tuple(texts), fault=f"an event that is no JSON object: {_show(data)}")
        if "error" in value:
            return Heard(code, tuple(events), tuple(texts), fault=f"error in the stream: {_message(value)}")
        events.append(at)
        if _text(value):
            texts.append(at)
        finish = _finish(value) or finish
        usage = value["usage"] if isinstance(value.get("usage"), dict) else usage
    n_prompt, n_output = _count(usage, "prompt_tokens"), _count(usage, "completion_tokens")
    fault = _fault(done, finish, n_output, failure)
    return Heard(code, tuple(events), tuple(texts), n_prompt, n_output, finish, fault)


def _fault(done: bool, finish: str, n_output: int, failure: str) -> str:
    """What is missing of a whole answer."""
    if not done:
        return f"the stream broke off: {failure or 'it was closed without [DONE]'}"
    if not finish:
        return "the stream ended without a finish_reason"
    if finish not in ("stop", "length", "tool_calls"):
        return f"finish_reason {finish!r}"
    return "" if n_output > 0 else "the stream ended without usage.completion_tokens"


def _object(data: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(data)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _choices(value: dict[str, Any]) -> list[dict[str, Any]]:
    choices = value.get("choices")
    return [choice for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []


def _text(value: dict[str, Any]) -> bool:
    """Whether a chunk brought any text: of the answer or of thoughts, of a chat or of a completion."""
    for choice in _choices(value):
        delta = choice.get("delta")
        parts = delta if isinstance(delta, dict) else choice
        if any(parts.get(name) for name in ("content", "reasoning_content", "text")):
            return True
    return False


def _finish(value: dict[str, Any]) -> str:
    return next((str(c["finish_reason"]) for c in _choices(value) if c.get("finish_reason")), "")


def _count(usage: dict[str, Any], name: str) -> int:
    n = usage.get(name)
    return n if isinstance(n, int) and n >= 0 else 0


def _refusal(code: int, body: bytes) -> str:
    value = _object(body)
    return f"HTTP {code}: {_message(value) if value else _show(body)}"


def _message(value: dict[str, Any]) -> str:
    error = value.get("error", value)
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)[:_SHOWN]


def _show(data: bytes) -> str:
    return repr(data[:80])
