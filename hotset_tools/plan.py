"""Decides what a native build is: backends, instruction sets, cmake options, and the key that names it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from daemon.errors import HotsetError
from daemon.native import cpuinfo, pin
from daemon.native.locate import Glslc
from hotset_tools import cpuflags, shaders, toolchain
from hotset_tools.cache import make_key
from hotset_tools.toolchain import BACKENDS, Toolchain


class ToolsMissing(HotsetError):
    """Something that the build needs is not installed; the message names the packages."""

    code = "tools_missing"


_PEER_HEADERS = (
    "its unpatched source needs Vulkan headers from 1.3.272 on; --vulkan-include DIR names a directory with newer ones."
)


@dataclass(frozen=True)
class Request:
    """What was asked for. `backend` is "auto" or one of BACKENDS; every build has the CPU and RPC too."""

    backend: str = "auto"
    peer: bool = False
    force: bool = False
    jobs: int = 0
    glslc: str | None = None
    vulkan_include: str | None = None
    keep_work: bool = False


@dataclass(frozen=True)
class Plan:
    """What will be built. `backends` are in ggml's spelling, "rpc" among them; `options` lack the CPU flags."""

    kind: str
    key: str
    series: str
    backends: tuple[str, ...]
    flags: frozenset[str]
    options: Mapping[str, str]
    tools: Toolchain
    glslc: Glslc | None
    notes: tuple[str, ...]


def make_plan(request: Request, tools: Toolchain, announced: frozenset[str], *, x86: bool, peer: bool = False) -> Plan:
    """Resolve the request on this machine.

    Raises:
        ToolsMissing: names everything that is missing for what was asked.
    """
    chosen, notes = choose_backends(request.backend, tools)
    if peer and "vulkan" in chosen and toolchain.LAYER_SETTINGS not in tools.has:
        if request.backend == "vulkan":
            raise ToolsMissing(f"The peer cannot be built for Vulkan: {_PEER_HEADERS}")
        chosen.remove("vulkan")
        notes.append(f"The peer is built without vulkan: {_PEER_HEADERS}")
    flags = _compilable(cpuflags.choose(announced, x86=x86), tools)
    glslc = shaders.probe(tools.tools["glslc"]) if "vulkan" in chosen else None
    options = _options(chosen, tools)
    backends = tuple(sorted({*chosen, "rpc"}))
    kind, series = ("peer", "") if peer else ("hotset", pin.series())
    parts = {
        "compiler": tools.compiler,
        "flags": sorted(flags),
        "options": {name: value for name, value in options.items() if _decides(name, value)},
        "glslc": glslc.model_dump() if glslc else None,
        "include": tools.include if "vulkan" in chosen or "hip" in chosen else (),
    }
    key = make_key(kind, pin.upstream().version, series, backends, parts)
    return Plan(kind, key, series, backends, flags, options, tools, glslc, tuple(notes))


def _decides(name: str, value: str) -> bool:
    """Whether an option changes what is built: not where a tool lies, nor whether ccache helps."""
    return name != "GGML_CCACHE" and not value.startswith("/")


def choose_backends(asked: str, tools: Toolchain) -> tuple[list[str], list[str]]:
    """The backends to build, the CPU always among them, and what to tell about those that `auto` leaves out.

    Raises:
        ToolsMissing: the CPU or a backend that was asked for cannot be built.
    """
    if asked != "auto" and asked not in BACKENDS:
        raise HotsetError(f"There is no backend {asked!r}; choose auto, {', '.join(BACKENDS)}.")
    wanted = "cpu" if asked == "auto" else asked
    if missing := tools.missing(wanted):
        raise ToolsMissing(f"The {wanted} backend cannot be built, {toolchain.advice(missing)}")
    if asked != "auto":
        return list(dict.fromkeys(["cpu", asked])), []
    available = tools.available()
    return available, [_left_out(name, tools) for name in BACKENDS if name not in available]


def _left_out(name: str, tools: Toolchain) -> str:
    if missing := tools.missing(name):
        return f"Without {name}, {toolchain.advice(missing)}"
    return f"Without {name}: its compiler is here but no NVIDIA card; `--backend {name}` builds it all the same."


def _compilable(flags: frozenset[str], tools: Toolchain) -> frozenset[str]:
    """The flags that the compiler knows; an old one may lack the newest."""
    options = {flag: _COMPILER_OPTIONS.get(flag, f"-m{flag.lower().replace('_', '')}") for flag in flags}
    if cpuflags.NATIVE in flags or toolchain.accepts(tools.tools["cxx"], options.values()):
        return flags
    return cpuflags.choose([flag for flag in flags if toolchain.accepts(tools.tools["cxx"], [options[flag]])])


_COMPILER_OPTIONS = {
    "SSE42": "-msse4.2",
    "AVX512": "-mavx512f",
    "AMX_TILE": "-mamx-tile",
    "AMX_INT8": "-mamx-int8",
    "AMX_BF16": "-mamx-bf16",
}


def _options(backends: list[str], tools: Toolchain) -> dict[str, str]:
    options = {
        "BUILD_SHARED_LIBS": "ON",
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_C_COMPILER": tools.tools["cc"],
        "CMAKE_CXX_COMPILER": tools.tools["cxx"],
        "GGML_BACKEND_DL": "ON",
        "GGML_CCACHE": "ON" if "ccache" in tools.tools else "OFF",
        "GGML_RPC": "ON",
        "LLAMA_OPENSSL": "OFF",
    }
    options |= {f"GGML_{name.upper()}": "ON" if name in backends else "OFF" for name in BACKENDS}
    if "vulkan" in backends:
        options["Vulkan_GLSLC_EXECUTABLE"] = tools.tools["glslc"]
        # Only a directory that was named is told; cmake finds the system's by itself.
        if include := next((path for path in tools.include if Path(path, "vulkan").is_dir()), None):
            options["Vulkan_INCLUDE_DIR"] = include
    if "hip" in backends and (architectures := amd_architectures()):
        options["GPU_TARGETS"] = ";".join(architectures)
    if "cuda" in backends and tools.nvidia_device:
        options["CMAKE_CUDA_ARCHITECTURES"] = "native"
        options["CMAKE_CUDA_COMPILER"] = tools.tools["nvcc"]
    return options


def amd_architectures(topology: Path = Path("/sys/class/kfd/kfd/topology/nodes")) -> list[str]:
    """The gfx names of the AMD cards that the kernel shows; none: ggml compiles for all that it knows."""
    names = {gfx_name(int(match[1])) for path in topology.glob("*/properties") if (match := _gfx(path))}
    return sorted(names)


def gfx_name(version: int) -> str:
    """The kernel's gfx_target_version as LLVM writes it: 120001 is gfx1201, 90010 is gfx90a."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def _gfx(path: Path) -> re.Match[str] | None:
    try:
        return re.search(r"^gfx_target_version ([1-9]\d*)$", path.read_text("utf-8"), re.MULTILINE)
    except OSError:
        return None


def machine() -> tuple[frozenset[str], bool]:
    """What this processor announces, and whether it is an x86."""
    return cpuinfo.machine_flags(), cpuinfo.is_x86()
