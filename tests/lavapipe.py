"""Mesa's software Vulkan: the real backend without a graphics card, slowly, in child processes.

Mesa 22.3 (Debian 12) binds every buffer of a descriptor set, also those that a shader does not use. ggml takes the same
sets for operations with fewer buffers, which Vulkan allows; of what was bound before some may be destroyed by then, and
the driver damages the heap. So buffers are never destroyed here, by the shim; their memory is freed all the same.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

DRIVERS = Path("/usr/share/vulkan/icd.d")
SHIM = Path(__file__).parent / "native" / "vulkan_shim.c"


def environment(library: Path, directory: Path) -> dict[str, str]:
    """What a child needs so that its device Vulkan0 is this one; the shim is compiled into `directory`.

    Skips the test if something is missing.
    """
    icd = next(iter(sorted(DRIVERS.glob("lvp_icd*.json"))), None)  # releases name it differently
    if icd is None:
        pytest.skip(f"needs Mesa's lavapipe (mesa-vulkan-drivers): it is not in {DRIVERS}")
    if not (library / "libggml-vulkan.so").exists():
        pytest.skip("needs a build with the Vulkan backend; `hotset doctor` says what that lacks")
    compiler, shim = shutil.which("cc"), directory / "vulkan_shim.so"
    if compiler is None:
        pytest.skip("needs a C compiler")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", shim, SHIM], check=True)
    device = {"GGML_VK_VISIBLE_DEVICES": "0", "VK_ICD_FILENAMES": str(icd)}
    return device | {"LD_PRELOAD": str(shim), "HOTSET_SHIM_KEEP_BUFFERS": "1"}
