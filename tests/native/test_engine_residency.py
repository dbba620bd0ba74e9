"""A hot set in the engine: the same answers, slots where they were asked for, and reasons where they are not.

Devices are CPUs behind the RPC backend.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from daemon.config import Config
from daemon.engine.loading import Loaded
from daemon.engine.loop import Loop
from daemon.engine.residency import Experts
from daemon.engine.roster import Limits
from daemon.engine.spare import by_device
from daemon.engine.wanted import Off, Wanted, prepare
from daemon.hotset.placement import DevicePlan, plan
from daemon.messages import Device, Load, Residency, Sampling, Submit, Tokens
from daemon.model_files import load_command
from daemon.native import devices
from daemon.native.gguf_check import check
from tests.engine_fakes import FakePipe
from tests.minigguf import write_moe
from tests.residency_bench import ROOT, rpc_server

N_EXPERT, N_LAYER = 16, 4
SIZES: dict[str, Any] = {"n_layer": N_LAYER, "n_embd": 256, "n_head": 4, "n_head_kv": 2, "head_size": 64}
SIZES |= {"n_vocab": 512, "n_expert": N_EXPERT, "n_expert_used": 4, "n_ff": 256}
EXPERT_MIB = 0.75
MIB = 1 << 20


@pytest.fixture(scope="module")
def servers(library_path: Path) -> Iterator[list[str]]:
    with rpc_server(library_path) as first, rpc_server(library_path) as second:
        yield [first.device, second.device]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_moe(tmp_path_factory.mktemp("model") / "m.gguf", experts="F32", layers="F32", vocab="F32", **SIZES)


@pytest.fixture
def hot_set(model: Path, tmp_path: Path) -> Path:
    return write_hot_set(tmp_path / "hot.json", model)


def write_hot_set(path: Path, of: Path, n_layer: int = N_LAYER, **changes: Any) -> Path:
    """Every second expert, and all of them, the odd ones last."""
    order = [*range(0, N_EXPERT, 2), *range(1, N_EXPERT, 2)]
    sizes = [
        {"name": name, "layers": [{"layer": layer, "experts": order[:n]} for layer in range(n_layer)]}
        for name, n in (("half", 8), ("all", 16))
    ]
    content = {"format": 1, "model": {"fingerprint": check(of).fingerprint}, "sizes": sizes}
    path.write_text(json.dumps(content | changes), "utf-8")
    return path


def load_spec(model: Path, device: str, residency: dict[str, Any], load: str = "auto", **engine: Any) -> Load:
    settings = {"device": device, "threads": 1, "kv_cells": 512, "cache_type_k": "f32", "cache_type_v": "f32"}
    static = {"frozen": True} if residency.get("hot_set") else {}
    config = {"model": {"path": str(model), "load": load}, "engine": settings | engine, "residency": static | residency}
    return load_command(Config.model_validate(config))


@contextmanager
def loaded(
    model: Path, device: str, residency: dict[str, Any], load: str = "auto", **engine: Any
) -> Iterator[tuple[Loaded, Loop, FakePipe]]:
    with Loaded(load_spec(model, device, residency, load, **engine), lambda _: None) as made:
        pipe = FakePipe()
        limits = Limits(n_ubatch=512, max_sequences=8, kv_cells=512, n_ctx=512)
        yield made, Loop(made.context, made.vocab, pipe, limits, residency=made.experts), pipe


def answer(loop: Loop, pipe: FakePipe, name: str = "a") -> list[int]:
    prompt = [7 * i % 500 for i in range(40)]
    pipe.put(Submit(id=name, prompt=prompt, max_tokens=24, sampling=Sampling(temperature=0, ignore_eos=True)))
    while pipe.end(name) is None:
        loop.turn()
    return [token for event in pipe.events(name) if isinstance(event, Tokens) for token in event.tokens]


def filled(experts: Experts | Off, loop: Loop, pipe: FakePipe) -> Residency:
    """Start the upload, answer while it goes on, then wait for it: boundaries come with steps."""
    experts.start()
    n = 0
    while (status := experts.status()).state == "filling":
        n += 1
        assert n < 1000
        answer(loop, pipe, f"fill {n}")
    return status


def test_answers_are_the_same_whatever_is_resident(servers: list[str], model: Path, hot_set: Path) -> None:
    with loaded(model, servers[0], {"vram": ""}) as (made, loop, pipe):
        assert made.info.residency.startswith("off: residency.vram is empty")
        assert made.info.warnings == []
        stock = answer(loop, pipe)
    for vram, slots in (("25%", 4), ("half", 8), ("all", 16)):
        with loaded(model, servers[0], {"hot_set": str(hot_set), "vram": vram}) as (made, loop, pipe):
            assert made.experts.status().state == "filling"
            status = filled(made.experts, loop, pipe)
            assert answer(loop, pipe) == stock
            status = made.experts.status()
            assert (status.state, status.filled, made.info.warnings) == ("on", 1.0, [])
            assert {(layer.slots, layer.resident, layer.experts) for layer in status.layers} == {(slots, slots, 16)}
            assert {layer.mode for layer in status.layers} == {"full" if vram == "all" else "partial"}
            (device,) = status.devices
            assert device.bytes == device.effective_bytes == device.asked_bytes
            assert device.bytes == N_LAYER * (slots + 1) * EXPERT_MIB * MIB
            assert device.hits > 0
            assert pipe.sent[-1].snapshot is not None
            assert pipe.sent[-1].snapshot.residency == status


def test_auto_takes_all_experts_where_there_is_room_and_keeps_the_reserve_where_there_is_not(
    servers: list[str], model: Path, hot_set: Path
) -> None:
    with loaded(model, servers[0], {"hot_set": str(hot_set), "vram": "auto"}) as (made, loop, pipe):
        (device,) = filled(made.experts, loop, pipe).devices
        (found,) = [devices.describe(one) for one in made.model.devices]
        assert {layer.mode for layer in made.experts.status().layers} == {"full"}
        assert (device.asked, device.why, device.effective_bytes) == ("auto", "", device.asked_bytes)
        assert (device.reserve_asked, device.reserve_bytes) == ("auto", min(256 * MIB, found.memory_total // 8))
        assert (found.remote, found.pci, found.card, device.shared_memory) == (True, "", None, False)
        free = min(found.memory_free, psutil.virtual_memory().available)
    assert free > 1024 * MIB
    kept = free // MIB + 4096
    residency = {"hot_set": str(hot_set), "vram": "auto", "reserve": {found.name: kept}}
    with loaded(model, servers[0], residency) as (made, loop, pipe):
        assert made.info.residency.startswith("off: no expert has a slot: ")
        assert f"was asked for auto, but {found.name} has 0 MiB to spare: " in made.info.residency
        assert f"{kept} MiB stay so (residency.reserve)" in made.info.residency
        assert len(made.info.warnings) == 1
        assert len(answer(loop, pipe)) == 24


def test_the_reserve_limits_every_kind_of_budget(servers: list[str], model: Path, hot_set: Path) -> None:
    def found(budget: str, spare_mib: int) -> DevicePlan:
        spec = load_spec(model, servers[0], {"hot_set": str(hot_set), "vram": budget, "reserve": 1000})
        device = Device(name="V0", description="", kind="gpu", memory_free=0, memory_total=8192 * MIB)
        device = device.model_copy(update={"memory_free": (1000 + spare_mib) * MIB})
        wish = prepare(spec, check(model), [device])
        assert isinstance(wish, Wanted)
        spares = by_device([device], wish.budgets, wish.reserves)
        return plan(wish.ranking, wish.layers, wish.budgets, spares).devices[0]

    for budget in ("auto", "100%", "all", "4096"):
        short = found(budget, 20)
        assert 19 * MIB < short.effective_bytes <= 20 * MIB, budget
        assert short.why == "V0 has 20 MiB to spare: 1020 MiB are free, 1000 MiB stay so (residency.reserve)"
        assert found(budget, 60).effective_bytes == N_LAYER * 17 * EXPERT_MIB * MIB


def test_an_apu_gets_nothing_from_auto_before_anything_is_changed_for_it(model: Path, hot_set: Path) -> None:
    apu = Device(name="Vulkan0", description="", kind="igpu", memory_free=1 << 34, memory_total=1 << 34)
    spec = load_spec(model, "auto", {"hot_set": str(hot_set), "vram": "auto"})
    off = prepare(spec, check(model), [apu])
    assert isinstance(off, Off)
    assert off.reason.startswith("off: no expert has a slot: Vulkan0 was asked for auto, but its memory is the CPU's")
    assert not off.fault, "nothing that was asked for is left undone"
    card = apu.model_copy(update={"name": "Vulkan1", "kind": "gpu"})
    both = prepare(spec, check(model), [apu, card])
    assert isinstance(both, Wanted)
    explicit = load_spec(model, "auto", {"hot_set": str(hot_set), "vram": "half"})
    wish = prepare(explicit, check(model), [apu])
    assert isinstance(wish, Wanted)
    assert by_device([apu], wish.budgets, wish.reserves)["Vulkan0"].shared


def test_a_reserve_for_a_device_that_is_not_there_is_told(servers: list[str], model: Path, hot_set: Path) -> None:
    residency = {"hot_set": str(hot_set), "vram": "half", "reserve": {"Vulkan9": 64}}
    with loaded(model, servers[0], residency) as (made, _, _):
        assert isinstance(made.experts, Experts)
        (warning,) = made.info.warnings
        assert warning.startswith("residency.reserve names Vulkan9, but there is only ")


def test_two_devices_have_their_own_layers_and_budgets(servers: list[str], model: Path, hot_set: Path) -> None:
    both = ",".join(servers)
    with loaded(model, both, {"hot_set": str(hot_set), "vram": 8}) as (made, loop, pipe):
        first, second = filled(made.experts, loop, pipe).devices
        assert first.device != second.device
        spec = load_spec(model, both, {"hot_set": str(hot_set), "vram": 8})
        found = [devices.describe(one) for one in made.model.devices]
        expected = prepare(spec, check(model), found)
        assert isinstance(expected, Wanted)
        assert [layer.device for layer in expected.layers] == [layer.device for layer in made.experts.status().layers]
        assert (first.layers, second.layers) == (3, 1)  # llama.cpp counts the output as a layer
        assert (first.slots, second.slots) == (7, 9)
        assert max(first.bytes, second.bytes) <= 8 * MIB
        assert min(first.hits, second.hits) > 0
        names = first.device, second.device
    wrong = load_spec(model, both, {"hot_set": str(hot_set), "vram": {names[0]: "all", "Vulkan9": "half"}})
    off = prepare(wrong, check(model), found)
    assert isinstance(off, Off)
    assert off.reason == f"off: residency.vram names Vulkan9, but the model is on {names[0]}, {names[1]}"
    table = {names[1]: "all"}
    with loaded(model, both, {"hot_set": str(hot_set), "vram": table}) as (made, loop, pipe):
        status = filled(made.experts, loop, pipe)
        assert [layer.mode for layer in status.layers] == ["cold", "cold", "cold", "full"]
        assert [(one.slots, bool(one.why)) for one in status.devices] == [(0, True), (16, False)]
    with loaded(model, both, {"hot_set": str(hot_set), "vram": {"Vulkan9": "all"}}) as (made, _, _):
        assert "Vulkan9" in made.info.residency
        assert isinstance(made.experts, Off)


@pytest.mark.parametrize(
    ("residency", "changes", "reason"),
    [
        ({"enabled": False}, {}, "residency.enabled is false"),
        ({"vram": "tiny"}, {}, "there is no size tiny; its sizes are half, all"),
        ({"vram": 0}, {}, "was asked for 0 MiB, but that holds no expert"),
        ({}, {"format": 2}, "format"),
        ({}, {"model": {"fingerprint": "0" * 64}}, "another model"),
        ({}, {"sizes": [{"name": "a", "layers": [{"layer": 9, "experts": [16]}, {"layer": 1, "experts": [16]}]}]},
         "layer 9 has no routed experts in this model; size a: layer 1 has 16 experts, not expert 16"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_said_and_the_model_is_served(
    residency: dict[str, Any], changes: dict[str, Any], reason: str, servers: list[str], model: Path, tmp_path: Path
) -> None:
    path = write_hot_set(tmp_path / "hot.json", model, **changes)
    with loaded(model, servers[0], {"hot_set": str(path), "vram": "half"} | residency) as (made, loop, pipe):
        assert isinstance(made.experts, Off)
        assert made.info.residency.startswith("off: ")
        assert reason in made.info.residency
        asked = residency.get("enabled", True)
        assert any(reason in warning for warning in made.info.warnings) is asked
        made.experts.start()
        assert len(answer(loop, pipe)) == 24


@pytest.mark.parametrize("engine", [{"gpu_layers": 0}, {"cpu_moe_layers": 0}])
def test_without_experts_in_memory_beside_a_device_it_is_off(
    engine: dict[str, int], servers: list[str], model: Path, hot_set: Path
) -> None:
    with loaded(model, servers[0], {"hot_set": str(hot_set), "vram": "half"}, **engine) as (made, loop, pipe):
        assert "leave no layer" in made.info.residency
        assert len(answer(loop, pipe)) == 24


def test_on_the_cpu_alone_there_is_nothing_to_keep_experts_on(model: Path, hot_set: Path) -> None:
    with loaded(model, "cpu", {"hot_set": str(hot_set), "vram": "half"}) as (made, _, _):
        assert "there is no device" in made.info.residency
        assert made.info.warnings


def test_layers_that_the_config_puts_on_the_device_are_shown_and_not_counted(
    servers: list[str], model: Path, hot_set: Path
) -> None:
    residency = {"hot_set": str(hot_set), "vram": "half"}
    with loaded(model, servers[0], residency, cpu_moe_layers=2) as (made, loop, pipe):
        status = filled(made.experts, loop, pipe)
        assert [layer.mode for layer in status.layers] == ["partial", "partial", "device", "device"]
        assert status.devices[0].slots == 16
        assert "on the device" in status.layers[3].reason


def test_a_device_that_is_too_small_gets_fewer_slots_and_says_so(
    model: Path, hot_set: Path, library_path: Path
) -> None:
    with rpc_server(library_path) as server:
        limit = psutil.Process(server.process.pid).memory_info().data + 32 * MIB
        resource.prlimit(server.process.pid, resource.RLIMIT_DATA, (limit, limit))
        with loaded(model, server.device, {"hot_set": str(hot_set), "vram": "all"}) as (made, loop, pipe):
            status = filled(made.experts, loop, pipe)
            (device,) = status.devices
            assert 0 < device.effective_bytes < device.asked_bytes == N_LAYER * 17 * EXPERT_MIB * MIB
            assert "MiB free" in device.why
            assert device.why in made.info.residency
            assert device.slots == device.resident


@pytest.mark.parametrize(("load", "kind"), [("none", "pageable"), ("mmap", "mapped"), ("auto", "mapped")])
def test_what_the_weights_lie_in_is_told(load: str, kind: str, servers: list[str], model: Path, hot_set: Path) -> None:
    """Servers pin no memory: it is pageable, without a word of llama.cpp."""
    residency = {"hot_set": str(hot_set), "vram": "half"}
    with loaded(model, servers[0], residency, load, cpu_moe_layers=3) as (made, loop, pipe):
        status = filled(made.experts, loop, pipe)
        assert [layer.memory for layer in status.layers] == [kind] * 3 + [""]
        place = "the mapped file" if kind == "mapped" else "pageable memory"
        assert f"3 layers' weights lie in {place}" in status.reason
        assert status.devices[0].hits > 0


@pytest.mark.timeout(300)
def test_a_vulkan_device_reads_pinned_weights(model: Path, hot_set: Path, lavapipe: dict[str, str]) -> None:
    """Unasked; on Mesa's software Vulkan, in a process of its own."""
    command = [sys.executable, "-m", "tests.native.pinned_weights", str(model), str(hot_set)]
    environment = os.environ | lavapipe
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    status = Residency.model_validate_json(result.stdout)
    assert (status.state, status.filled, status.devices[0].device) == ("on", 1.0, "Vulkan0")
    assert {layer.memory for layer in status.layers} == {"pinned"}
    assert status.devices[0].slots == status.devices[0].resident == 32
    assert status.devices[0].hits > 0


