"""Request bodies: strict JSON, so that nothing odd gets past the edge."""

from __future__ import annotations

import asyncio
import json
import math
import re
from typing import Any

from aiohttp import web

from daemon.errors import BadRequest, HotsetError, PayloadTooLarge

MAX_DEPTH = 64
MAX_CONTAINERS = 500_000
"""Brackets in a body; far more than any chat has, few enough to walk without holding other streams up for long."""
MAX_OBJECTS = 50_000
"""Each costs ten microseconds or more once it is typed; other streams wait meanwhile."""
MAX_KEYS = 10_000
"""Keys of one object."""
MAX_DIGITS = 400
SILENCE_SECONDS = 60.0
"""What a client may be silent in the middle of a body."""
LARGE = 1024 * 1024
"""Bytes from which a body is read in a thread: 30 MiB of numbers take seconds, in which other streams go on."""
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


class UnsupportedMediaType(HotsetError):
    """The body is not application/json in UTF-8, or it is compressed (415)."""

    status = 415
    code = "unsupported_media_type"
    type = "invalid_request_error"


class BodyTimeout(HotsetError):
    """The client announced a body and stopped sending it (408)."""

    status = 408
    code = "request_timeout"
    type = "invalid_request_error"


async def read_json(request: web.Request) -> dict[str, Any]:
    """The body as a JSON object.

    Raises:
        UnsupportedMediaType: another content type or charset, or a content encoding.
        PayloadTooLarge: more than http.max_body_mib.
        BodyTimeout: nothing came for `SILENCE_SECONDS`.
        BadRequest: not JSON, not an object, or JSON that another reader would understand differently.
    """
    _check_type(request)
    raw = await _read(request)
    return parse(raw) if len(raw) < LARGE else await asyncio.to_thread(parse, raw)


async def _read(request: web.Request) -> bytes:
    raw = bytearray()
    try:
        while chunk := await _more(request):
            raw += chunk
            if len(raw) > request.client_max_size:
                raise too_large(request)
    except TimeoutError:
        raise BodyTimeout("The rest of the body did not come.") from None
    except (web.RequestPayloadError, ValueError):
        raise BadRequest("The body could not be read.") from None
    return bytes(raw)


async def _more(request: web.Request) -> bytes:
    async with asyncio.timeout(SILENCE_SECONDS):
        return await request.content.readany()


def too_large(request: web.Request) -> PayloadTooLarge:
    """The 413 of this application, with its limit."""
    return PayloadTooLarge(f"The body is larger than {request.client_max_size} bytes (http.max_body_mib).")


def parse(raw: bytes) -> dict[str, Any]:
    """Bytes to a JSON object.

    Raises:
        BadRequest: no UTF-8, no JSON, no object, duplicate keys, NaN or Infinity, numbers out of range, lone
            surrogates, more than `MAX_DEPTH` levels, `MAX_CONTAINERS` brackets, `MAX_OBJECTS` objects, or `MAX_KEYS`
            keys in one of them.
    """
    n_containers = raw.count(b"[") + raw.count(b"{")
    if n_containers > MAX_CONTAINERS:
        raise BadRequest(f"The body holds more than {MAX_CONTAINERS} opening brackets.")
    try:
        value = json.loads(
            raw.decode("utf-8"),
            parse_float=_float,
            parse_int=_int,
            parse_constant=_constant,
            object_pairs_hook=_Objects(),
        )
    except UnicodeDecodeError:
        raise BadRequest("The body is not UTF-8.") from None
    except json.JSONDecodeError as error:
        raise BadRequest(f"The body is not JSON: {error.msg} at character {error.pos}.") from None
    except RecursionError:
        raise _too_deep() from None
    if not isinstance(value, dict):
        raise BadRequest("The body must be a JSON object.")
    if n_containers > MAX_DEPTH:
        _check_depth(value)
    _check_surrogates(raw, value)
    return value


def _check_type(request: web.Request) -> None:
    if request.content_type != "application/json":
        raise UnsupportedMediaType("The body must be sent as Content-Type: application/json.")
    charset = request.charset
    if charset is not None and charset.lower() not in ("utf-8", "utf8"):
        raise UnsupportedMediaType("The body must be UTF-8.")
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise UnsupportedMediaType("The body must be sent without a Content-Encoding.")


def _constant(name: str) -> float:
    raise BadRequest(f"The body holds {name}, which is not JSON.")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise BadRequest("The body holds a number that is too large.")
    return value


def _int(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise BadRequest("The body holds a number that is too large.")
    return int(text)


class _Objects:
    """Makes the objects of one body, and counts them."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        self._count += 1
        if self._count > MAX_OBJECTS:
            raise BadRequest(f"The body holds more than {MAX_OBJECTS} objects.")
        if len(pairs) > MAX_KEYS:
            raise BadRequest(f"The body holds an object with more than {MAX_KEYS} keys.")
        result = dict(pairs)
        if len(result) != len(pairs):
            raise BadRequest("The body holds an object that names a key twice.")
        return result


def _check_depth(value: dict[str, Any]) -> None:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [child for node in level for child in _children(node) if isinstance(child, dict | list)]
        if not level:
            return
    raise _too_deep()


def _children(node: dict[str, Any] | list[Any]) -> Any:
    return node.values() if isinstance(node, dict) else node


def _too_deep() -> BadRequest:
    return BadRequest(f"The body is nested deeper than {MAX_DEPTH} levels.")


def _check_surrogates(raw: bytes, value: dict[str, Any]) -> None:
    """The bytes are UTF-8, so a lone surrogate can only come from an escape."""
    if not _SURROGATE_ESCAPE.search(raw):
        return
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise BadRequest("The body holds half of a surrogate pair, which is no character.") from None
