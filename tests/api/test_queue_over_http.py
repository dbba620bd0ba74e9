"""The HTTP layer over the real admission: what clients see of the queue."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from daemon.admission import Admission
from daemon.messages import Cancel, Submit, Tokens
from tests.api.conftest import Daemon, Reply, Start
from tests.fakes import done

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}
TYPED = {"prompt": "def f(", "max_tokens": 8, "prompt_cache_key": "file.py"}


class Engine:
    """One place; answers when the test says so, and gives up at once what it is told to."""

    def __init__(self) -> None:
        self.capacity, self.retry_after = 1, 5
        self.has: list[Submit] = []
        self.got: list[Submit] = []
        self.admission: Admission

    def send(self, command: Submit | Cancel) -> None:
        if isinstance(command, Submit):
            self.got.append(command)
            self.has.append(command)
            return
        for submit in [one for one in self.has if one.id == command.id]:
            self.has.remove(submit)
            asyncio.get_running_loop().call_soon(self.admission.deliver, done(submit, finish_reason="cancelled"))

    def finish(self, **changes: Any) -> None:
        submit = self.has.pop(0)
        self.admission.deliver(Tokens(id=submit.id, tokens=[65], text="word"))
        self.admission.deliver(done(submit, **changes))


class Service:
    def __init__(self, daemon: Daemon) -> None:
        self.daemon, self.engine = daemon, Engine()
        services = daemon.fakes.services
        self.admission = self.engine.admission = Admission(self.engine, lambda: services.config.queue)
        services.admission = self.admission
        self.tasks: list[asyncio.Task[Reply]] = []

    async def send(
        self, body: dict[str, Any], path: str = "/v1/chat/completions", user: str = ""
    ) -> asyncio.Task[Reply]:
        """Send it, and return once it is queued, runs, or is refused."""
        before = self.known()
        headers = {"X-OpenWebUI-User-Id": user} if user else {}
        task = asyncio.create_task(self.daemon.post(path, body, headers=headers))
        self.tasks.append(task)
        while self.known() == before and not task.done():  # noqa: ASYNC110 - nothing tells when it is queued
            await asyncio.sleep(0.001)
        return task

    def known(self) -> tuple[int, list[str]]:
        return len(self.engine.got), [one.id for one in self.admission.waiting()]

    async def finish_all(self) -> list[Reply]:
        while not all(task.done() for task in self.tasks):
            if self.engine.has:
                self.engine.finish()
            await asyncio.sleep(0.001)
        return [task.result() for task in self.tasks]


@pytest.fixture
async def service(start: Start) -> Service:
    return Service(await start(http={"ping_seconds": 300.0}))


async def test_users_behind_one_address_take_turns_and_classes_go_first(service: Service) -> None:
    await service.send(CHAT, user="first")
    for _ in range(3):
        await service.send(CHAT | {"messages": [{"role": "user", "content": "x" * 900}]}, user="anna")
    await service.send(CHAT, user="bob")
    await service.send(CHAT | {"service_tier": "flex"}, user="carl")
    await service.send(CHAT | {"service_tier": "priority"}, user="dora")
    replies = await service.finish_all()
    assert [reply.status for reply in replies] == [200] * 7
    order = [submit.client.partition("/")[2] for submit in service.engine.got]
    assert order == ["first", "dora", "anna", "bob", "anna", "anna", "carl"]


async def test_both_kinds_of_429_name_their_reason_in_body_metrics_and_log(
    service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    service.daemon.fakes.configure(queue={"max_waiting": 2, "client_waiting": 1})
    await service.send(CHAT, user="anna")
    service.engine.finish(prompt_ms=0.0, n_predicted=9, predicted_ms=36_000.0)
    await service.send(CHAT, user="anna")
    await service.send(CHAT, user="anna")
    mine = await (await service.send(CHAT, user="anna"))
    await service.send(CHAT, user="bob")
    full = await (await service.send(CHAT | {"stream": True}, user="carl"))
    log = capsys.readouterr().out
    for reply, code, key in ((mine, "client_queue_full", "client_waiting"), (full, "queue_full", "max_waiting")):
        error = reply.json()["error"]
        assert (reply.status, error["code"], error["type"]) == (429, code, "rate_limit_error")
        assert f"queue.{key}" in error["message"]
        assert reply.headers["retry-after"] == "36", "nine tokens of four seconds"
        assert f"code={code}" in log
        assert f'hotset_rejected_total{{reason="{code}"}} 1.0' in (await service.daemon.get("/metrics")).body.decode()
    await service.finish_all()


async def test_all_answers_of_a_request_wait_or_none(service: Service) -> None:
    service.daemon.fakes.configure(queue={"max_waiting": 2})
    await service.send(CHAT)
    assert (await (await service.send(CHAT | {"n": 3}))).status == 429
    assert service.admission.statistics().waiting == 0
    await service.finish_all()


async def test_what_an_editor_typed_before_ends_as_cancelled(service: Service) -> None:
    """First the one that runs, then one that waits."""
    first = await service.send(TYPED, "/v1/completions")
    second = await service.send(TYPED, "/v1/completions")
    ended = (await first).json()
    assert (ended["choices"][0]["finish_reason"], ended["timings"]["cancelled"]) == ("stop", True)
    await service.send(CHAT | {"service_tier": "priority"})
    await service.send(CHAT | {"service_tier": "priority", "prompt_cache_key": "file.py"})
    other = await service.send(TYPED, "/completion", user="anna")
    service.engine.finish()
    assert (await second).json()["choices"][0]["text"] == "word"
    third = await service.send(TYPED, "/v1/completions")
    fourth = await service.send(TYPED | {"stream": True}, "/v1/completions")
    ended = (await third).json()
    assert (ended["choices"][0]["text"], ended["timings"]["cancelled"]) == ("", True)
    metrics = (await service.daemon.get("/metrics")).body.decode()
    assert 'hotset_cancelled_total{stage="queued"} 1.0' in metrics
    assert 'hotset_cancelled_total{stage="prefill"} 1.0' in metrics
    assert 'hotset_queue_seconds_count{class="interactive"} 2.0' in metrics, "one that never began has no such time"
    await service.finish_all()
    assert b"word" in (await fourth).body
    assert (await other).json()["content"] == "word"


async def test_what_waits_in_classes_is_served_by_the_next_engine(service: Service) -> None:
    lost = await service.send(CHAT)
    for tier in ("flex", "default", "priority"):
        await service.send(CHAT | {"service_tier": tier})
    service.engine.capacity = 0
    service.engine.has.clear()
    service.admission.engine_lost("it died")
    assert (await lost).json()["error"]["code"] == "engine_failed"
    refused = await (await service.send(CHAT))
    assert (refused.status, refused.json()["error"]["code"], refused.headers["retry-after"]) == (
        503,
        "model_loading",
        "5",
    )
    service.engine.capacity = 1
    service.admission.engine_ready()
    assert [reply.status for reply in await service.finish_all()] == [500, 200, 200, 200, 503]
    assert [submit.priority for submit in service.engine.got[1:]] == ["interactive", "normal", "background"]


async def test_a_stream_moves_up_while_others_are_served(start: Start) -> None:
    service = Service(await start(http={"ping_seconds": 0.05}))
    for _ in range(3):
        await service.send(CHAT)
    url = service.daemon.url + "/v1/chat/completions"
    async with service.daemon.session.post(url, json=CHAT | {"stream": True}) as response:
        for place in (3, 2, 1):
            while await response.content.readline() != f": queued, position {place}\n".encode():
                pass
            service.engine.finish()
        service.engine.finish()
        assert b"word" in await response.read()
    await service.finish_all()
