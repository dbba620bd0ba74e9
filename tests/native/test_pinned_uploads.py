"""Who copies an expert to the card; seen on Mesa's software Vulkan, if the build has Vulkan."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.residency_bench import ROOT

pytestmark = pytest.mark.timeout(300)


def staged(directory: Path, settings: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Setting of model.load -> its line."""
    command = [sys.executable, "-m", "tests.native.pinned_uploads", str(directory), "none", "mmap"]
    result = subprocess.run(command, cwd=ROOT, env=os.environ | settings, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    return {line["load"]: line for line in lines}


def test_the_card_fetches_what_is_pinned(lavapipe: dict[str, str], tmp_path: Path) -> None:
    """All of it in one go, and without its queue for computing; the host copies what it may take away."""
    seen = staged(tmp_path, lavapipe | {"HOTSET_SHIM_QUEUES": "2"})
    assert (seen["none"]["submissions"], seen["none"]["semaphore_waits"], seen["none"]["fence_waits"]) == (1, 0, 0)
    assert seen["mmap"]["submissions"] == 0
    assert max(line["kl"] for line in seen.values()) < 1e-8


@pytest.mark.parametrize("settings", [{}, {"HOTSET_SHIM_QUEUES": "2", "HOTSET_SHIM_INTEGRATED": "1"}])
def test_a_card_with_one_queue_or_without_memory_of_its_own_gets_the_same(
    lavapipe: dict[str, str], tmp_path: Path, settings: dict[str, str]
) -> None:
    seen = staged(tmp_path, lavapipe | settings)
    assert seen["none"]["submissions"] > 0
    assert max(line["kl"] for line in seen.values()) < 1e-8
