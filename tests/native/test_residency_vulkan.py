"""What only a Vulkan device has: pinned memory, the silent fallback from it, tensors that it cannot multiply.

Seen on Mesa's lavapipe, if the build has Vulkan; ggml's own limits on the size of a buffer stand in for a small card.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from daemon.native.hotset import Memory, Mode, Reason, Residency, State, Status
from daemon.verify.tolerance import KL_LEAST
from tests.minigguf import write_moe
from tests.native.test_residency import N_EXPERT, N_LAYER, SIZES, refused
from tests.residency_bench import fill, in_child, kl, open_bench

TENSOR_MIB = 4
"""One tensor of experts; all of them are 48, everything else of the model is less than 3."""


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("models") / "model.gguf"
    return str(write_moe(path, experts="F32", layers="F16", vocab="F16", **SIZES))


def largest_buffer(mib: int) -> dict[str, str]:
    return {"GGML_VK_FORCE_MAX_BUFFER_SIZE": str(mib << 20)}


def test_memory_that_the_device_reads_itself_is_told(lavapipe: dict[str, str], model_file: str) -> None:
    in_child(check_pinned, model_file, **lavapipe)


def check_pinned(path: str) -> None:
    check_slots(path, Memory.PINNED)


def test_a_silent_fallback_to_pageable_memory_is_told_and_works(lavapipe: dict[str, str], model_file: str) -> None:
    in_child(check_pageable, model_file, **lavapipe, **largest_buffer(2 * TENSOR_MIB))


def check_pageable(path: str) -> None:
    check_slots(path, Memory.PAGEABLE)


def check_slots(path: str, memory: Memory) -> None:
    with open_bench("Vulkan0", Path(path), load="none") as bench, Residency(bench.context.pointer) as hs:
        assert {(layer.memory, layer.reason) for layer in hs.layers()} == {(memory, Reason.MANAGED)}
        hs.resize([N_EXPERT // 2] * N_LAYER)
        hs.set_state(State.OFF)
        stock = bench.logits([(5, 0, 0)])
        hs.set_state(State.ON)
        fill(hs, {i: list(range(0, N_EXPERT, 2)) for i in range(N_LAYER)})
        assert {layer.mode for layer in hs.layers()} == {Mode.PARTIAL}
        bench.clear()
        logits = bench.logits([(5, 0, 0)])
        assert kl(stock, logits).max() <= KL_LEAST, "Vulkan rounds otherwise than the CPU; another expert is far off"
        assert all(layer.hits for layer in hs.layers())
        assert sum(layer.hits + layer.misses for layer in hs.layers()) == N_LAYER * SIZES["n_expert_used"]


def test_experts_that_the_device_cannot_multiply_stay_with_the_cpu(lavapipe: dict[str, str], model_file: str) -> None:
    in_child(check_unsupported, model_file, **lavapipe, **largest_buffer(TENSOR_MIB - 1))


def check_unsupported(path: str) -> None:
    with open_bench("Vulkan0", Path(path), load="mmap") as bench:
        stock = bench.logits([(5, 0, 0)])
        bench.clear()
        refused(Status.NOT_MANAGED, lambda: Residency(bench.context.pointer, [N_EXPERT] * N_LAYER))
        with Residency(bench.context.pointer) as hs:
            assert {(layer.reason, layer.memory) for layer in hs.layers()} == {(Reason.UNSUPPORTED, Memory.MAPPED)}
            np.testing.assert_array_equal(bench.logits([(5, 0, 0)]), stock)
