"""What `hotset doctor` concludes from its facts."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from daemon.config import Config
from daemon.messages import Card, Device
from hotset_tools import diagnosis, machine_facts
from hotset_tools.doctor_text import print_report

GIB = 2**30
NATIVE = {"directory": "/b", "reason": "selected by `hotset build`"}
MODEL: dict[str, Any] = {
    "path": "/m/x.gguf",
    "embedded": False,
    "exists": True,
    "readable": True,
    "size": 4 * GIB,
    "directory": "/m",
}
MEMORY = {"total": 16 * GIB, "available": 8 * GIB}


def device(name: str, kind: str) -> dict[str, Any]:
    return {"name": name, "kind": kind}


def use(devices: list[dict[str, Any]], asked: str = "auto", **model: Any) -> list[str]:
    loaded = Config.model_validate({"engine": {"device": asked}})
    return diagnosis.use(loaded, {"devices": devices}, MODEL | model, MEMORY)


def test_nothing_wrong_is_no_problem() -> None:
    assert diagnosis.problems(NATIVE, {}, MODEL) == []


@pytest.mark.parametrize(
    ("native", "seen", "model", "text"),
    [
        ({"directory": None, "reason": "no build; run it"}, {}, MODEL, "no build; run it"),
        (NATIVE, {"error": "llama.cpp died with SIGSEGV"}, MODEL, "llama.cpp died with SIGSEGV"),
        (NATIVE, {}, MODEL | {"exists": False, "readable": False}, "there is no file /m/x.gguf; set model.path"),
        (NATIVE, {}, MODEL | {"readable": False}, "cannot be read by this user"),
    ],
)
def test_each_problem_says_what_to_do(
    native: dict[str, Any], seen: dict[str, Any], model: dict[str, Any], text: str
) -> None:
    (problem,) = diagnosis.problems(native, seen, model)
    assert text in problem


def test_auto_takes_the_gpus_that_llama_sees() -> None:
    assert 'device: Vulkan0 (engine.device is "auto")' in use([device("Vulkan0", "gpu"), device("CPU", "cpu")])


def seen(**changes: Any) -> dict[str, Any]:
    plain = Device(name="V0", description="A card", kind="gpu", memory_free=20 * GIB, memory_total=24 * GIB)
    return plain.model_copy(update=changes).model_dump()


def test_each_device_has_its_reserve_and_what_is_known_of_its_memory() -> None:
    loaded = Config.model_validate({"residency": {"reserve": {"V0": 512}}})
    card = Card(display="connected", vram_used=9 * GIB, vram_total=24 * GIB)
    found = diagnosis.device(seen(card=card), loaded, MEMORY)
    assert (found["free"], found["reserve_bytes"], found["reserve_asked"]) == (15 * GIB, GIB // 2, "512 MiB")
    assert (found["display"], found["shared_memory"]) == ("connected", False)
    without_config = diagnosis.device(seen(kind="igpu"), None, MEMORY)
    assert (without_config["free"], without_config["reserve_bytes"]) == (8 * GIB, 3 * GIB)
    assert (without_config["display"], without_config["shared_memory"]) == ("unknown", True)
    cpu = diagnosis.device(seen(kind="cpu", memory_free=16 * GIB, memory_total=16 * GIB), loaded, MEMORY)
    assert (cpu["free"], "reserve_bytes" in cpu) == (8 * GIB, False)


def test_the_table_of_devices_names_reserve_display_and_shared_memory() -> None:
    devices = [seen(kind="igpu"), seen(name="V1", card=Card(display="none")), seen(name="CPU", kind="cpu")]
    out = io.StringIO()
    report: dict[str, Any] = {
        "native": {"directory": None},
        "llama": {"devices": [diagnosis.device(one, None, MEMORY) for one in devices], "errors": []},
        "backends": [],
        "memory": MEMORY,
        "cache": {"directory": "/c", "writable": True, "free": GIB, "builds": []},
        "glslc": None,
        "access": [],
        "use": [],
        "problems": [],
    }
    print_report(report, Console(file=out, width=200))
    text = out.getvalue()
    assert "  V0: 3.0 GiB stay free of experts (for the system and other programs" in text
    assert "  V1: 1.0 GiB stay free of experts (for its driver" in text
    rows = {cells[1]: cells for line in text.splitlines() if len(cells := [c.strip() for c in line.split("│")]) > 8}
    assert rows["V0"][4:9] == ["8.0 GiB", "24.0 GiB", "3.0 GiB", "not known", "shared with the CPU"]
    assert rows["V1"][4:9] == ["20.0 GiB", "24.0 GiB", "1.0 GiB", "no", "its own"]
    assert rows["CPU"][6:9] == ["", "", ""]


def test_auto_without_a_gpu_is_the_cpu() -> None:
    assert any(line.startswith("device: the CPU") for line in use([device("CPU", "cpu")]))


def test_a_named_device_is_told_as_asked() -> None:
    assert "device: rpc:box:50052 (engine.device says so)" in use([], "rpc:box:50052")


def test_a_model_larger_than_memory_is_said() -> None:
    assert "4.0 GiB fit the 8.0 GiB" in use([])[-1]
    assert "80.0 GiB are more than the 8.0 GiB" in use([], size=80 * GIB)[-1]


def test_a_split_model_is_all_its_parts() -> None:
    parts = machine_facts.split_parts(Path("/m/big-00001-of-00003.gguf"))
    assert [part.name for part in parts] == [f"big-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    assert machine_facts.split_parts(Path("/m/x-00002-of-00003.gguf")) == [Path("/m/x-00002-of-00003.gguf")]
    assert machine_facts.split_parts(Path("/m/x.gguf")) == [Path("/m/x.gguf")]
