"""Editing config.toml under a real daemon: what streams goes on, and three ways lead to a reload."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from daemon.errors import EXIT_CONFIG, EXIT_OK
from tests.system.daemon_process import Daemon, eventually, free_port, running
from tests.system.test_faults import Stream

KEY = {"x-api-key": "first-key"}
BEGIN = "[queue]\nmax_waiting = 5\n[engine]\nmax_sequences = 2\n"
REPLY = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}


def hotset_reload(daemon: Daemon, run: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hotset_tools.cli", "reload", "--pid", str(daemon.process.pid)]
    environ = os.environ | {"RUNTIME_DIRECTORY": str(run)}
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)


@contextmanager
def runtime_directory() -> Iterator[Path]:
    """A short one: the address of a socket holds 107 bytes."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def test_a_stream_goes_on_while_the_file_is_edited(
    tmp_path: Path, library_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config.toml"
    file.write_text(BEGIN)
    with runtime_directory() as run:
        monkeypatch.setenv("RUNTIME_DIRECTORY", str(run))
        with running(tmp_path, ENGINE_THREADS="1") as daemon:
            streams = [Stream(daemon.url, max_tokens=400) for _ in range(2)]
            eventually(lambda: all(stream.has_text for stream in streams), "two streams that run")
            engine = daemon.engine()
            engine.suspend()  # so that they last until the edits are done, on any machine

            # The watcher: no place in the queue is left, and what needs a restart is said.
            file.write_text(BEGIN.replace("5", "0") + "ubatch = 64\n")
            eventually(lambda: "config changed" in daemon.output(), "the watcher's reload")
            assert daemon.client.post("/v1/chat/completions", json=REPLY).status_code == 429
            assert "engine.ubatch" in daemon.output()

            # SIGHUP: a bad file is rejected as a whole.
            file.write_text("[queue]\nmax_waiting = 'x'\n[log]\nlevel = 'loud'\n")
            daemon.process.send_signal(signal.SIGHUP)
            eventually(lambda: "cause=signal" in daemon.output(), "the reload by signal")
            asked = hotset_reload(daemon, run)
            assert asked.returncode == EXIT_CONFIG
            assert "queue.max_waiting: " in asked.stderr
            assert "log.level: " in asked.stderr
            assert daemon.client.post("/v1/chat/completions", json=REPLY).status_code == 429

            # The command: keys count at once.
            file.write_text(BEGIN + "[http]\nkeys = ['first-key']\nport = 9\n")
            asked = hotset_reload(daemon, run)
            assert asked.returncode == EXIT_OK, asked.stderr
            assert "http.port: the environment of hotsetd overrides the file" in asked.stdout
            assert daemon.client.get("/v1/models").status_code == 401
            assert daemon.client.get("/v1/models", headers=KEY).status_code == 200
            assert not any(stream.ended for stream in streams), "the streams were there all the time"

            engine.resume()
            for stream in streams:
                stream.join(60)
            assert all(stream.finished_well for stream in streams)
        assert list(run.iterdir()) == []
        assert hotset_reload(daemon, run).returncode == 1


def _hears_of_hangups() -> None:
    """Under nohup nobody would, and a service that is started so goes on without its terminal."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def test_a_terminal_that_is_closed_ends_the_service(tmp_path: Path, library_path: Path) -> None:
    """It sends SIGHUP too, and nobody would be left to stop the service."""
    ours, theirs = os.openpty()
    environ = os.environ | {"HOTSET_HTTP_PORT": str(free_port()), "HOTSET_ENGINE_DEVICE": "cpu"}
    log = tmp_path / "hotsetd.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["setsid", "--ctty", sys.executable, "-m", "daemon"],
            env=environ, cwd=tmp_path, stdin=theirs, stdout=output, stderr=output, preexec_fn=_hears_of_hangups,
        )  # fmt: skip
    try:
        os.close(theirs)
        eventually(lambda: "engine ready" in log.read_text(), "readiness")
        os.close(ours)
        try:
            assert process.wait(30) == EXIT_OK
        except subprocess.TimeoutExpired:
            pytest.fail(f"it goes on: {log.read_text()}")
    finally:
        process.kill()
        process.wait()
