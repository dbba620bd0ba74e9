"""A real hotsetd in its own process, on a free port, for tests that use it as a client would."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2 as httpx
import psutil

READY_SECONDS = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def eventually(condition: Callable[[], bool], what: str, seconds: float = READY_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds:.0f} s"
        time.sleep(0.02)


class Daemon:
    """The process, its address, and what it wrote."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process, self.port, self.log = process, port, log
        self.url = f"http://127.0.0.1:{port}"
        self.client = httpx.Client(base_url=self.url, timeout=60)

    def health(self) -> int:
        """The status of /health, 0 when nobody listens."""
        try:
            return self.client.get("/health").status_code
        except httpx.TransportError:
            return 0

    def wait_until_ready(self) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, f"hotsetd ended: {self.output()}"
            return self.health() == 200

        eventually(ready, "readiness")

    def engine(self) -> psutil.Process:
        """The engine child."""
        children = psutil.Process(self.process.pid).children()
        (engine,) = [child for child in children if "daemon.engine" in " ".join(child.cmdline())]
        return engine

    def output(self) -> str:
        return self.log.read_text("utf-8", "replace")

    def stop(self) -> int:
        """SIGTERM, and the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(100)


@contextmanager
def running(
    directory: Path, *arguments: str, wait: bool = True, device: str | None = "cpu", **environ: str
) -> Iterator[Daemon]:
    """A daemon with `HOTSET_<NAME>` for each of `environ`; it and its children are gone afterwards.

    `device` None leaves the device to the configuration.
    """
    port, log = free_port(), directory / "hotsetd.log"
    settings = {f"HOTSET_{name}": value for name, value in environ.items()}
    defaults = {"HOTSET_HTTP_PORT": str(port)} | ({} if device is None else {"HOTSET_ENGINE_DEVICE": device})
    variables = os.environ | defaults | settings
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "daemon", *arguments], env=variables, stdout=output, stderr=output, cwd=directory
        )
    daemon = Daemon(process, port, log)
    try:
        if wait:
            daemon.wait_until_ready()
        yield daemon
    finally:
        daemon.client.close()
        children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        _, alive = psutil.wait_procs(children, timeout=10)
        assert not alive, f"left behind: {alive}"