def test_an_engine_that_ends_while_experts_are_uploaded(servers: list[str], model: Path, hot_set: Path) -> None:
    for _ in range(3):
        with loaded(model, servers[0], {"hot_set": str(hot_set), "vram": "all"}) as (made, loop, pipe):
            pipe.put(Submit(id="a", prompt=list(range(400)), max_tokens=1))
            made.experts.start()
            loop.turn()


def test_switched_off_it_says_why_and_answers_go_on(servers: list[str], model: Path, hot_set: Path) -> None:
    with loaded(model, servers[0], {"hot_set": str(hot_set), "vram": "half"}) as (made, loop, pipe):
        filled(made.experts, loop, pipe)
        assert isinstance(made.experts, Experts)
        made.experts.switch_off("the self-test failed")
        hits = made.experts.status().devices[0].hits
        answer(loop, pipe)
        status = made.experts.status()
        assert (status.state, status.reason) == ("off", "off: the self-test failed")
        assert status.devices[0].hits == hits


def test_where_memory_is_short_layers_go_to_their_device_alone(tmp_path: Path, library_path: Path) -> None:
    """Under a real limit: without, the same model cannot be read into memory."""
    sizes = SIZES | {"n_ff": 1024, "n_layer": 8}
    path = write_moe(tmp_path / "large.gguf", experts="F32", layers="F32", vocab="F32", **sizes)
    hot_set = write_hot_set(tmp_path / "hot.json", path, n_layer=8)
    script = Path(__file__).with_name("short_of_memory.py")
    with rpc_server(library_path) as server:
        command = [sys.executable, str(script), str(path), server.device, str(hot_set)]
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert result.returncode == 0, result.stderr
    seen = json.loads(result.stdout)
    assert "cannot be loaded" in seen["without"]
    assert seen["otherwise"] == "mmap"
    status = Residency.model_validate(seen["status"])
    modes = [layer.mode for layer in status.layers]
    n_whole = modes.count("device")
    assert 0 < n_whole < 8
    assert modes == ["partial"] * (8 - n_whole) + ["device"] * n_whole
    assert f"{n_whole} layers lie there without a copy in memory" in status.reason
    assert status.devices[0].bytes <= status.devices[0].asked_bytes
    assert seen["with"] == "none"
    assert len(seen["answer"]) == 24
