"""Servers under test, each on a free port of loopback with the same sizes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from daemon.errors import HotsetError
from daemon.native import locate

START_SECONDS = 120.0


class PeerMissing(HotsetError):
    """There is no llama-server to compare with."""

    code = "peer_missing"


@dataclass(frozen=True, slots=True)
class Server:
    """One that runs: its port of loopback and the id of its first process."""

    port: int
    pid: int


def free_port() -> int:
    """A TCP port of loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def peer_directory() -> Path:
    """Where the peer's llama-server is.

    Raises:
        PeerMissing: `hotset build --peer` has not made one.
    """
    peer = locate.find_peer()
    if peer is None:
        raise PeerMissing("there is no llama-server to compare with; `hotset build --peer` makes it")
    return peer.directory


@contextmanager
def hotsetd(
    model: Path, n_sequences: int, n_ctx: int, log: Path, settings: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """The daemon on the CPU, `n_ctx` tokens for each of `n_sequences`; `settings` are more of its environment."""
    port = free_port()
    environ = os.environ | {
        "HOTSET_MODEL_PATH": str(model),
        "HOTSET_MODEL_CONTEXT": str(n_ctx),
        "HOTSET_HTTP_PORT": str(port),
        "HOTSET_ENGINE_DEVICE": "cpu",
        "HOTSET_ENGINE_MAX_SEQUENCES": str(n_sequences),
        "HOTSET_ENGINE_KV_CELLS": str(n_ctx * n_sequences),
        "HOTSET_LOG_LEVEL": "warning",
        **(settings or {}),
    }
    with _running([sys.executable, "-m", "daemon"], environ, port, log, cwd=log.parent) as server:
        yield server


@contextmanager
def llama_server(
    model: Path, n_sequences: int, n_ctx: int, log: Path, *, batch: int = 2048, ubatch: int = 512
) -> Iterator[Server]:
    """The peer's llama-server with the same sizes; `batch` and `ubatch` are its -b and -ub.

    Raises:
        PeerMissing: `hotset build --peer` has not made one.
    """
    directory = peer_directory()
    port = free_port()
    command = [
        str(directory / "llama-server"), "-m", str(model), "--host", "127.0.0.1", "--port", str(port),
        "-np", str(n_sequences), "-c", str(n_ctx * n_sequences), "-b", str(batch), "-ub", str(ubatch), "-dev", "none",
        "--jinja", "--no-webui",
    ]  # fmt: skip
    with _running(command, os.environ.copy(), port, log, cwd=log.parent) as server:
        yield server


@contextmanager
def _running(command: Sequence[str], environ: dict[str, str], port: int, log: Path, cwd: Path) -> Iterator[Server]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environ, stdout=output, stderr=output, stdin=subprocess.DEVNULL, cwd=cwd
        )
    try:
        _wait_until_healthy(process, port, log)
        yield Server(port, process.pid)
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_healthy(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            tail = log.read_text("utf-8", "replace").splitlines()[-5:]
            raise HotsetError(f"{log.stem} ended with {process.returncode}: {' / '.join(tail)}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise HotsetError(f"{log.stem} was not ready after {START_SECONDS:.0f} s")
