"""A prompt takes experts that are on the device from there; seen on Mesa's software Vulkan, if the build has Vulkan."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ICD = Path("/usr/share/vulkan/icd.d/lvp_icd.x86_64.json")
MODES = ("stock", "zero", "half", "full")
ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(600)
def test_a_prompt_is_bit_identical_whatever_is_resident(library_path: Path, tmp_path: Path) -> None:
    """40 tokens are computed on the device with copies of the experts, wherever these come from."""
    if not ICD.exists() or not (library_path / "libggml-vulkan.so").exists():
        pytest.skip("needs Mesa's lavapipe and a build with the Vulkan backend")
    command = [sys.executable, "-m", "tests.native.resident_prefill", str(tmp_path), *MODES]
    environment = os.environ | {"GGML_VK_VISIBLE_DEVICES": "0", "VK_ICD_FILENAMES": str(ICD)}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert [(line["mode"], line["max_abs_prefill"], line["kl_decode"] < 1e-5) for line in lines] == [
        (mode, 0.0, True) for mode in MODES[1:]
    ]
