"""`hotset top` as a process of its own, beside a real service."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys

import psutil

from tests.system.daemon_process import Daemon, free_port

TOP = [sys.executable, "-m", "hotset_tools.cli", "top", "--interval", "0.1"]


def once(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*TOP, "--once", *options], capture_output=True, text=True, check=False, timeout=60)


def test_one_picture_of_a_real_service(daemon: Daemon) -> None:
    result = once("--url", daemon.url, "--json")
    assert (result.returncode, result.stderr) == (0, "")
    said = json.loads(result.stdout)
    assert (said["state"], said["model"]["name"]) == ("ready", "tinymoe-41m-Q4_K_M")
    assert said["tokens_per_second"] is not None
    assert said["residency"] == daemon.client.get("/v1/residency").json()
    result = once("--url", daemon.url)
    assert (result.returncode, result.stderr) == (0, "")
    assert "tinymoe-41m-Q4_K_M (qwen3moe)" in result.stdout


def test_without_a_service_there_is_one_line_and_an_exit_code() -> None:
    result = once("--url", f"http://127.0.0.1:{free_port()}")
    assert (result.returncode, result.stderr) == (1, "")
    assert "Connection refused" in result.stdout


def test_on_a_terminal_until_it_is_interrupted(daemon: Daemon) -> None:
    """The screen is given back, and there is no complaint."""
    ours, theirs = os.openpty()
    with subprocess.Popen(
        [*TOP, "--url", daemon.url], stdin=theirs, stdout=theirs, stderr=theirs, env=os.environ | {"TERM": "xterm"}
    ) as process:
        os.close(theirs)
        shown = b""
        while b"tinymoe" not in shown:
            shown += os.read(ours, 65536)
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # how a terminal without a process ends
            while data := os.read(ours, 65536):
                shown += data
        assert process.wait(30) == 0
    os.close(ours)
    assert shown.rindex(b"\x1b[?1049l") > shown.rindex(b"tinymoe")
    assert b"Abort" not in shown
    assert b"Traceback" not in shown


def test_a_pipe_that_is_closed_ends_it(daemon: Daemon) -> None:
    with subprocess.Popen(
        [*TOP, "--url", daemon.url, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert json.loads(process.stdout.readline())["state"] == "ready"
        process.stdout.close()
        assert process.wait(30) == 1
        assert process.stderr.read() == ""
    assert not psutil.pid_exists(process.pid)
