"""Which of ggml's x86 instruction sets a processor announces, read from the text of /proc/cpuinfo."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from pathlib import Path

# ggml's CMake option -> the words of /proc/cpuinfo that it needs. AVX512 stands for the five subsets that ggml turns
# on together.
GGML_FLAGS: dict[str, tuple[str, ...]] = {
    "SSE42": ("sse4_2",),
    "AVX": ("avx",),
    "F16C": ("f16c",),
    "FMA": ("fma",),
    "BMI2": ("bmi2",),
    "AVX2": ("avx2",),
    "AVX_VNNI": ("avx_vnni",),
    "AVX512": ("avx512f", "avx512cd", "avx512vl", "avx512dq", "avx512bw"),
    "AVX512_VBMI": ("avx512_vbmi", "avx512vbmi"),
    "AVX512_VNNI": ("avx512_vnni",),
    "AVX512_BF16": ("avx512_bf16",),
    "AMX_TILE": ("amx_tile",),
    "AMX_INT8": ("amx_int8",),
    "AMX_BF16": ("amx_bf16",),
}
_EITHER = {"AVX512_VBMI"}  # kernels have spelled this one in two ways


def announced(cpuinfo: str) -> frozenset[str]:
    """The GGML_FLAGS that every processor of the text has; empty where the text names no x86 flags."""
    lines = [line.partition(":")[2].split() for line in cpuinfo.splitlines() if line.startswith("flags")]
    if not lines:
        return frozenset()
    words = frozenset(lines[0]).intersection(*map(frozenset, lines[1:]))
    return frozenset(flag for flag, needs in GGML_FLAGS.items() if _has(flag, needs, words))


def _has(flag: str, needs: Iterable[str], words: frozenset[str]) -> bool:
    found = [word in words for word in needs]
    return any(found) if flag in _EITHER else all(found)


def is_x86() -> bool:
    """Whether this machine takes GGML_FLAGS at all."""
    return platform.machine().lower() in {"x86_64", "amd64", "i686", "i386"}


def machine_flags() -> frozenset[str]:
    """What this machine announces; empty off x86 and where /proc is not mounted."""
    if not is_x86():
        return frozenset()
    try:
        return announced(Path("/proc/cpuinfo").read_text("utf-8", "replace"))
    except OSError:
        return frozenset()
