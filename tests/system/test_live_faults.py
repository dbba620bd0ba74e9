"""Live budgets where something goes wrong: config.toml changes in roundabout ways, engine and service end amid moves.

The device is a CPU behind the RPC backend; a proxy in front of it says when an expert is on its way.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.minigguf import write_moe
from tests.residency_bench import RpcServer, rpc_server
from tests.rpc_proxy import proxy
from tests.system.daemon_process import Daemon, eventually, running
from tests.system.test_faults import Stream
from tests.system.test_live_budgets import (
    N_LAYER,
    PROMPTS,
    SIZES,
    Client,
    File,
    config,
    device,
    residency,
    toml,
)
from tests.system.test_load import command_line
from tests.system.test_watch import append, delete, link, write


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_moe(tmp_path_factory.mktemp("model") / "m.gguf", experts="F32", layers="F32", vocab="F32", **SIZES)


@pytest.fixture(scope="module")
def server(library_path: Path) -> Iterator[RpcServer]:
    with rpc_server(library_path) as made:
        yield made


@contextmanager
def busy(daemon: Daemon) -> Iterator[Client]:
    """A client that streams meanwhile, so that the engine has no time to measure anything."""
    client = Client(daemon.url, PROMPTS[0])
    try:
        eventually(lambda: bool(client.answers or client.fault), "an answer")
        yield client
    finally:
        client.stopping = True
        client.join(100)
    assert client.fault is None


def has(daemon: Daemon, share: float) -> bool:
    """Whether the budget is in force, with all of its slots."""
    found = device(daemon)
    return bool(found["asked"] == f"{share:.0%}" and found["slots"] == N_LAYER * round(16 * share) > 0)


def test_what_watchers_miss(model: Path, server: RpcServer, tmp_path: Path) -> None:
    """etc/config.toml -> ../current/config.toml, current -> releases/1."""

    def text(vram: str) -> str:
        keys = config(model, server.device, residency__vram=vram)
        return "".join(f"{name.replace('__', '.')} = {toml(value)}\n" for name, value in keys.items())

    for name, vram in (("1", "25%"), ("2", "50%")):
        (tmp_path / "releases" / name).mkdir(parents=True)
        write(tmp_path / "releases" / name / "config.toml", text(vram))
    (tmp_path / "etc").mkdir()
    link(tmp_path / "current", "releases/1")
    link(tmp_path / "etc" / "config.toml", "../current/config.toml")
    first, second = (tmp_path / "releases" / name / "config.toml" for name in "12")
    with running(tmp_path, "etc/config.toml", device=None) as daemon, busy(daemon):
        assert has(daemon, 0.25)
        write(first, text("12%"))
        eventually(lambda: has(daemon, 0.12), "the edit of what a link points to")
        link(tmp_path / "current", "releases/2")
        eventually(lambda: has(daemon, 0.5), "the other target of a link")

        # While its writer has it open half a file is nothing; once closed it is a fault.
        whole = text("75%")
        with second.open("w") as writer:
            writer.write(whole[:-6])
            writer.flush()
            time.sleep(0.5)
            assert "config rejected" not in daemon.output()
            assert has(daemon, 0.5)
            writer.write(whole[-6:])
        eventually(lambda: has(daemon, 0.75), "the whole file")
        write(second, text("25%")[:-6])
        eventually(lambda: "config rejected" in daemon.output(), "the fault of half a file")
        assert has(daemon, 0.75)
        append(second, text("25%")[-6:])
        eventually(lambda: has(daemon, 0.25), "the whole file")

        n_faults = daemon.output().count("config rejected")
        delete(second)
        eventually(lambda: daemon.output().count("config rejected") > n_faults, "the missing file")
        assert has(daemon, 0.25)
        write(second, text("50%"))
        eventually(lambda: has(daemon, 0.5), "the file that is back")
    assert "Traceback" not in daemon.output()


class Moment:
    """Does something once, while an expert is on its way to the device; what it waits for holds the device up."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._act: Callable[[], object] | None = None

    def arm(self, act: Callable[[], object]) -> None:
        self.reached.clear()
        self._act = act

    def __call__(self, _number: int, data: bytes, _before: bytes) -> bytes:
        act, self._act = self._act, None
        if act is not None:
            act()
            self.reached.set()
        return data


