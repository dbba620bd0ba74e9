"""The self-test in a real daemon: experts on a CPU behind the RPC backend, once with a device that breaks them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.minigguf import write_moe
from tests.native.test_engine_residency import SIZES, write_hot_set
from tests.residency_bench import rpc_server
from tests.rpc_proxy import Proxy, broken, proxy
from tests.system.daemon_process import Daemon, eventually, running


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_moe(tmp_path_factory.mktemp("model") / "m.gguf", experts="F32", layers="F32", vocab="F32", **SIZES)


@pytest.fixture(scope="module")
def device(library_path: Path) -> Iterator[Proxy]:
    with rpc_server(library_path) as server, proxy(server.port) as between:
        yield between


@contextmanager
def served(directory: Path, model: Path, device: Proxy, cache: Path) -> Iterator[Daemon]:
    directory.mkdir(exist_ok=True)
    settings = {
        "MODEL_PATH": str(model),
        "ENGINE_DEVICE": f"rpc:127.0.0.1:{device.port}",
        "ENGINE_THREADS": "1",
        "RESIDENCY_HOT_SET": str(write_hot_set(directory / "hot.json", model)),
        "RESIDENCY_VRAM": "half",
        "CACHE": str(cache),
    }
    with running(directory, **settings) as daemon:
        yield daemon


def residency(daemon: Daemon) -> dict[str, Any]:
    found: dict[str, Any] = daemon.client.get("/v1/residency").json()
    return found


def after_selftest(daemon: Daemon) -> dict[str, Any]:
    eventually(lambda: residency(daemon)["selftest"] not in ("none", "waiting"), "the self-test")
    return residency(daemon)


def answer(daemon: Daemon) -> str:
    body = {"prompt": "the sea", "max_tokens": 8, "temperature": 0}
    return str(daemon.client.post("/v1/completions", json=body).raise_for_status().json()["choices"][0]["text"])


def n_selected(daemon: Daemon) -> int:
    return sum(int(layer["hits"] + layer["misses"]) for layer in residency(daemon)["layers"])


def metric(daemon: Daemon, result: str) -> bool:
    return f'hotset_expert_selftest{{result="{result}"}} 1.0' in daemon.client.get("/metrics").text


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def right(model: Path, device: Proxy, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The answer of a daemon whose self-test passed; what it says of that is checked here."""
    with served(tmp_path_factory.mktemp("first"), model, device, cache) as daemon:
        status = after_selftest(daemon)
        assert (status["selftest"], status["state"]) == ("passed", "on")
        assert status["selftest_detail"].startswith("divergence")
        assert metric(daemon, "passed")
        assert n_selected(daemon) == 0, "what the test selected is not of requests"
        text = answer(daemon)
        eventually(lambda: n_selected(daemon) > 0, "the count of the request's selections")
        assert "self-test of experts in VRAM passed" in daemon.output()
    return text


def test_a_passed_test_is_remembered(right: str, model: Path, device: Proxy, cache: Path, tmp_path: Path) -> None:
    with served(tmp_path, model, device, cache) as daemon:
        assert residency(daemon)["selftest"] == "passed"
        assert "with the same build" in residency(daemon)["selftest_detail"]
        assert answer(daemon) == right


def test_a_device_that_breaks_experts_is_switched_off_aloud(
    right: str, model: Path, device: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "change", broken)
    with served(tmp_path, model, device, tmp_path / "cache") as daemon:
        status = after_selftest(daemon)
        assert (status["selftest"], status["state"]) == ("failed", "off")
        assert status["reason"].startswith("off: the self-test failed: the mean divergence is")
        assert metric(daemon, "failed")
        assert answer(daemon) == right
        (line,) = [line for line in daemon.output().splitlines() if "self-test failed" in line]
        assert "error" in line
    assert not (tmp_path / "cache" / "selftests").exists()
