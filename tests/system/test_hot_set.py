"""From texts to experts in VRAM, as an operator does it: the tool, `hotsetd --check`, a config, and the status.

The device is a CPU behind the RPC backend.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from daemon.native.gguf_check import check
from tests.minigguf import write_moe
from tests.residency_bench import RpcServer, rpc_server
from tests.rpc_proxy import proxy
from tests.system.daemon_process import Daemon, eventually, running

BODY = {"prompt": "What the sea gives", "temperature": 0, "n_predict": 24, "ignore_eos": True, "return_tokens": True}
SIZES: dict[str, Any] = {"n_layer": 4, "n_embd": 128, "n_head": 4, "n_head_kv": 2, "head_size": 32, "n_ff": 128}
SIZES |= {"n_expert": 16, "n_expert_used": 4, "n_vocab": 512}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_moe(tmp_path_factory.mktemp("model") / "m.gguf", experts="F32", layers="F32", vocab="F32", **SIZES)


@pytest.fixture(scope="module")
def server(library_path: Path) -> Iterator[RpcServer]:
    with rpc_server(library_path) as made:
        yield made


@pytest.fixture(scope="module")
def learned(model: Path, tmp_path_factory: pytest.TempPathFactory, cache_root: Path) -> Path:
    """A hot set from two texts, on a machine without a device."""
    directory = tmp_path_factory.mktemp("learned")
    for name, text in (("a.txt", "The sea is wide. " * 40), ("b.txt", "Ships sail on it. " * 40)):
        (directory / name).write_text(text, "utf-8")
    out = directory / "hot.json"
    options = ["--out", str(out), "--prompts", str(directory), "--sizes", "50,100", "--tokens", "64", "--threads", "1"]
    result = hotset("hot-set", str(model), *options, "--json")
    assert result.returncode == 0, result.stderr
    said = json.loads(result.stdout)
    assert (said["learned_from"]["tokens"], said["learned_from"]["texts"]) == (128, ["a.txt", "b.txt"])
    assert [(size["name"], size["experts"]) for size in said["sizes"]] == [("p50", 32), ("p100", 64)]
    assert 0.5 < said["sizes"][0]["coverage"] < said["sizes"][1]["coverage"] == 1.0
    return out


def hotset(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hotset_tools.cli", *arguments], capture_output=True, text=True, check=False, timeout=60
    )


def residency(daemon: Daemon) -> dict[str, Any]:
    return dict(daemon.client.get("/v1/residency").json())


def tokens(daemon: Daemon) -> list[int]:
    answer = daemon.client.post("/completion", json=BODY)
    assert answer.status_code == 200, answer.text
    return list(answer.json()["tokens"])


def foreign(learned: Path, directory: Path) -> Path:
    """The same hot set for another model."""
    content = json.loads(learned.read_text("utf-8"))
    content["model"]["fingerprint"] = "0" * 64
    path = directory / "foreign.json"
    path.write_text(json.dumps(content), "utf-8")
    return path


def test_experts_of_the_hot_set_are_in_vram_and_answers_stay_the_same(
    model: Path, learned: Path, server: RpcServer, tmp_path: Path
) -> None:
    settings = {"MODEL_PATH": str(model), "ENGINE_DEVICE": server.device, "ENGINE_THREADS": "1"}
    settings |= {"RESIDENCY_VRAM": "p50", "RESIDENCY_FROZEN": "true", "RESIDENCY_GATE": "false"}
    with running(tmp_path, RESIDENCY_HOT_SET=str(foreign(learned, tmp_path)), **settings) as daemon:
        stock = tokens(daemon)
        status = residency(daemon)
        assert (status["state"], status["devices"]) == ("off", [])
        assert "foreign.json cannot be used: it was made for another model" in status["reason"]
        assert status["reason"] in daemon.output()
        assert str(tmp_path) not in status["reason"]
    with running(tmp_path, RESIDENCY_HOT_SET=str(learned), **settings) as daemon:
        eventually(lambda: residency(daemon)["state"] == "on", "the upload")
        assert tokens(daemon) == stock
        eventually(lambda: residency(daemon)["devices"][0]["hits"] > 0, "counts in the status")
        check_told(daemon)


def check_told(daemon: Daemon) -> None:
    """Status, properties, metrics and log say the same."""
    status = residency(daemon)
    (device,) = status["devices"]
    assert (device["asked"], device["slots"], device["resident"], device["why"]) == ("p50", 32, 32, "")
    assert {layer["mode"] for layer in status["layers"]} == {"partial"}
    assert daemon.client.get("/props").json()["hotset"]["residency"] == status["reason"]
    families = text_string_to_metric_families(daemon.client.get("/metrics").text)
    samples = {one.name: one.value for family in families for one in family.samples if "_expert_" in one.name}
    assert {samples.pop("hotset_expert_selftest"), samples.pop("hotset_expert_gate")} <= {0, 1}
    assert samples.pop("hotset_expert_hit_rate", 0.5) <= 1
    assert samples == {
        "hotset_expert_hits_total": device["hits"],
        "hotset_expert_misses_total": device["misses"],
        "hotset_expert_swaps_total": 0,
        "hotset_expert_slots_total": 32,
        "hotset_expert_slots_resident": 32,
        "hotset_expert_vram_bytes": device["bytes"],
        "hotset_expert_upload_bytes_total": device["bytes"] * 32 // 36,
    }
    log = daemon.output()
    assert f"experts in VRAM are {status['reason']}" in log
    assert "experts in VRAM are filling: 32 of 64 experts of hot.json" in log


def test_an_engine_that_is_killed_while_it_fills_is_replaced_and_filled_again(
    model: Path, learned: Path, server: RpcServer, tmp_path: Path
) -> None:
    """Then the service is told to stop while the next one fills."""
    gate, n_before = threading.Event(), 20

    def held(number: int, data: bytes, _before: bytes) -> bytes:
        assert number < n_before or gate.wait(60)
        return data

    settings = {"MODEL_PATH": str(model), "ENGINE_THREADS": "1", "ENGINE_RESTART_DELAY_SECONDS": "0.5"}
    settings |= {"RESIDENCY_HOT_SET": str(learned), "RESIDENCY_VRAM": "p50"}
    with (
        proxy(server.port, held) as device,
        running(tmp_path, ENGINE_DEVICE=f"rpc:127.0.0.1:{device.port}", **settings) as daemon,
    ):
        eventually(lambda: device.n_uploads == n_before, "part of the upload")
        assert residency(daemon)["state"] == "filling"
        daemon.engine().kill()
        eventually(lambda: residency(daemon)["state"] == "off", "the end of the engine")
        assert "there is no engine" in residency(daemon)["reason"]
        gate.set()
        eventually(lambda: daemon.health() == 200 and residency(daemon)["state"] == "on", "the next upload")
        assert residency(daemon)["devices"][0]["resident"] == 32
        assert len(tokens(daemon)) == BODY["n_predict"]
        gate.clear()
        daemon.engine().kill()
        device.n_uploads = 0
        eventually(lambda: device.n_uploads == n_before, "part of the third upload")
        threading.Timer(1, gate.set).start()
        assert daemon.stop() == 0


def test_check_lists_all_faults_of_the_file(model: Path, learned: Path, tmp_path: Path) -> None:
    def said(hot_set: object, vram: str = "p50") -> tuple[int, str]:
        file = tmp_path / "config.toml"
        (tmp_path / "hot.json").write_text(hot_set if isinstance(hot_set, str) else json.dumps(hot_set), "utf-8")
        file.write_text(f'[model]\npath = "{model}"\n[residency]\nhot_set = "hot.json"\nvram = "{vram}"\n', "utf-8")
        command = [sys.executable, "-m", "daemon", "--check", str(file)]
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert "Traceback" not in result.stderr
        return result.returncode, result.stderr

    good = json.loads(learned.read_text("utf-8"))
    assert said(good) == (0, "")
    assert "it cannot be read" not in said(good, "p75")[1]
    assert said(good, "p75") == (78, "hotsetd: residency.hot_set: there is no size p75; its sizes are p50, p100\n")
    code, errors = said({"format": 3, "model": {"fingerprint": check(model).fingerprint}, "sizes": [], "x": 1})
    assert (code, len(errors.splitlines())) == (78, 3)
    assert said("")[0] == 78
    layers = [{"layer": 7, "experts": [0]}, {"layer": 0, "experts": [99]}]
    code, errors = said(good | {"sizes": [{"name": "p50", "layers": layers}]})
    assert (code, len(errors.splitlines())) == (78, 2)
