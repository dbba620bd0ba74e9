"""`hotset verify` on mini models and the embedded one, over a CPU behind the RPC backend; and that it does fail."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from daemon.errors import HotsetError
from daemon.model_files import EMBEDDED_MODEL
from daemon.native.hotset import Layer, Mode, Reason, Residency, ResidencyError, State
from daemon.verify.script import PHASES
from hotset_tools.stand_in import NoStandIn, RpcServer, rpc_server
from hotset_tools.verify import opening, report, run
from tests.miniarch import table, writer
from tests.miniarch.watch import Watch
from tests.minigguf import write_dense, write_moe
from tests.native.test_residency import N_EXPERT, N_LAYER, SIZES
from tests.residency_bench import changed_params, fill, open_bench
from tests.rpc_proxy import Change, broken, other_expert, proxy, untouched

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def server(library_path: Path) -> Iterator[RpcServer]:
    """One for children: it serves one connection at a time."""
    with rpc_server(library_path) as started:
        yield started


@pytest.fixture(scope="module")
def mini(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """qwen3moe with experts in Q4_K."""
    return write_moe(tmp_path_factory.mktemp("mini") / "mini.gguf", experts="Q4_K", layers="F32", vocab="F32", **SIZES)


def verified(model: Path, device: str) -> dict[str, Any]:
    outcome = run.verify(opening.Request(model, device, threads=1), lambda _: None)
    assert report.table(outcome)
    found: dict[str, Any] = json.loads(json.dumps(report.as_json(outcome), allow_nan=False))
    return found


def hotset_verify(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hotset_tools.cli", "verify", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", ["qwen3moe-F32", "gpt-oss-MXFP4", "deepseek2-fused-Q8_0"])
def test_architectures_agree_with_stock(name: str, rpc_device: str, tmp_path: Path, library_path: Path) -> None:
    architecture, _, kind = name.rpartition("-")
    wanted = replace(table.MINIS[architecture], quants=table.all_of(kind))
    found = verified(writer.write_minis(tmp_path, {"mini": wanted}, library_path)["mini"], rpc_device)
    assert found["ok"], found["problems"]
    assert (found["rounds_alike"], found["expert_types"]) == (True, [kind])
    cases = {(case["name"], case["phase"]): case for case in found["cases"]}
    assert {case["kl_stock"] for case in found["cases"]} == {0.0}
    exact = [case for case in found["cases"] if case["resident"] in (0, 1)]
    assert {(case["identical"], case["max_abs"], case["phase"]) for case in exact} == {(True, 0, p) for p in PHASES}
    assert {case["resident"] for case in found["cases"] if case["name"] == "half"} == {0.5}
    half = cases["half", "decode"]
    assert half["hits"] > 0 < half["misses"]
    assert cases["full", "steps"]["misses"] == cases["cold", "steps"]["hits"] == 0
    assert not found["skipped"]
    limit = 1e-8 if kind == "F32" else max(1e-4, 2 * found["kl_alone"])
    assert {case["kl_limit"] for case in found["cases"] if case["name"] in ("half", "changing")} == {limit}
    assert max(case["kl"] for case in found["cases"]) <= limit


def test_the_command_prints_json_and_says_that_a_cpu_stands_in(library_path: Path) -> None:
    result = hotset_verify(EMBEDDED_MODEL, "--threads", 1, "--json")
    assert result.returncode == 0, result.stderr
    assert "a CPU behind llama.cpp's RPC backend, as there is no card" in result.stderr
    found = json.loads(result.stdout)
    assert found["ok"] is True
    per_row = 6 * 4
    assert all(case["hits"] + case["misses"] == case["tokens"] * per_row for case in found["cases"])
    assert {case["phase"] for case in found["cases"]} == {"prefill", "decode", "sequences", "steps"}
    changing = next(case for case in found["cases"] if case["name"] == "changing")
    assert 0 < changing["resident"] < 1


@pytest.mark.parametrize(
    ("change", "wrong"),
    [(untouched, set()), (other_expert(20), {"half"}), (broken, {"half", "changing", "full"})],
    ids=["right", "one wrong matrix", "broken uploads"],
)
def test_a_device_that_holds_other_bytes_is_found_out(
    change: Change, wrong: set[str], mini: Path, server: RpcServer
) -> None:
    """One matrix of one expert that is another expert's is enough."""
    with proxy(server.port, change) as device:
        result = hotset_verify(mini, "--threads", 1, "--json", "--device", f"rpc:127.0.0.1:{device.port}")
    assert device.n_uploads > 20
    assert result.returncode == (1 if wrong else 0), result.stderr
    found = json.loads(result.stdout)
    assert found["ok"] is not bool(wrong)
    assert {problem.split(":")[0] for problem in found["problems"]} >= wrong
    assert {case["name"] for case in found["cases"] if not case["ok"]} >= wrong
    assert all(case["ok"] for case in found["cases"] if case["resident"] == 0)


