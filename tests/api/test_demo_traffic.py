"""The traffic of `hotset demo` against the real application: what it asks, when it waits, how it stops."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable

import pytest

from daemon.errors import QueueFull
from hotset_tools.demo import traffic
from hotset_tools.demo.traffic import Prompt, Traffic
from tests.api.conftest import Daemon, Start
from tests.fakes import Signal, done, nothing

TWO = [Prompt("sea", "The sea is wide"), Prompt("sea", "Ships sail"), Prompt("code", "def main():")]
KEY = "a-good-key"


class Ear:
    """What the traffic says, from its thread."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self._loop, self._signal = asyncio.get_running_loop(), Signal()

    def __call__(self, text: str) -> None:
        self.said.append(text)
        self._loop.call_soon_threadsafe(self._signal.notify)

    async def heard(self, text: str) -> None:
        await self._signal.wait_for(lambda: text in self.said)


@contextlib.asynccontextmanager
async def asking(url: str, prompts: Iterable[Prompt], key: str = "") -> AsyncIterator[tuple[Traffic, Ear]]:
    """Traffic that has stopped afterwards."""
    ear = Ear()
    client = Traffic(url, key, prompts, ear)
    client.start()
    try:
        yield client, ear
    finally:
        client.stop()
        await asyncio.to_thread(client._thread.join, 20)
        assert not client._thread.is_alive()


async def test_prompts_are_asked_one_after_the_other_and_topics_are_said_once(daemon: Daemon) -> None:
    daemon.fakes.admission.script = nothing
    async with asking(daemon.url, TWO) as (_, ear):
        for number, prompt in enumerate(TWO):
            ticket = await daemon.fakes.admission.ticket(number)
            assert bytes(ticket.submit.prompt).decode() == prompt.text
            assert (ticket.submit.max_tokens, ticket.submit.sampling.ignore_eos) == (traffic.ANSWER_TOKENS, True)
            assert len(daemon.fakes.admission.tickets) == number + 1
            ticket.text("x")
            ticket.finish()
    assert ear.said == ["traffic: sea", "traffic: code"]


async def test_stopping_gives_up_what_is_being_answered(daemon: Daemon) -> None:
    daemon.fakes.admission.script = nothing
    async with asking(daemon.url, TWO) as (client, _):
        ticket = await daemon.fakes.admission.ticket()
        ticket.text("a")
        client.stop()
        ticket.text("b")
        await asyncio.wait_for(ticket.cancelled.wait(), 20)
    assert len(daemon.fakes.admission.tickets) == 1


async def test_a_service_that_cannot_just_now_is_asked_again(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "PAUSE_SECONDS", 0.01)
    daemon.fakes.admission.script = lambda submit: [done(submit)]
    daemon.fakes.admission.error = QueueFull("64 requests are waiting.", retry_after=7)
    async with asking(daemon.url, TWO[:1]) as (_, ear):
        await daemon.fakes.metrics.ended("4xx")
        daemon.fakes.admission.error = None
        await daemon.fakes.metrics.ended("ok")
    assert len(daemon.fakes.admission.submits) == 1
    assert ear.said == ["traffic: sea"]


async def test_nobody_there_is_asked_again_until_it_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "PAUSE_SECONDS", 0.01)
    async with asking("http://127.0.0.1:1", TWO) as (_, ear):
        await ear.heard("traffic: sea")
    assert ear.said == ["traffic: sea"]


async def test_keys(start: Start) -> None:
    daemon: Daemon = await start(http={"keys": [KEY]})
    daemon.fakes.admission.script = lambda submit: [done(submit)]
    async with asking(daemon.url, TWO, KEY):
        await daemon.fakes.admission.ticket(2)
    async with asking(daemon.url, TWO) as (_, ear):
        await ear.heard("traffic ended: the service answers 401 Unauthorized")
    assert len(daemon.fakes.admission.tickets) == 3
