"""More connections than file descriptors."""

from __future__ import annotations

import resource
import socket
import time
from contextlib import ExitStack
from pathlib import Path

import psutil

from daemon import descriptors
from tests.system.daemon_process import eventually, running


def test_idle_connections_take_every_descriptor(tmp_path: Path, library_path: Path) -> None:
    with running(tmp_path) as daemon:
        process = psutil.Process(daemon.process.pid)
        soft, hard = process.rlimit(resource.RLIMIT_NOFILE)
        assert soft >= min(hard, descriptors.MOST)
        process.rlimit(resource.RLIMIT_NOFILE, (process.num_fds() + 10, hard))
        with ExitStack() as connections:
            for _ in range(40):
                connections.enter_context(socket.create_connection(("127.0.0.1", daemon.port)))
            eventually(lambda: "no file descriptor is left" in daemon.output(), "the complaint")
            time.sleep(1.5)  # asyncio tries again every second
        eventually(lambda: daemon.health() == 200, "recovery")
        assert daemon.output().count("no file descriptor is left") == 1
        assert "Traceback" not in daemon.output()
