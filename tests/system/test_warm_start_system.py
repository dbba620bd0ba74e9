"""Real daemons that come back: what one learned is what the next one begins with, however the first one ended."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from daemon.hotset.learned import decode
from tests.residency_bench import rpc_server
from tests.system.daemon_process import Daemon, eventually, running

PROMPTS = (
    "The old man looked at the sea and", "She opened the door of the house, and", "They walked along the road until",
    "In the morning the king called his",
)  # fmt: skip


@pytest.fixture(scope="module")
def device(library_path: Path) -> Iterator[str]:
    with rpc_server(library_path) as server:
        yield server.device


@contextmanager
def served(directory: Path, device: str, *, wait: bool = True, **environ: str) -> Iterator[Daemon]:
    """The embedded model, half of its experts in slots."""
    settings = {"ENGINE_DEVICE": device, "ENGINE_THREADS": "1", "ENGINE_RESTART_DELAY_SECONDS": "0.05"}
    settings |= {
        "RESIDENCY_VRAM": "50%",
        "RESIDENCY_RESERVE": "0",
        "RESIDENCY_GATE": "false",
        "CACHE": str(directory / "cache"),
    }
    with running(directory, wait=wait, **settings | environ) as daemon:
        yield daemon


def residency(daemon: Daemon) -> dict[str, Any]:
    return dict(daemon.client.get("/v1/residency").raise_for_status().json())


def hit_rate(daemon: Daemon, prompt: str, n: int = 65) -> float:
    body = {"prompt": prompt, "max_tokens": n, "seed": 1, "ignore_eos": True}
    answer = daemon.client.post("/v1/completions", json=body).raise_for_status().json()
    return float(answer["timings"]["expert_hit_rate"])


def teach(daemon: Daemon) -> float:
    """Some answers; the hit rate of the last two."""
    hit_rate(daemon, PROMPTS[0], 200)
    return (hit_rate(daemon, PROMPTS[1]) + hit_rate(daemon, PROMPTS[2])) / 2


def begun(daemon: Daemon) -> dict[str, Any]:
    """Once everything that comes first is in its slot: how it began."""
    eventually(lambda: residency(daemon)["state"] == "on", "the first experts")
    return dict(residency(daemon)["remembered"])


def test_a_daemon_that_was_stopped_begins_warm(device: str, tmp_path: Path) -> None:
    with served(tmp_path, device) as first:
        assert begun(first)["start"] == "cold"
        assert "slots for experts begin cold: nothing was learned about this model before" in first.output()
        before = teach(first)
        assert first.stop() == 0
    (path,) = (tmp_path / "state" / "hotset").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    learned = decode(path.name, path.read_bytes())
    assert learned.header.tokens == 199 + 2 * 64
    with served(tmp_path, device) as second:
        known = begun(second)
        assert (known["start"], known["fault"]) == ("warm", "")
        assert known["reason"] == f"experts learned from 327 tokens until {learned.header.saved}"
        assert sum(layer["resident"] for layer in residency(second)["layers"]) == learned.resident.sum()
        assert hit_rate(second, PROMPTS[3]) >= 0.9 * before
        assert f"slots for experts begin warm: {known['reason']}" in second.output()


def test_an_engine_that_is_killed_or_replaced_comes_back_warm(device: str, tmp_path: Path) -> None:
    with served(tmp_path, device) as first:
        teach(first)
        assert first.stop() == 0
    with served(tmp_path, device) as second:
        known = begun(second)
        hit_rate(second, PROMPTS[3])
        os.kill(second.engine().pid, signal.SIGKILL)
        eventually(lambda: second.output().count("slots for experts begin warm") == 2, "another engine")
        assert begun(second) == known, "what was saved last"


def test_a_new_load_by_order_begins_warm(device: str, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[residency]\nremember = true\n")
    with served(tmp_path, device) as daemon:
        assert begun(daemon)["start"] == "cold"
        teach(daemon)
        command = [sys.executable, "-m", "hotset_tools.cli", "reload", "--load", "--force"]
        subprocess.run([*command, "--pid", str(daemon.process.pid)], check=True, timeout=60)
        known = begun(daemon)
        assert (known["start"], known["reason"][:34]) == ("warm", "experts learned from 327 tokens un")


def test_a_service_of_systemd_keeps_it_where_systemd_says(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "var"))
    with served(tmp_path, device) as daemon:
        hit_rate(daemon, PROMPTS[0])
        assert daemon.stop() == 0
    assert [path.suffix for path in (tmp_path / "var").iterdir()] == [".bin"]
    assert not (tmp_path / "state").exists()


def test_where_nothing_can_be_kept_the_service_goes_on_and_says_so_once(device: str, tmp_path: Path) -> None:
    (tmp_path / "state").write_text("no directory")
    with served(tmp_path, device) as daemon:
        known = begun(daemon)
        assert (known["start"], known["reason"]) == ("cold", "what was learned before cannot be used")
        assert known["fault"].endswith("cannot be read: Not a directory")
        assert hit_rate(daemon, PROMPTS[0]) > 0
        assert daemon.stop() == 0
        assert daemon.output().count("experts are not remembered") == 1
        (lost,) = [line for line in daemon.output().splitlines() if "what was learned about experts is lost" in line]
        assert "cannot be written: " in lost
        assert "Traceback" not in daemon.output()
