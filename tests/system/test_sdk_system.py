"""The shared SDK cases against a real daemon with the embedded model."""

from __future__ import annotations

import asyncio

import pytest

from tests.sdk_cases import *  # noqa: F403 - the cases are meant to be collected here
from tests.sdk_cases import Idle
from tests.system.daemon_process import Daemon, eventually


@pytest.fixture
def base_url(daemon: Daemon) -> str:
    return daemon.url + "/v1"


@pytest.fixture
def api_key() -> str:
    return "none is asked for"


@pytest.fixture
def idle(daemon: Daemon) -> Idle:
    def is_idle() -> bool:
        lines = daemon.client.get("/metrics").text.splitlines()
        return {"hotset_running 0.0", 'hotset_waiting{class="normal"} 0.0'} <= set(lines)

    async def wait() -> None:
        await asyncio.to_thread(eventually, is_idle, "an idle daemon")

    return wait
