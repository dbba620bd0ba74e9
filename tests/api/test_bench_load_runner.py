"""The load generator against servers that answer well, badly, or not at all: clear reasons, and nothing hangs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from typer.testing import CliRunner, Result

from hotset_tools.bench import app
from hotset_tools.bench.clients import BadUrl, Endpoint
from hotset_tools.bench.load.arms import Arm, Workload, race
from hotset_tools.bench.load.bodies import Scale, Writer
from hotset_tools.bench.load.command import BadLoad, arm
from hotset_tools.bench.load.figures import Outcome
from hotset_tools.bench.load.plan import CHAT, Arrival, Source
from hotset_tools.bench.load.runner import Patience, ServerUnusable, measure_scale, play
from tests.openai_fake import HEAD, Handler, Request, answer_well, counted, delta, openai_server, refusal, whole

QUICK = Patience(silence=10.0, grace=10.0)
PLAN = tuple(Arrival(0.0, f"chat-{n}", CHAT, n, 0) for n in range(4))
BODIES = [Writer(1, Scale(1.0, 5.0)).body(arrival) for arrival in PLAN]


async def played(handler: Handler, patience: Patience = QUICK) -> list[Outcome]:
    async with openai_server(handler) as (port, _):
        return await play(Endpoint("127.0.0.1", port), PLAN, BODIES, patience)


async def test_every_request_has_its_outcome() -> None:
    outcomes = await played(answer_well)
    assert [o.arrival for o in outcomes] == list(PLAN)
    for o in outcomes:
        assert (o.heard.fault, o.heard.n_output, o.heard.n_prompt) == ("", CHAT.n_output, CHAT.n_prompt)
        assert 0 <= o.sent <= o.heard.texts[0] <= o.ended


async def test_open_loop_a_silent_server_gets_every_request_nevertheless() -> None:
    """No answer comes before the last request has been sent."""
    everybody = asyncio.Event()
    n = 0

    async def wait_for_all(request: Request) -> None:
        nonlocal n
        n += 1
        if n == len(PLAN):
            everybody.set()
        await everybody.wait()
        await answer_well(request)

    assert all(o.whole for o in await played(wait_for_all))


async def test_some_are_refused() -> None:
    async def refuse_one(request: Request) -> None:
        await request.send(refusal(429, "queue is full") if request.body["user"] == "chat-2" else counted(request))

    outcomes = await played(refuse_one)
    assert [o.refused for o in outcomes] == [False, False, True, False]
    assert outcomes[2].heard.fault == "HTTP 429: queue is full"


async def test_a_server_that_dies_mid_stream_fails_one_request() -> None:
    async def die(request: Request) -> None:
        if request.body["user"] == "chat-0":
            await request.send(HEAD + delta("a"))
            request.writer.transport.abort()
        else:
            await answer_well(request)

    outcomes = await played(die)
    assert [o.whole for o in outcomes] == [False, True, True, True]
    assert "broke off" in outcomes[0].heard.fault


async def test_who_never_ends_is_cut_off_and_its_connection_closed() -> None:
    closed = []

    async def drip(request: Request) -> None:
        await request.send(HEAD)
        while not request.gone.is_set():
            await request.send(b": ping\n\n")
            try:
                await asyncio.wait_for(request.gone.wait(), 0.01)
            except TimeoutError:
                continue
        closed.append(request)

    async with openai_server(drip) as (port, requests):
        outcomes = await play(Endpoint("127.0.0.1", port), PLAN, BODIES, Patience(silence=10, grace=0.1))
        await asyncio.gather(*(request.gone.wait() for request in requests))
    assert {o.heard.fault for o in outcomes} == {"not over 0.1 s after the last arrival"}


async def test_silence_and_garbage() -> None:
    async def nothing(request: Request) -> None:
        await request.gone.wait()

    assert {o.heard.fault for o in await played(nothing, Patience(0.05, 10))} == {"nothing came for 0.05 s"}
    garbage = await played(lambda request: request.send(HEAD + b"data: <html>\n\n"))
    assert all("no JSON object" in o.heard.fault for o in garbage)


async def test_no_server_at_all() -> None:
    async with openai_server() as (port, _):
        pass
    outcomes = await play(Endpoint("127.0.0.1", port), PLAN, BODIES, QUICK)
    assert all("efused" in o.heard.fault for o in outcomes)
    with pytest.raises(ServerUnusable, match="cannot be measured"):
        await measure_scale(Endpoint("127.0.0.1", port), "", QUICK)


async def test_an_empty_plan() -> None:
    assert await play(Endpoint("127.0.0.1", 1), (), [], QUICK) == []


class TestScale:
    async def test_from_the_server_s_counts(self) -> None:
        async with openai_server() as (port, requests):
            assert await measure_scale(Endpoint("127.0.0.1", port), "m", QUICK) == Scale(1.0, 5.0)
        assert requests[0].body["model"] == "m"

    @pytest.mark.parametrize(("n_prompt", "words"), [(0, "does not count"), (7, "oddly")])
    async def test_counts_that_cannot_be(self, n_prompt: int, words: str) -> None:
        answer = whole("a", n_prompt=n_prompt)
        async with openai_server(lambda request: request.send(answer)) as (port, _):
            with pytest.raises(ServerUnusable, match=words):
                await measure_scale(Endpoint("127.0.0.1", port), "", QUICK)


@asynccontextmanager
async def arms(*handlers: Handler) -> AsyncIterator[tuple[list[Arm], list[list[Request]]]]:
    async with AsyncExitStack() as stack:
        found = [await stack.enter_async_context(openai_server(handler)) for handler in handlers]
        yield [Arm(f"s{i}", Endpoint("127.0.0.1", port)) for i, (port, _) in enumerate(found)], [r for _, r in found]


async def test_all_servers_get_the_same_bytes_and_the_order_turns() -> None:
    said: list[str] = []
    workload = Workload((Source(CHAT, 8),), 0.6, n_rounds=2, speed=20.0, burst_seconds=0.2)
    async with arms(answer_well, answer_well) as (both, requests):
        found = await race(both, workload, QUICK, said.append)
    n = sum(len(one.plan) for one in workload.rounds()) + len(workload.burst().plan)
    assert n > 8
    key = lambda body: (body["messages"][0]["content"], body["user"])  # noqa: E731
    measured = [sorted((r.body for r in got if "user" in r.body), key=key) for got in requests]
    assert measured[0] == measured[1]
    assert len(measured[0]) == n
    assert [line.split(":")[0] for line in said] == ["s0", "s1", "s1", "s0", "s0", "s1"]
    assert all(server.n_failed == 0 and server.capacity for server in found)


async def test_a_server_that_breaks_later_is_a_figure_not_a_crash() -> None:
    async def break_later(request: Request) -> None:
        await request.send(refusal(500, "out of memory") if "user" in request.body else counted(request))

    async with arms(answer_well, break_later) as (both, _):
        good, bad = await race(both, Workload((Source(CHAT, 4),), 0.3, speed=50), QUICK, lambda _: None)
    assert good.n_failed == 0
    assert bad.n_failed == sum(kind.n_sent for kind in bad.kinds) > 0
    assert (bad.throughput, list(bad.faults)) == (0.0, ["HTTP 500: out of memory"])


class TestCommand:
    async def ask(self, *words: str) -> Result:
        return await asyncio.to_thread(CliRunner().invoke, app, ["load", *words])

    async def test_json_of_two_servers(self) -> None:
        async with arms(answer_well, answer_well) as (both, requests):
            urls = [f"{one.name}=http://127.0.0.1:{one.endpoint.port}/v1" for one in both]
            words = "--key k --model m --seconds 1 --rounds 1 --speed 10 --burst 0 --mix office --json".split()
            result = await self.ask("--url", urls[0], "--url", urls[1], *words)
        assert result.exit_code == 0, result.output
        found = json.loads(result.stdout)
        assert (found["ours"]["name"], [peer["name"] for peer in found["peers"]]) == ("s0", ["s1"])
        assert found["ours"]["kinds"].keys() == {"chat", "long", "title", "autocomplete"}
        assert found["ratios"]["throughput"] > 0
        assert all(b"Authorization: Bearer k" in r.head and r.body["model"] == "m" for r in requests[1])
        assert {r.path for r in requests[0]} == {"/v1/chat/completions", "/v1/completions"}

    async def test_table_of_one_server(self) -> None:
        async with arms(answer_well) as (one, _):
            words = "--seconds 1 --speed 5 --burst 0.5 --mix chats".split()
            result = await self.ask("--url", f"http://127.0.0.1:{one[0].endpoint.port}", *words)
        assert result.exit_code == 0, result.output
        assert "clients: 8 chat" in result.stdout

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (["--mix", "tea"], "there is no mix tea"),
            (["--mix", "office", "--clients", "2"], "at least 3 clients"),
            (["--clients", "33"], "--clients"),
            (["--seconds", "nan"], "--seconds"),
        ],
    )
    async def test_usage_errors(self, words: list[str], said: str) -> None:
        result = await self.ask("--url", "http://127.0.0.1:1", *words)
        assert (result.exit_code, said in result.output) == (2, True), result.output

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (["--url", "http://127.0.0.1:1", "--url", "http://127.0.0.1:1"], "same name"),
            (["--url", "a=ftp://x"], "no http"),
            (["--model", "/nonexistent.gguf"], "is no file"),
        ],
    )
    async def test_what_does_not_fit(self, words: list[str], said: str) -> None:
        result = await self.ask(*words)
        assert said in str(result.exception)

    def test_names(self) -> None:
        assert arm("mine=http://a:1/v1", "").name == "mine"
        assert arm("http://a:1/v1", "").name == "http://a:1/v1"
        with pytest.raises(BadLoad, match="name is missing"):
            arm("=http://a", "")
        with pytest.raises(BadUrl):
            arm("a=b", "")
