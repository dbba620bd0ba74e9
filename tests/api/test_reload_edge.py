"""What a reload changes for clients: at once, and for answers that are under way."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from daemon import control, settings
from daemon.app import build, reloader
from daemon.log import set_level
from daemon.messages import Reload
from daemon.reload import Reloader
from hotset_tools import reload as command
from hotset_tools.service import NoService
from tests.api.conftest import Daemon, Start

TWO_KEYS = "[http]\nkeys = ['first-key', 'second-key']\n"
FIRST, SECOND = {"x-api-key": "first-key"}, {"x-api-key": "second-key"}


def reloading(daemon: Daemon, file: Path) -> Reloader:
    """The daemon's own wiring, over its fakes."""
    return reloader(file, settings.read(file), daemon.fakes.services, lambda _: None)


async def test_a_key_that_is_removed_is_refused_at_once(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(TWO_KEYS)
    daemon: Daemon = await start(http={"keys": ["first-key", "second-key"]})
    assert (await daemon.get("/v1/models", headers=SECOND)).status == 200
    running = reloading(daemon, file)
    file.write_text("[http]\nkeys = ['first-key']\nport = 1\n")
    await running.reload("command")
    assert (await daemon.get("/v1/models", headers=SECOND)).status == 401
    assert (await daemon.get("/v1/models", headers=FIRST)).status == 200
    status = (await daemon.get("/props", headers=FIRST)).json()["hotset"]["config"]
    assert status["last_reload"]["result"] == "applied"
    assert status["pending"] == [{"key": "http.port", "effect": "restart"}]


async def test_a_class_before_a_key_and_limits_of_the_queue_apply_at_once(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("[http]\nkeys = ['first-key']\n")
    daemon: Daemon = await start(http={"keys": ["first-key"]})
    running = reloading(daemon, file)
    file.write_text("[http]\nkeys = ['background:first-key']\n[queue]\nclient_waiting = 3\n")
    await running.reload("command")
    body = {"messages": [{"role": "user", "content": "Hi"}], "service_tier": "priority"}
    assert (await daemon.post("/v1/chat/completions", body, headers=FIRST)).status == 200
    assert daemon.fakes.admission.submits[0].priority == "background"
    assert (daemon.fakes.services.config.queue.client_waiting, daemon.fakes.admission.n_refreshed) == (3, 1)


async def test_a_rejected_file_is_in_status_and_metrics_without_its_path(daemon: Daemon, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("[log]\nlevel = 'info'\n")
    running = reloading(daemon, file)
    assert (await daemon.get("/props")).json()["hotset"]["config"]["last_reload"] is None
    file.write_text("[http]\nport = 'x'\n[model]\nload = 'y'\n")
    await running.reload("command")
    reply = await daemon.get("/props")
    assert sorted(reply.json()["hotset"]["config"]["faults"]) == ["http.port", "model.load"]
    assert str(tmp_path) not in reply.body.decode()
    metrics = (await daemon.get("/metrics")).body.decode()
    assert 'hotset_config_reloads_total{result="rejected"} 1.0' in metrics
    assert "hotset_config_last_reload_successful 0.0" in metrics

    file.write_text("[log]\nlevel = 'info'\n")
    await running.reload("command")
    assert "hotset_config_last_reload_successful 1.0" in (await daemon.get("/metrics")).body.decode()


async def test_every_part_asks_for_the_limits_that_are_in_force(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("[queue]\nmax_waiting = 5\n")
    loaded = settings.read(file)
    parts = build(loaded)
    running = reloader(file, loaded, parts.services, lambda _: None)
    file.write_text("[queue]\nmax_waiting = 2\n[engine]\nhang_seconds = 77.0\n[sampling]\ntop_k = 3\n")
    try:
        await running.reload("command")
    finally:
        set_level("info")
    assert parts.admission.statistics().max_waiting == 2
    assert parts.services.config.sampling.top_k == 3
    assert parts.supervisor._settings().hang_seconds == 77


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime directory with a short name: the address of a socket holds 107 bytes."""
    with tempfile.TemporaryDirectory() as name:
        monkeypatch.setenv("RUNTIME_DIRECTORY", name)
        yield Path(name)


class Answering:
    """A service's answer to the order to reload, and how often it was given."""

    def __init__(self, error: type[Exception] | None = None) -> None:
        self.n_orders = 0
        self.outcome = Reload(result="rejected", at=1.0, faults=[("http.port", "wrong")])
        self._error = error

    async def __call__(self) -> Reload:
        self.n_orders += 1
        if self._error is not None:
            raise self._error
        return self.outcome


async def no_load(force: bool, say: object) -> Reload:
    raise AssertionError("nobody ordered a load")


async def no_recording(say: object, leave: object) -> None:
    raise AssertionError("nobody ordered a recording")


async def test_the_command_finds_the_only_service_beside_what_dead_ones_left(run: Path) -> None:
    service, own = Answering(), os.getpid()
    async with control.listening(service, no_load, no_recording):
        (run / "1.sock").touch()
        (run / "1x.sock").touch()
        assert await asyncio.to_thread(command.ask) == service.outcome
        assert (run / f"{own}.sock").stat().st_mode & 0o777 == 0o600
        with pytest.raises(NoService, match="as process 1"):
            await asyncio.to_thread(command.ask, 1)
    assert sorted(os.listdir(run)) == ["1.sock", "1x.sock"]
    with pytest.raises(NoService):
        await asyncio.to_thread(command.ask)


async def test_several_services_are_told_nothing_until_one_is_named(run: Path) -> None:
    service, own = Answering(), os.getpid()
    async with control.listening(service, no_load, no_recording):
        (run / "2.sock").symlink_to(f"{own}.sock")
        with pytest.raises(NoService, match=r"--pid 2, --pid \d+"):
            await asyncio.to_thread(command.ask)
        assert service.n_orders == 0
        assert await asyncio.to_thread(command.ask, own) == service.outcome
        assert service.n_orders == 1


async def test_a_directory_that_others_may_write_gets_no_socket(run: Path) -> None:
    os.chmod(run, 0o777)
    async with control.listening(Answering(), no_load, no_recording):
        assert os.listdir(run) == []


async def test_a_service_that_ends_before_it_answers(run: Path) -> None:
    async with control.listening(Answering(ConnectionResetError), no_load, no_recording):
        with pytest.raises(NoService, match="before it answered"):
            await asyncio.to_thread(command.ask)