@contextmanager
def moving(model: Path, server: RpcServer, tmp_path: Path, **keys: Any) -> Iterator[tuple[Daemon, File, Moment]]:
    """A daemon with 25 % of its experts on a device that the moment watches, its file, and the moment."""
    moment = Moment()
    with proxy(server.port, moment) as between:
        file = File(tmp_path / "config.toml", **config(model, f"rpc:127.0.0.1:{between.port}", **keys))
        with running(tmp_path, device=None) as daemon:
            yield daemon, file, moment


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_an_engine_that_is_ended_amid_moves_is_replaced_with_the_budgets_of_now(
    number: signal.Signals, model: Path, server: RpcServer, tmp_path: Path
) -> None:
    with moving(model, server, tmp_path) as (daemon, file, moment):
        streams = [Stream(daemon.url, max_tokens=800) for _ in range(2)]
        eventually(lambda: residency(daemon)["moves"] > 0, "moves")
        file.in_place(residency__vram="50%", residency__upload=100)
        eventually(lambda: has(daemon, 0.5), "the other budget")
        engine = daemon.engine()
        moment.arm(lambda: os.kill(engine.pid, number))
        assert moment.reached.wait(60)
        for stream in streams:
            stream.join(60)
            assert (stream.n_terminal, bool(stream.error)) == (1, True)
        # Another budget yet while the next one starts.
        following = next_engine(daemon, engine.pid)
        following.suspend()
        file.in_place(residency__vram="12%")
        eventually(lambda: "new=\"'12%'\"" in daemon.output(), "the reload")
        following.resume()
        daemon.wait_until_ready()
        assert daemon.engine().pid == following.pid
        eventually(lambda: has(daemon, 0.12), "the budget of now")
        with busy(daemon):
            eventually(lambda: residency(daemon)["moves"] > 0, "moves")
            assert residency(daemon)["upload"]["effective"] == "100 MiB/s"
            assert has(daemon, 0.12)
        assert daemon.stop() == 0
    assert "Traceback" not in daemon.output()


def next_engine(daemon: Daemon, before: int) -> psutil.Process:
    found: list[psutil.Process] = []

    def started() -> bool:
        children = psutil.Process(daemon.process.pid).children()
        found[:] = [child for child in children if child.pid != before and "daemon.engine" in command_line(child)]
        return bool(found)

    eventually(started, "the next engine")
    return found[0]


def test_a_service_that_is_told_to_stop_amid_moves_lets_answers_finish(
    model: Path, server: RpcServer, tmp_path: Path
) -> None:
    with moving(model, server, tmp_path) as (daemon, _, moment):
        streams = [Stream(daemon.url, max_tokens=150) for _ in range(2)]
        eventually(lambda: all(stream.has_text for stream in streams), "streams")
        moment.arm(lambda: daemon.process.send_signal(signal.SIGTERM))
        assert moment.reached.wait(60)
        assert daemon.process.wait(60) == 0
        for stream in streams:
            stream.join(10)
            assert stream.finished_well
    assert "Traceback" not in daemon.output()


def test_a_device_that_never_takes_an_expert_does_not_keep_the_service(
    model: Path, server: RpcServer, tmp_path: Path
) -> None:
    with moving(model, server, tmp_path, http__shutdown_seconds=0.5) as (daemon, _, moment):
        stream, never = Stream(daemon.url, max_tokens=800), threading.Event()
        eventually(lambda: stream.has_text, "a stream")
        moment.arm(lambda: (moment.reached.set(), never.wait(100)))
        assert moment.reached.wait(60)
        assert daemon.stop() == 0
        stream.join(10)
        assert (stream.n_terminal, bool(stream.error)) == (1, True)
        never.set()
    assert "Traceback" not in daemon.output()