def test_a_device_that_goes_ends_it_with_a_message(mini: Path, library_path: Path) -> None:
    """In the middle of an upload; ggml ends the process then."""

    def goes(number: int, data: bytes, _before: bytes) -> bytes:
        if number == 20:
            server.process.kill()
        return data

    with rpc_server(library_path) as server, proxy(server.port, goes) as device:
        result = hotset_verify(mini, "--threads", 1, "--device", f"rpc:127.0.0.1:{device.port}")
    assert (result.returncode, result.stdout) == (2, "")
    *_, said, last = result.stderr.splitlines()
    assert "RPC server crashed" in said
    assert "ended by SIGABRT" in last


def test_experts_that_are_never_computed_on_the_device_are_found_out(
    mini: Path, rpc_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers that agree because nothing was moved prove nothing."""
    monkeypatch.setattr(Residency, "set_state", _never_on)
    assert any("none was computed on the device" in problem for problem in verified(mini, rpc_device)["problems"])


_set_state = Residency.set_state


def _never_on(self: Residency, state: State) -> None:
    _set_state(self, State.COUNT if state is State.ON else state)


def test_the_ids_of_each_row_are_those_that_the_router_chose(mini: Path, rpc_device: str) -> None:
    """In layers that are full, partial and cold; seen by llama.cpp's callback as well."""
    watch = Watch()
    with (
        changed_params(cb_eval=watch.callback),
        open_bench(rpc_device, mini) as bench,
        Residency(bench.context.pointer, [N_EXPERT, 8, 0, 2]) as hs,
    ):
        fill(hs, {0: list(range(N_EXPERT)), 1: [1, 3, 5], 3: [0, 9]})
        assert [layer.mode for layer in hs.layers()] == [Mode.FULL, Mode.PARTIAL, Mode.COLD, Mode.PARTIAL]
        watch.take()
        position = 0
        for width in (1, 12, 40, 1):
            bench.logits([(7 * i % 500, position + i, 0) for i in range(width)])
            position += width
            for index, ids in watch.take():
                np.testing.assert_array_equal(hs.router_ids(index, width), ids)
        for n_tokens in (0, 2):
            with pytest.raises(ResidencyError, match="ids"):
                hs.router_ids(0, n_tokens)
        with pytest.raises(ResidencyError, match="no such layer"):
            hs.router_ids(N_LAYER, 1)


def test_what_cannot_be_verified_is_one_message_and_exit_code_2(mini: Path, tmp_path: Path, library_path: Path) -> None:
    dense = write_dense(tmp_path / "dense.gguf")
    (tmp_path / "broken.gguf").write_bytes(mini.read_bytes()[:1000])
    (tmp_path / "empty.txt").write_text("")
    for arguments, message in (
        ((tmp_path / "none.gguf",), "cannot be opened"),
        ((tmp_path / "broken.gguf",), "more than its 1000 bytes can hold"),
        ((dense,), "dense: it has no experts"),
        ((mini, "--device", "Vulkan7"), "--device names 'Vulkan7', but llama.cpp sees only"),
        ((mini, "--device", "rpc:127.0.0.1:1"), "does not answer"),
        ((mini, "--device", "CPU"), "no layer can be managed"),
        ((mini, "--prompts", tmp_path / "none.txt"), "cannot be read"),
        ((mini, "--prompts", tmp_path / "empty.txt"), "the prompts are empty"),
        ((mini, "--prompts", mini), "not UTF-8"),
    ):
        result = hotset_verify(*arguments, "--threads", 1)
        assert result.returncode == 2, (arguments, result.stdout)
        assert message in result.stderr.splitlines()[-1], result.stderr
        assert not result.stdout


def test_a_model_that_memory_cannot_hold_is_refused_before_it_is_loaded(
    mini: Path, rpc_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 1 << 29}))
    with pytest.raises(opening.CannotVerify, match=r"0\.5 GiB available, 1\.0 GiB are needed"):
        verified(mini, rpc_device)


