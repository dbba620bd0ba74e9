"""Which optional shader features a glslc knows: they decide how fast the Vulkan backend is, not whether it works."""

from __future__ import annotations

import re
import subprocess

from daemon.native.locate import Glslc

FEATURES = {
    "cooperative_matrix": "GL_KHR_cooperative_matrix",
    "cooperative_matrix2": "GL_NV_cooperative_matrix2",
    "integer_dot": "GL_EXT_integer_dot_product",
    "bfloat16": "GL_EXT_bfloat16",
}
MEASURING = ("cooperative_matrix", "integer_dot")
"""Without these prompts are read several times slower than the card can."""


def probe(glslc: str) -> Glslc:
    """Ask the compiler; a feature counts as missing when it says that the extension is not supported."""
    version = _run([glslc, "--version"], "").stdout
    numbers = re.findall(r"^(?:shaderc|glslang) (\S+)", version, re.MULTILINE)
    return Glslc(version=" / ".join(numbers) or version.strip().partition("\n")[0], features=_features(glslc))


def verdict(glslc: Glslc) -> str:
    """In words, what a Vulkan build made with this compiler is good for."""
    missing = [name.replace("_", " ") for name in MEASURING if not glslc.features[name]]
    if not missing:
        return "good for measuring"
    lack = ", no ".join(missing)
    return f"fine for tests, wrong for measuring: no {lack}; `hotset build --glslc FILE` takes a newer one"


def _features(glslc: str) -> dict[str, bool]:
    return {name: _knows(glslc, extension) for name, extension in FEATURES.items()}


def _knows(glslc: str, extension: str) -> bool:
    shader = f"#version 460\n#extension {extension} : require\nvoid main() {{}}\n"
    command = [glslc, "-fshader-stage=compute", "--target-env=vulkan1.3", "-o", "-", "-"]
    result = _run(command, shader)
    return result.returncode == 0 and "not supported" not in result.stderr


def _run(command: list[str], text: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, input=text, capture_output=True, text=True, errors="replace", check=False, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 127, "", str(error))
