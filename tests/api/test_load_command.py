"""`hotset reload --load`: the order over the socket, the steps that it prints, its words and exit codes."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from daemon import control
from daemon.messages import Change, LoadResult, LoadStep, Reload
from hotset_tools.cli import make_app

STEPS = [
    LoadStep(stage="text", running=2, waiting=0, progress=1.0),
    LoadStep(stage="draining", running=2, waiting=0, progress=0.0),
    LoadStep(stage="draining", running=2, waiting=5, progress=0.0),
    LoadStep(stage="draining", running=1, waiting=5, progress=0.0),
    LoadStep(stage="loading", running=0, waiting=5, progress=0.41),
    LoadStep(stage="loading", running=0, waiting=5, progress=0.44),
    LoadStep(stage="returning", running=0, waiting=5, progress=1.0),
]
LIVE = Change(key="queue.max_waiting", effect="live", old="5", new="6")
NEXT = Change(key="engine.ubatch", effect="next load", old="512", new="64")
LATER = Change(key="http.port", effect="restart", old="1", new="2")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime directory with a short name: the address of a socket holds 107 bytes."""
    with tempfile.TemporaryDirectory() as name:
        monkeypatch.setenv("RUNTIME_DIRECTORY", name)
        yield Path(name)


class Loading:
    """A service that tells `STEPS` and ends as the test wants."""

    def __init__(self, load: LoadResult | None = None, **reload: object) -> None:
        self.outcome = Reload.model_validate({"result": "unchanged", "at": 1.0, "load": load} | reload)
        self.forced: list[bool] = []
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.begun, self.ended = asyncio.Event(), asyncio.Event()

    async def __call__(self, force: bool, say: Callable[[LoadStep], None]) -> Reload:
        self.forced.append(force)
        self.begun.set()
        for step in STEPS:
            say(step)
            await asyncio.sleep(0)
        await self.go_on.wait()
        say(STEPS[-1])
        self.ended.set()
        return self.outcome


async def no_reload() -> Reload:
    raise AssertionError("nobody ordered a reload")


async def no_recording(say: object, leave: object) -> None:
    raise AssertionError("nobody ordered a recording")


async def hotset(service: Loading, words: Sequence[str]) -> Result:
    async with control.listening(no_reload, service, no_recording):
        return await asyncio.to_thread(CliRunner().invoke, make_app("reload"), ["reload", *words])


async def test_steps_and_keys_are_told(run: Path) -> None:
    loaded = LoadResult(result="loaded", loaded=[NEXT], cut_off=1, seconds=2.04)
    service = Loading(loaded, result="applied", applied=[LIVE], pending=[LATER])
    result = await hotset(service, ["--load"])
    assert (result.exit_code, service.forced) == (0, [False])
    assert result.stderr.splitlines() == [
        "reading the vocabulary",
        "draining: 2 answers still run",
        "draining: 1 answer still runs",
        "loading: 40 %",
        "loading what was served before: 100 %",
    ]
    assert result.stdout.splitlines() == [
        "queue.max_waiting: 5 -> 6 (in force)",
        "engine.ubatch: 512 -> 64 (loaded)",
        "http.port: 1 -> 2 (restart: waits until hotsetd is started again)",
        "1 answer was ended: http.shutdown_seconds was over",
        "ready in 2.0 s",
    ]


@pytest.mark.parametrize(
    ("load", "words", "code", "said"),
    [
        (LoadResult(result="nothing"), ["--load"], 0, "nothing to load"),
        (LoadResult(result="loaded"), ["--load", "--force"], 0, "ready in"),
        (LoadResult(result="failed", reason="no room"), ["--load"], 1, "no room"),
        (LoadResult(result="refused", reason="another one"), ["--load"], 1, "another one"),
    ],
)
async def test_words_and_exit_codes(load: LoadResult, words: list[str], code: int, said: str, run: Path) -> None:
    service = Loading(load, pending=[NEXT] if code else [])
    result = await hotset(service, words)
    assert (result.exit_code, service.forced) == (code, ["--force" in words])
    assert said in result.output
    assert ("engine.ubatch: 512 -> 64 (next load: waits for `hotset reload --load`)" in result.stdout) == bool(code)


async def test_a_rejected_file_is_exit_code_78(run: Path) -> None:
    result = await hotset(Loading(result="rejected", faults=[("http.port", "wrong")]), ["--load"])
    assert result.exit_code == 78
    assert "http.port: wrong" in result.stderr


async def test_json_is_the_result_alone(run: Path) -> None:
    service = Loading(LoadResult(result="failed", reason="no room"), pending=[NEXT])
    result = await hotset(service, ["--load", "--json"])
    assert (result.exit_code, result.stderr) == (1, "")
    assert Reload.model_validate(json.loads(result.stdout)) == service.outcome


async def test_force_alone_makes_no_sense(run: Path) -> None:
    service = Loading()
    result = await hotset(service, ["--force"])
    assert (result.exit_code, service.forced) == (2, [])


async def test_who_leaves_does_not_end_the_load(run: Path) -> None:
    service = Loading()
    service.go_on.clear()
    async with control.listening(no_reload, service, no_recording):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(control.socket_path(os.getpid())))
            client.sendall(control.LOAD)
            await service.begun.wait()
        service.go_on.set()
        async with asyncio.timeout(20):
            await service.ended.wait()


async def test_a_service_that_ends_in_the_middle_is_said(run: Path) -> None:
    service = Loading()
    service.go_on.clear()
    async with control.listening(no_reload, service, no_recording):
        asked = asyncio.create_task(asyncio.to_thread(CliRunner().invoke, make_app("reload"), ["reload", "--load"]))
        await service.begun.wait()
    result = await asked
    assert result.exit_code == 1
    assert "went away" in str(getattr(result.exception, "message", ""))
