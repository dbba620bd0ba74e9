"""The shared SDK cases against the application with fakes, and what only fakes can show."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from daemon.errors import QueueFull
from daemon.messages import Failed, Tokens
from tests.api.conftest import Daemon, Start
from tests.sdk_cases import *  # noqa: F403 - the cases are meant to be collected here
from tests.sdk_cases import MESSAGES, Idle

KEY = "correct-horse"


@pytest.fixture
async def daemon(start: Start) -> Daemon:
    return await start(http={"keys": [KEY]})


@pytest.fixture
def base_url(daemon: Daemon) -> str:
    return daemon.url + "/v1"


@pytest.fixture
def api_key() -> str:
    return KEY


@pytest.fixture
def idle(daemon: Daemon) -> Idle:
    async def wait() -> None:
        for ticket in daemon.fakes.admission.tickets:
            if not ticket.over:
                await ticket.cancelled.wait()

    return wait


async def test_wrong_key(base_url: str) -> None:
    async with AsyncOpenAI(base_url=base_url, api_key="wrong-horse", max_retries=2) as client:
        with pytest.raises(openai.AuthenticationError) as error:
            await client.models.list()
    assert error.value.code == "invalid_api_key"


async def test_a_full_queue_is_tried_again_twice_at_most(daemon: Daemon, base_url: str) -> None:
    daemon.fakes.admission.error = QueueFull("full", retry_after=0)
    async with AsyncOpenAI(base_url=base_url, api_key=KEY, max_retries=1) as client:
        with pytest.raises(openai.RateLimitError) as error:
            await client.chat.completions.create(model="tiny-moe", messages=MESSAGES)
    assert error.value.code == "queue_full"
    assert daemon.fakes.metrics.outcomes == [("/v1/chat/completions", "4xx")] * 2


async def test_error_in_a_stream_is_raised(daemon: Daemon, base_url: str) -> None:
    def script(submit: Any) -> list[Any]:
        return [
            Tokens(id=submit.id, tokens=[1], text="one"),
            Failed(id=submit.id, code="engine_failed", message="it died"),
        ]

    daemon.fakes.admission.script = script
    async with AsyncOpenAI(base_url=base_url, api_key=KEY, max_retries=0) as client:
        stream = await client.chat.completions.create(model="tiny-moe", messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError, match="it died"):
            async for _ in stream:
                pass
