"""What no well-behaved client sends: every answer is JSON, and none is a 500."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest
from pydantic import ValidationError

from daemon.api import body, schema
from tests.api.conftest import Daemon, Reply, Start

CHAT = "/v1/chat/completions"


def message(
    body: bytes,
    *,
    method: str = "POST",
    path: str = CHAT,
    host: str = "localhost",
    content_type: str | None = "application/json",
    extra: str = "",
) -> bytes:
    """A request as bytes."""
    head = f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n{extra}"
    if content_type is not None:
        head += f"Content-Type: {content_type}\r\n"
    return head.encode("latin-1") + b"\r\n" + body


def check(reply: Reply, status: int, code: str) -> None:
    """An error of this service, with an id."""
    assert reply.status == status, reply.body
    assert reply.headers["content-type"].startswith("application/json")
    assert reply.json()["error"].keys() == {"message", "type", "param", "code"}
    assert reply.json()["error"]["code"] == code
    assert reply.headers["x-request-id"]


GOOD = b'{"messages":[{"role":"user","content":"x"}]'
NOT_JSON = {
    "empty": b"",
    "text": b"hello",
    "cut": GOOD,
    "trailing": GOOD + b"}}",
    "list": b"[]",
    "string": b'"x"',
    "number": b"5",
    "null": b"null",
    "latin1": GOOD + b',"user":"\xe9"}',
    "utf16": (GOOD + b"}").decode().encode("utf-16"),
    "encoded surrogate": GOOD + b',"user":"\xed\xa0\x80"}',
    "byte order mark": b"\xef\xbb\xbf" + GOOD + b"}",
    "duplicate key": GOOD + b',"n":1,"n":2}',
    "duplicate key inside": GOOD + b',"metadata":{"a":1,"a":1}}',
    "nan": GOOD + b',"temperature":NaN}',
    "infinity": GOOD + b',"temperature":Infinity}',
    "negative infinity": GOOD + b',"x":[-Infinity]}',
    "float overflow": GOOD + b',"temperature":1e999}',
    "integer of 500 digits": GOOD + b',"seed":' + b"9" * 500 + b"}",
    "integer of 10000 digits": GOOD + b',"seed":' + b"9" * 10_000 + b"}",
    "lone surrogate": GOOD + b',"user":"\\ud800"}',
    "lone low surrogate": GOOD + b',"user":"\\udc00x"}',
    "lone surrogate in a key": GOOD + b',"\\uDBFF":1}',
    "surrogate in the prompt": b'{"messages":[{"role":"user","content":"\\uD83D"}]}',
    "control character": GOOD + b',"user":"\x00"}',
    "65 levels": GOOD + b',"x":' + b"[" * 64 + b"]" * 64 + b"}",
    "objects": GOOD + b',"x":' + b'{"a":' * 70 + b"1" + b"}" * 71,
    "100000 levels": GOOD + b',"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a million lists": GOOD + b',"x":[' + b"[]," * 1_000_000 + b"[]]}",
    "100000 levels that do not end": b'{"x":' + b"[" * 100_000,
}


@pytest.mark.parametrize("body", NOT_JSON.values(), ids=NOT_JSON.keys())
async def test_bodies_that_are_no_request(daemon: Daemon, body: bytes) -> None:
    check(await daemon.raw(message(body)), 400, "invalid_request")
    assert daemon.fakes.admission.submits == []


HARMLESS = {
    "surrogate pair": GOOD + b',"user":"\\ud83d\\ude00"}',
    "63 levels": GOOD + b',"x":' + b"[" * 63 + b"]" * 63 + b"}",
    "brackets in a string": GOOD + b',"x":"' + b"[{" * 1000 + b'"}',
    "wide": GOOD + b',"x":[' + b"[]," * 1000 + b"[]]}",
    "escaped backslash before u": GOOD + b',"user":"\\\\ud800"}',
    "white space": b" \n" + GOOD + b"} \r\n",
    "large but finite": GOOD + b',"x":1e308}',
}


@pytest.mark.parametrize("body", HARMLESS.values(), ids=HARMLESS.keys())
async def test_odd_bodies_that_are_fine(daemon: Daemon, body: bytes) -> None:
    reply = await daemon.raw(message(body))
    assert reply.status == 200, reply.body


@pytest.mark.parametrize(
    "content_type",
    [
        None,
        "text/plain",
        "application/x-www-form-urlencoded",
        "application/json; charset=latin-1",
        "multipart/form-data",
        "application/jsonx",
    ],
)
async def test_other_content_types(daemon: Daemon, content_type: str | None) -> None:
    check(await daemon.raw(message(GOOD + b"}", content_type=content_type)), 415, "unsupported_media_type")


@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings", "/nowhere"])
@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "unknown"])
async def test_compressed_bodies_are_not_touched(
    daemon: Daemon, path: str, encoding: str, caplog: pytest.LogCaptureFixture
) -> None:
    reply = await daemon.raw(message(GOOD + b"}", path=path, extra=f"Content-Encoding: {encoding}\r\n"))
    assert reply.status == {CHAT: 415, "/v1/embeddings": 501, "/nowhere": 404}[path]
    assert reply.json()["error"].keys() == {"message", "type", "param", "code"}
    assert not caplog.records


@pytest.mark.parametrize("content_type", ["application/json", "application/json; charset=utf-8", "Application/JSON"])
async def test_json_content_types(daemon: Daemon, content_type: str) -> None:
    assert (await daemon.raw(message(GOOD + b"}", content_type=content_type))).status == 200


async def test_announced_size_is_refused_before_the_body(start: Start) -> None:
    daemon: Daemon = await start(http={"max_body_mib": 1})
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    reply = await daemon.raw((head + f"Content-Length: {1024 * 1024 + 1}\r\n\r\n").encode())
    check(reply, 413, "payload_too_large")
    assert "1048576" in reply.json()["error"]["message"]


async def test_chunked_body_that_grows_too_large(start: Start) -> None:
    daemon: Daemon = await start(http={"max_body_mib": 1})
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n"
    )
    chunk = b"100000\r\n" + b" " * 0x100000 + b"\r\n"
    reply = await daemon.raw(head.encode() + b"\r\n" + chunk + chunk + b"0\r\n\r\n")
    check(reply, 413, "payload_too_large")


async def test_body_of_the_largest_size(start: Start) -> None:
    daemon: Daemon = await start(http={"max_body_mib": 1})
    body = (GOOD + b"}").ljust(1024 * 1024)
    assert (await daemon.raw(message(body))).status == 200


@pytest.mark.parametrize(
    "path", ["/", "/v1", "/nope", "/v1/nope/", "/v1/v1/models", "/%2e%2e/etc/passwd", "/v1//models"]
)
async def test_unknown_paths(daemon: Daemon, path: str) -> None:
    check(await daemon.raw(message(b"", method="GET", path=path)), 404, "not_found")


async def test_errors_do_not_quote_the_request(daemon: Daemon) -> None:
    reply = await daemon.raw(message(b'{"secret": secret}', path="/v1/secret"))
    assert b"secret" not in reply.body
    reply = await daemon.chat(temperature="secret", messages=[{"role": "secret", "content": "x"}])
    assert b"secret" not in reply.body


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", CHAT, "POST"),
        ("POST", "/v1/models", "GET,HEAD"),
        ("DELETE", "/health", "GET,HEAD"),
        ("PATCH", "/props", "GET,HEAD"),
    ],
)
async def test_wrong_methods(daemon: Daemon, method: str, path: str, allow: str) -> None:
    reply = await daemon.raw(message(b"", method=method, path=path))
    check(reply, 405, "method_not_allowed")
    assert reply.headers["allow"] == allow


async def test_head(daemon: Daemon) -> None:
    reply = await daemon.request("HEAD", "/health")
    assert (reply.status, reply.body) == (200, b"")


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /health HTTP/9.9\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n",
    ],
)
async def test_what_is_no_http(daemon: Daemon, data: bytes) -> None:
    reply = await daemon.raw(data)
    assert reply.status == 400
    assert reply.json()["error"]["code"] == "invalid_request"


async def test_unknown_expectation(daemon: Daemon) -> None:
    reply = await daemon.raw(message(GOOD + b"}", extra="Expect: the-unexpected\r\n"))
    check(reply, 417, "expectation_failed")


async def test_unknown_expectation_where_there_is_nothing(daemon: Daemon) -> None:
    reply = await daemon.raw(message(GOOD + b"}", path="/nowhere", extra="Expect: the-unexpected\r\n"))
    check(reply, 417, "expectation_failed")


async def test_continue_is_offered(daemon: Daemon) -> None:
    body = {"messages": [{"role": "user", "content": "x"}]}
    assert (await daemon.post(CHAT, body, expect100=True)).status == 200


async def test_bug_in_a_handler_is_a_json_500(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon.fakes.admission, "submit", lambda *_args, **_kw: 1 / 0)
    reply = await daemon.chat()
    check(reply, 500, "internal_error")
    assert "ZeroDivision" not in reply.body.decode()


async def test_bug_in_a_stream_is_an_error_event(daemon: Daemon) -> None:
    daemon.fakes.admission.script = lambda submit: ["no event"]  # type: ignore[list-item]
    reply = await daemon.chat(stream=True)
    assert json.loads(reply.events()[-1].removeprefix("data: "))["error"]["code"] == "internal_error"


async def test_unknown_fields_are_logged_once_per_name(daemon: Daemon, capsys: Any) -> None:
    for _ in range(3):
        assert (await daemon.chat(flux_capacitor=1)).status == 200
    assert capsys.readouterr().out.count("flux_capacitor") == 1


async def test_number_of_remembered_names_is_bounded(daemon: Daemon) -> None:
    from daemon.api.context import MAX_UNKNOWN, UNKNOWN

    await daemon.chat(**{f"x{number}": 1 for number in range(1000)})
    assert len(daemon.app[UNKNOWN]) == MAX_UNKNOWN


MANY = 5000
MESSAGE = {"role": "user", "content": "x"}
FAULTY: dict[str, tuple[type[schema.Body], dict[str, Any]]] = {
    "messages": (schema.ChatRequest, {"messages": [1] * MANY}),
    "content": (schema.ChatRequest, {"messages": [{"role": "user", "content": [1] * MANY}]}),
    "tool calls": (schema.ChatRequest, {"messages": [{"role": "user", "tool_calls": [1] * MANY}]}),
    "template": (schema.ChatFields, {"messages": [MESSAGE], "chat_template_kwargs": {str(i): [] for i in range(MANY)}}),
    "prompt": (schema.CompletionRequest, {"prompt": [1.5] * MANY}),
    "prompts": (schema.CompletionRequest, {"prompt": [[1.5] * MANY]}),
    "native prompt": (schema.NativeRequest, {"prompt": [1.5] * MANY}),
    "native prompts": (schema.NativeRequest, {"prompt": [[1.5] * MANY]}),
    "stop": (schema.NativeRequest, {"prompt": "x", "stop": [1] * MANY}),
    "breakers": (schema.NativeRequest, {"prompt": "x", "dry_sequence_breakers": [1] * MANY}),
    "bias": (schema.NativeRequest, {"prompt": "x", "logit_bias": {str(i): "x" for i in range(MANY)}}),
    "bias pairs": (schema.NativeRequest, {"prompt": "x", "logit_bias": [1] * MANY}),
    "long bias pair": (schema.NativeRequest, {"prompt": "x", "logit_bias": [[None] * MANY]}),
    "tokens": (schema.DetokenizeRequest, {"tokens": ["x"] * MANY}),
}


@pytest.mark.parametrize(("model", "data"), FAULTY.values(), ids=FAULTY.keys())
def test_faults_are_not_collected(model: type[schema.Body], data: dict[str, Any]) -> None:
    """Four megabytes of them took a minute and six gigabytes, and everybody else waited."""
    with pytest.raises(ValidationError) as raised:
        model.model_validate(data)
    assert raised.value.error_count() <= 8


async def test_a_large_body_holds_nobody_up(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, others_go_on = threading.Event(), threading.Event()
    parse = body.parse

    def slowly(raw: bytes) -> dict[str, Any]:
        begun.set()
        assert others_go_on.wait(5)
        return parse(raw)

    monkeypatch.setattr(body, "parse", slowly)
    large = message(GOOD + b',"x":"' + b" " * body.LARGE + b'"}')
    reply = asyncio.create_task(daemon.raw(large))
    assert await asyncio.to_thread(begun.wait, 5)
    assert (await daemon.raw(message(b"", method="GET", path="/health"))).status == 200
    others_go_on.set()
    assert (await reply).status == 200


@pytest.mark.parametrize("framing", ["Content-Length: 500\r\n\r\n{", "Transfer-Encoding: chunked\r\n\r\n5\r\n{"])
async def test_a_body_that_does_not_end(daemon: Daemon, framing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "SILENCE_SECONDS", 0.1)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{framing}"
    check(await asyncio.wait_for(daemon.raw(head.encode()), 5), 408, "request_timeout")