def test_a_device_without_room_for_the_model_leaves_stocks_difference_out() -> None:
    facts = type("Facts", (), {"size": 3 << 30})
    target = opening.Target(
        request=opening.Request(Path()),
        file=type("File", (), {"facts": facts}),  # type: ignore[arg-type]
        text="",
        spec=None,  # type: ignore[arg-type]
        devices=(opening.Device(name="V", description="", kind="gpu", memory_free=1 << 30, memory_total=1 << 32),),
        stand_in=False,
        threads=1,
    )
    assert "4.0 GiB on the device, which has 1.0 GiB free" in (opening.without_room(target) or "")
    assert opening.without_room(replace(target, stand_in=True)) is None
    assert opening.without_room(replace(target, devices=target.devices * 4)) is None


def test_a_small_device_is_given_what_it_holds(mini: Path, rpc_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_bench(rpc_device, mini) as bench, Residency(bench.context.pointer) as hs:
        all_bytes = sum(layer.n_expert * layer.expert_bytes for layer in hs.layers())
    monkeypatch.setattr(run, "Residency", partial(Residency, max_bytes=all_bytes * 4 // 10))
    found = verified(mini, rpc_device)
    assert found["ok"], found["problems"]
    assert {case["resident"] for case in found["cases"] if case["name"] == "half"} == {0.25}
    assert [skipped["name"] for skipped in found["skipped"]] == ["full"]
    monkeypatch.setattr(run, "Residency", partial(Residency, max_bytes=all_bytes // 100))
    with pytest.raises(
        opening.CannotVerify, match=r"nothing could be made resident: the device has no room for 12\.5%"
    ):
        verified(mini, rpc_device)


def test_the_reasons_of_layers_are_told_in_runs() -> None:
    layer = Layer(0, 0, 4, 2, 0, 0, Mode.COLD, Reason.LORA, -1, 0, 0, 0, 0)
    layers = [layer, replace(layer, il=1), replace(layer, il=3, reason=Reason.UNSUPPORTED)]
    assert run._why_not(layers) == (
        "layers 0-1: an adapter changes these experts; "
        "layer 3: the device cannot multiply weights of this type or shape by expert"
    )


def test_a_client_that_is_killed_does_not_take_the_stand_in_along(library_path: Path) -> None:
    """The kernel sends the server SIGPIPE when it answers one that is gone."""
    with rpc_server(library_path) as server:
        os.kill(server.process.pid, signal.SIGPIPE)
        with pytest.raises(subprocess.TimeoutExpired):
            server.process.wait(0.5)
        socket.create_connection(("127.0.0.1", server.port), 5).close()


def test_a_build_without_the_server_says_so(tmp_path: Path) -> None:
    with pytest.raises(NoStandIn, match="no ggml-rpc-server"), rpc_server(tmp_path):
        pass


def test_a_server_that_ends_says_so(tmp_path: Path) -> None:
    program = tmp_path / "ggml-rpc-server"
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o755)
    with pytest.raises(HotsetError, match="exit code 3"), rpc_server(tmp_path):
        pass
