"""A device where experts in VRAM do not pay, in a real daemon: the gate closes by what it measures, and says why."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hotset_tools.make_model import write_model
from hotset_tools.routing import make_routing
from hotset_tools.synthetic_vocab import SPECIAL
from tests.minigguf import MOE
from tests.residency_bench import rpc_server
from tests.rpc_proxy import proxy
from tests.system.daemon_process import Daemon, eventually, running

N_EXPERT, N_SLOTS = 16, 2
SIZES: dict[str, Any] = {"n_layer": 4, "n_expert": N_EXPERT, "n_expert_used": 4, "n_vocab": 512, "n_ctx": 1024}
SIZES |= {"experts": "F32", "layers": "F32", "vocab": "F32", "block_gain": 0.2}
FLAT = {"temperature": 5, "top_k": 0, "top_p": 1, "min_p": 0, "ignore_eos": True}
"""Any token may follow, so that the router of a model without preferences has none either."""


@pytest.fixture(scope="module")
def uniform(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose routers prefer nothing, as `hotset bench make-model --routing uniform` makes them."""
    path = tmp_path_factory.mktemp("model") / "uniform.gguf"
    write_model(path, replace(MOE, **SIZES), 1, routing=make_routing("uniform", SIZES["n_vocab"] - len(SPECIAL), 1))
    return path


def residency(daemon: Daemon) -> dict[str, Any]:
    return dict(daemon.client.get("/v1/residency").json())


def answer(daemon: Daemon, number: int) -> dict[str, Any]:
    """150 tokens."""
    body = FLAT | {"prompt": f"Text {number}", "n_predict": 150, "seed": number}
    return dict(daemon.client.post("/completion", json=body).raise_for_status().json()["timings"])


def test_where_routing_prefers_nothing_and_the_device_is_far_the_gate_closes(
    uniform: Path, library_path: Path, tmp_path: Path
) -> None:
    """A layer with slots asks the device twice, for less than a whole layer nothing is saved: it cannot be faster."""
    settings = {"MODEL_PATH": str(uniform), "ENGINE_THREADS": "1", "CACHE": str(tmp_path / "cache")}
    settings |= {"RESIDENCY_VRAM": f"{100 * N_SLOTS / N_EXPERT}%", "RESIDENCY_RESERVE": "0"}
    settings |= {"RESIDENCY_REMEMBER": "false"}
    with (
        rpc_server(library_path) as server,
        proxy(server.port) as far,
        running(tmp_path, ENGINE_DEVICE=f"rpc:127.0.0.1:{far.port}", **settings) as daemon,
    ):
        assert residency(daemon)["gate"]["state"] == "waiting"
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda number: answer(daemon, number), range(4)))
        far.delay = 0.002
        eventually(lambda: residency(daemon)["gate"]["state"] != "waiting", "a verdict")
        status = residency(daemon)
        gate = status["gate"]
        assert gate["state"] == "closed", gate
        assert 0 < gate["on"] < 0.9 * gate["off"]
        said = re.fullmatch(
            r"closed: residency does not pay: \S+ tokens a second with experts in VRAM at a hit rate of (0\.\d+), \S+ "
            r"without \(predicted from measured prices\)",
            gate["reason"],
        )
        assert said, gate["reason"]
        assert float(said[1]) == pytest.approx(N_SLOTS / N_EXPERT, abs=0.05)
        assert (status["state"], status["reason"]) == ("off", f"off: {gate['reason']}")
        assert f"experts in VRAM are off: {gate['reason']}" in daemon.output()
        assert 'hotset_expert_gate{state="closed"} 1.0' in daemon.client.get("/metrics").text.splitlines()

        # Closed, nothing comes from VRAM or goes there; steps without counting tell no hit rate at all.
        far.delay = 0.0
        moves, hits = status["moves"], status["devices"][0]["hits"]
        rates = [answer(daemon, number)["expert_hit_rate"] for number in (5, 6)]
        assert rates == [0.0, None]
        status = residency(daemon)
        assert (status["moves"], status["devices"][0]["hits"]) == (moves, hits)
