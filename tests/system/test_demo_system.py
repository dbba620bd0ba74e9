"""`hotset demo` as people start it: experts that move, and nothing that is left when it ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil
import pytest

from tests.system.daemon_process import eventually, free_port

HOTSET = [sys.executable, "-m", "hotset_tools.cli"]
CHAT = {"messages": [{"role": "user", "content": "Tell me about the sea."}], "max_tokens": 200, "ignore_eos": True}


class Demo:
    """The process, its address, and what it wrote."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
        self.process, self.url, self.log = process, url, log
        self.tree = psutil.Process(process.pid)

    def output(self) -> str:
        return self.log.read_text("utf-8", "replace")

    def wait_until_ready(self) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, f"it ended: {self.output()}"
            return f"serving on {self.url}" in self.output()

        eventually(ready, "readiness")

    def child(self, word: str) -> psutil.Process:
        """The only child that has this word in its command line."""
        (found,) = [one for one in self.tree.children() if word in " ".join(one.cmdline())]
        return found

    def residency(self) -> dict[str, Any]:
        return dict(httpx.get(f"{self.url}/v1/residency", timeout=60).json())

    def end(self, number: int) -> int:
        """Signal it as a terminal (SIGINT, to its whole job) or `kill` does; the exit code, with all processes gone."""
        children = self.tree.children(recursive=True)
        assert len(children) >= 3, "the stand-in, hotsetd, its engine"
        (os.killpg if number == signal.SIGINT else os.kill)(self.process.pid, number)
        code = self.process.wait(60)
        _, alive = psutil.wait_procs(children, timeout=20)
        assert not alive
        return code


@contextmanager
def demo(directory: Path, *options: str, **environ: str) -> Iterator[Demo]:
    port, log = free_port(), directory / "demo.log"
    variables = os.environ | {"HOTSET_HTTP_PORT": str(port), "HOTSET_ENGINE_THREADS": "1"} | environ
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*HOTSET, "demo", *options], cwd=directory, env=variables, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
    try:
        yield Demo(process, f"http://127.0.0.1:{variables['HOTSET_HTTP_PORT']}", log)
    finally:
        children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.kill()
        process.wait()
        _, alive = psutil.wait_procs(children, timeout=20)
        assert not alive, f"left behind: {alive}"


def test_experts_move_and_hotset_top_shows_it(tmp_path: Path, library_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[engine]\ndevice = "cpu"\n[http]\nkeys = ["a-good-key"]\n')
    with demo(tmp_path, "--vram", "50%") as running:
        running.wait_until_ready()
        assert "not for speed" in running.output()
        assert "HOTSET_KEY" in running.output()
        headers = {"x-api-key": "a-good-key"}
        assert httpx.get(f"{running.url}/v1/residency", timeout=60).status_code == 401

        def moved() -> bool:
            answer = httpx.post(f"{running.url}/v1/chat/completions", json=CHAT, headers=headers, timeout=60)
            assert answer.status_code == 200, answer.text
            return bool(httpx.get(f"{running.url}/v1/residency", headers=headers, timeout=60).json()["moves"] > 0)

        eventually(moved, "a move")
        result = subprocess.run(
            [*HOTSET, "top", "--once", "--json", "--url", running.url, "--interval", "0.1"],
            env=os.environ | {"HOTSET_KEY": "a-good-key"}, capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        assert (result.returncode, result.stderr) == (0, "")
        said = json.loads(result.stdout)
        (device,) = said["residency"]["devices"]
        assert (device["device"], device["asked"]) == ("RPC0", "50%")
        assert device["resident"] > 0
        assert said["residency"]["placement"] == "live"
        assert said["residency"]["moves"] > 0
        assert said["counted"]["moves"] > 0
        assert said["counted"]["hits"] > 0
        assert running.end(signal.SIGTERM) == 0
    assert "Traceback" not in running.output()


def test_traffic_changes_topics_and_ctrl_c_does_not_wait_for_it(tmp_path: Path, library_path: Path) -> None:
    with demo(tmp_path, "--traffic") as running:
        eventually(lambda: running.output().count("hotset demo: traffic: ") >= 2, "a change of topic", 120)
        assert running.residency()["moves"] > 0
        assert running.end(signal.SIGINT) == 0
    assert "Traceback" not in running.output()
    assert "without waiting" not in running.output(), "one Ctrl-C is one signal to hotsetd"


def test_what_is_killed_takes_the_rest_along(tmp_path: Path, library_path: Path) -> None:
    with demo(tmp_path) as running:
        running.wait_until_ready()
        running.child("ggml-rpc-server").kill()
        assert running.process.wait(60) == 1
        assert "the stand-in for a device ended with -9; stopping" in running.output()
    with demo(tmp_path) as running:
        running.wait_until_ready()
        children = running.tree.children(recursive=True)
        running.child("daemon").kill()
        assert running.process.wait(60) == 137
        assert not psutil.wait_procs(children, timeout=20)[1]
    with demo(tmp_path) as running:
        running.wait_until_ready()
        assert running.end(signal.SIGKILL) == -9


def test_a_port_that_is_taken(tmp_path: Path, library_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        with demo(tmp_path, HOTSET_HTTP_PORT=port) as running:
            assert running.process.wait(60) == 1
    assert running.output().startswith(f"hotset: 127.0.0.1:{port} cannot be listened on: Address already in use")
    assert len(running.output().splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--vram", "101%"], ["hotset: residency.vram: "]),
        (["no-such.toml"], ["hotset: ", "no-such.toml cannot be read"]),
    ],
)
def test_a_configuration_that_cannot_be_used(
    tmp_path: Path, library_path: Path, options: list[str], said: list[str]
) -> None:
    with demo(tmp_path, *options) as running:
        assert running.process.wait(60) == 78
    assert all(words in running.output() for words in said)
    assert "Traceback" not in running.output()
