"""What the Vulkan backend gives to the driver and waits for; seen on Mesa's software Vulkan, if the build has Vulkan.

The device shows a second queue (`vulkan_shim.c`), as cards have one for transfers. 40 tokens are a wide step: the
device computes them with copies of the experts, wherever these come from.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.native.resident_prefill import N_STEPS
from tests.native.test_residency import N_LAYER
from tests.residency_bench import ROOT

MODES = ("stock", "zero", "half", "blocks", "full")
DEVICE_SPLITS = N_LAYER + 1
"""Parts of a step that stock llama.cpp computes on the device when all experts are in memory."""

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def seen(lavapipe: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return look(tmp_path_factory.mktemp("prefill"), MODES, lavapipe)


@pytest.fixture(scope="module")
def seen_on_shared_memory(lavapipe: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of a device that shares its memory with the host, with every copy on the queue for transfers."""
    settings = {"HOTSET_SHIM_INTEGRATED": "1", "GGML_VK_ASYNC_USE_TRANSFER_QUEUE": "1"}
    return look(tmp_path_factory.mktemp("shared"), ("stock", "half"), lavapipe | settings)


def look(directory: Path, modes: Sequence[str], settings: dict[str, str]) -> dict[str, Any]:
    """Mode -> its line."""
    command = [sys.executable, "-m", "tests.native.resident_prefill", str(directory), *modes]
    environment = os.environ | settings | {"HOTSET_SHIM_QUEUES": "2"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    return {line["mode"]: line for line in lines}


@pytest.mark.parametrize("mode", MODES[1:])
def test_a_prompt_is_bit_identical_whatever_is_resident(seen: dict[str, Any], mode: str) -> None:
    assert seen[mode]["max_abs_prefill"] == 0.0
    assert seen[mode]["kl_decode"] < 1e-5


def test_a_small_graph_is_one_submission(seen: dict[str, Any]) -> None:
    """Each part costs one for its graph and three for copies and the wait; cut by flops it was nine altogether."""
    assert seen["stock"]["counts"]["steps"]["submissions"] <= 4 * DEVICE_SPLITS * N_STEPS


def test_large_copies_take_the_queue_for_transfers(seen: dict[str, Any]) -> None:
    """Three tensors of experts a layer are copied for a prompt, each on the other queue; a step copies little.

    What computes waits for all but the first, which the host waits for before there is anything to compute.
    """
    counts = seen["stock"]["counts"]
    assert counts["prompt"]["semaphore_waits"] == 3 * N_LAYER - 1
    assert counts["steps"]["semaphore_waits"] == 0


@pytest.mark.parametrize("mode", ["zero", "half"])
def test_a_prompt_waits_for_the_device_at_its_end_only(seen: dict[str, Any], mode: str) -> None:
    assert seen["stock"]["counts"]["prompt"]["fence_waits"] > 3 * N_LAYER
    assert seen[mode]["counts"]["prompt"]["fence_waits"] <= N_LAYER


def test_the_device_is_not_drained_before_the_cpu_computes_its_experts(seen: dict[str, Any]) -> None:
    """Stock waits for all that was queued, we wait for the reads alone: the next parts are queued behind them."""
    assert seen["stock"]["counts"]["steps"]["fence_waits"] >= N_LAYER * N_STEPS
    assert seen["zero"]["counts"]["steps"]["fence_waits"] < N_LAYER * N_STEPS


def test_the_part_behind_the_cpus_share_is_recorded_before_it(seen: dict[str, Any]) -> None:
    """While the CPU looks whether its reads have ended, what the device computes after the CPU is held back."""
    assert seen["half"]["counts"]["steps"]["held_back"] >= (N_LAYER - 1) * N_STEPS
    assert seen["full"]["counts"]["steps"]["held_back"] == 0


def test_what_is_held_back_does_not_copy_before_the_cpu_has_computed(seen_on_shared_memory: dict[str, Any]) -> None:
    """What goes to the queue for transfers is submitted at once, so a step's small copies must not wait for it."""
    counts = seen_on_shared_memory["half"]["counts"]
    assert counts["prompt"]["semaphore_waits"] > 0
    assert counts["steps"]["semaphore_waits"] == 0


def test_the_host_does_not_clear_sums_that_the_device_still_adds_to(seen_on_shared_memory: dict[str, Any]) -> None:
    """On shared memory it clears them by itself, also for a part that is prepared while another one is computed."""
    assert seen_on_shared_memory["half"]["counts"]["steps"]["fills"] >= (N_LAYER - 1) * N_STEPS
    assert seen_on_shared_memory["half"]["max_abs_prefill"] == 0.0
    assert seen_on_shared_memory["half"]["kl_decode"] < 1e-5
