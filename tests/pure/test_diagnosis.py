"""What `hotset doctor` concludes from its facts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from daemon.config import Config
from hotset_tools import diagnosis, machine_facts

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
