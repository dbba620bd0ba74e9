"""The benchmarks' client against servers that answer well, badly, late or not at all."""

from __future__ import annotations

import asyncio

import pytest

from hotset_tools.bench import heard
from hotset_tools.bench.clients import BadUrl, Endpoint, parse_url, stream, stream_together
from tests.openai_fake import DONE, HEAD, Request, chunked, delta, openai_server, refusal, usage, whole

BODY = b'{"messages": [], "max_tokens": 2}'


async def ask(port: int, silence_seconds: float = 30.0) -> heard.Heard:
    reply = await stream(Endpoint("127.0.0.1", port), "/chat/completions", BODY, silence_seconds=silence_seconds)
    assert reply.ended >= reply.sent
    return heard.understand(reply.pieces, reply.failure)


class TestUrls:
    def test_parts(self) -> None:
        assert parse_url("http://127.0.0.1:8080") == Endpoint("127.0.0.1", 8080, "/v1")
        assert parse_url("https://box.local/api/v1/", "secret") == Endpoint("box.local", 443, "/api/v1", True, "secret")
        assert parse_url("http://[::1]:9/v1").host == "::1"

    @pytest.mark.parametrize(
        "url",
        [
            "",
            "127.0.0.1:80",
            "ftp://a",
            "http://",
            "http://a:x",
            "http://a:99999",
            "http://a?x=1",
            "http://u:p@a",
            "http://[a",
        ],
    )
    def test_what_is_none(self, url: str) -> None:
        with pytest.raises(BadUrl):
            parse_url(url)

    @pytest.mark.parametrize("key", ["a\r\nb", "ü"])
    def test_a_key_cannot_break_out_of_its_header(self, key: str) -> None:
        with pytest.raises(BadUrl, match="ASCII"):
            parse_url("http://a", key)


async def test_what_is_sent() -> None:
    async with openai_server() as (port, requests):
        endpoint = parse_url(f"http://127.0.0.1:{port}/api", "k3y")
        await stream(endpoint, "/completions", b'{"prompt": "x", "max_tokens": 1}', headers={"X-A": "b"})
    assert requests[0].path == "/api/completions"
    assert requests[0].body["prompt"] == "x"
    for line in (b"Authorization: Bearer k3y\r\n", b"X-A: b\r\n", b"Connection: close\r\n"):
        assert line in requests[0].head


@pytest.mark.parametrize("answer", [whole("a", "b"), chunked(whole("a", "b"), 7)])
async def test_a_whole_answer(answer: bytes) -> None:
    async with openai_server(lambda request: request.send(answer)) as (port, _):
        found = await ask(port)
    assert (found.fault, found.n_output, len(found.texts)) == ("", 2, 2)


async def test_a_server_that_keeps_the_connection_does_not_hold_the_client() -> None:
    async def answer(request: Request) -> None:
        await request.send(whole("a"))
        await request.gone.wait()

    async def refuse(request: Request) -> None:
        await request.send(refusal(429, "full"))
        await request.gone.wait()

    async with openai_server(answer) as (port, _):
        assert (await ask(port)).fault == ""
    async with openai_server(refuse) as (port, _):
        assert (await ask(port)).fault == "HTTP 429: full"


async def test_silence_ends_a_request_and_closes_its_connection() -> None:
    async def nothing(request: Request) -> None:
        await request.gone.wait()

    async def begin(request: Request) -> None:
        await request.send(HEAD + delta("a"))
        await request.gone.wait()

    async with openai_server(nothing) as (port, requests):
        assert (await ask(port, 0.05)).fault == "nothing came for 0.05 s"
        await requests[0].gone.wait()
    async with openai_server(begin) as (port, _):
        assert (await ask(port, 0.05)).fault == "the stream broke off: nothing came for 0.05 s"


async def test_a_server_that_dies_mid_stream() -> None:
    async def die(request: Request) -> None:
        await request.send(HEAD + delta("a"))
        request.writer.transport.abort()

    async with openai_server(die) as (port, _):
        assert "broke off" in (await ask(port)).fault


async def test_garbage_and_nothing() -> None:
    async with openai_server(lambda request: request.send(b"\x00\x01garbage")) as (port, _):
        assert "no HTTP response" in (await ask(port)).fault
    async with openai_server(lambda request: request.send(b"")) as (port, _):
        assert "without an answer" in (await ask(port)).fault


async def test_nobody_listens() -> None:
    async with openai_server() as (port, _):
        pass
    assert "refused" in (await ask(port)).fault.lower()


async def test_a_name_that_is_none() -> None:
    reply = await stream(Endpoint("no-such-host.invalid", 80), "/chat/completions", BODY)
    assert reply.failure


async def test_too_much_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotset_tools.bench.clients._MAX_BYTES", 1000)

    async def flood(request: Request) -> None:
        while not request.gone.is_set():
            await request.send(b"x" * 500)

    async with openai_server(flood) as (port, _):
        reply = await stream(Endpoint("127.0.0.1", port), "/chat/completions", BODY)
    assert "MiB came" in reply.failure


async def test_being_cancelled_closes_the_connection() -> None:
    asked = asyncio.Event()

    async def wait(request: Request) -> None:
        asked.set()
        await request.gone.wait()

    async with openai_server(wait) as (port, requests):
        task = asyncio.create_task(stream(Endpoint("127.0.0.1", port), "/chat/completions", BODY))
        await asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await requests[0].gone.wait()


async def test_clients_together_and_their_errors() -> None:
    async with openai_server() as (port, requests):
        answers = await stream_together(port, 3, 4, 0)
    assert [answer.n_tokens for answer in answers] == [4, 4, 4]
    assert all(0 < answer.first <= answer.last for answer in answers)
    assert len({request.body["messages"][0]["content"] for request in requests}) == 3
    async with openai_server(lambda request: request.send(refusal(400, "no"))) as (port, _):
        with pytest.raises(RuntimeError, match="400"):
            await stream_together(port, 1, 4, 0)


async def test_the_word_done_within_a_text_ends_nothing() -> None:
    answer = HEAD + delta("data: [DONE]") + delta("b", "length") + usage(1, 2) + DONE
    async with openai_server(lambda request: request.send(answer)) as (port, _):
        assert len((await ask(port)).texts) == 2
