"""Which instruction sets to compile the CPU backend for, and the next smaller choice when one of them traps; pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from daemon.native.cpuinfo import GGML_FLAGS

# What each step down leaves out, on top of the steps before it.
_STEPS: tuple[frozenset[str], ...] = (
    frozenset(flag for flag in GGML_FLAGS if flag.startswith("AMX")),
    frozenset(flag for flag in GGML_FLAGS if flag.startswith("AVX512")),
    frozenset({"AVX_VNNI"}),
    frozenset({"AVX2", "FMA", "BMI2", "F16C"}),
    frozenset({"AVX"}),
)
# A processor (or hypervisor) that announces the left set without the right one is not to be believed about the left.
_NEEDS = {
    "AVX": "SSE42",
    "F16C": "AVX",
    "FMA": "AVX",
    "AVX2": "AVX",
    "AVX_VNNI": "AVX2",
    "AVX512": "AVX2",
    "AVX512_VBMI": "AVX512",
    "AVX512_VNNI": "AVX512",
    "AVX512_BF16": "AVX512",
    "AMX_TILE": "AVX512",
    "AMX_INT8": "AMX_TILE",
    "AMX_BF16": "AMX_TILE",
}
NATIVE = "NATIVE"
"""Off x86 ggml chooses by itself; this stands for letting it."""


def choose(announced: Collection[str], *, x86: bool = True) -> frozenset[str]:
    """The flags to compile for: everything announced whose own needs are announced too."""
    if not x86:
        return frozenset({NATIVE})
    return frozenset(flag for flag in announced if _believed(flag, announced))


def ladder(flags: frozenset[str]) -> list[frozenset[str]]:
    """`flags`, then ever smaller sets, each without one more family; no set twice."""
    steps = [flags]
    for left_out in (*_STEPS, frozenset({NATIVE})):
        smaller = steps[-1] - left_out
        if smaller != steps[-1]:
            steps.append(smaller)
    return steps


def cmake_options(flags: frozenset[str]) -> dict[str, str]:
    """Every GGML_* option spelled out, so that nothing is left to a default."""
    if NATIVE in flags:
        return {"GGML_NATIVE": "ON"}
    options = {"GGML_NATIVE": "OFF"}
    return options | {f"GGML_{flag}": "ON" if flag in flags else "OFF" for flag in GGML_FLAGS}


def describe(flags: Iterable[str]) -> str:
    """For people: the flags in ggml's order."""
    chosen = set(flags)
    return " ".join(flag for flag in (*GGML_FLAGS, NATIVE) if flag in chosen) or "baseline"


def _believed(flag: str, announced: Collection[str]) -> bool:
    need = _NEEDS.get(flag)
    return flag in announced and (need is None or _believed(need, announced))
