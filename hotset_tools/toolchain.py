"""What this machine has for building, and which packages bring what it lacks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

BACKENDS = ("cpu", "vulkan", "hip", "cuda")


@dataclass(frozen=True)
class Need:
    """Something a build needs, in words, and the package of each family of distributions that has it."""

    what: str
    packages: Mapping[str, str]


NEEDS: dict[str, Need] = {
    "cxx": Need("a C++ compiler", {"debian": "g++", "fedora": "gcc-c++", "arch": "gcc"}),
    "cc": Need("a C compiler", {"debian": "gcc", "fedora": "gcc", "arch": "gcc"}),
    "cmake": Need("cmake", {"debian": "cmake", "fedora": "cmake", "arch": "cmake"}),
    "ninja": Need("ninja", {"debian": "ninja-build", "fedora": "ninja-build", "arch": "ninja"}),
    "glslc": Need("glslc, the shader compiler", {"debian": "glslc", "fedora": "glslc", "arch": "shaderc"}),
    "vulkan headers": Need(
        "the Vulkan headers, 1.3.239 or newer",
        {"debian": "libvulkan-dev", "fedora": "vulkan-headers", "arch": "vulkan-headers"},
    ),
    "vulkan loader": Need(
        "the Vulkan loader's library",
        {"debian": "libvulkan-dev", "fedora": "vulkan-loader-devel", "arch": "vulkan-icd-loader"},
    ),
    "spirv headers": Need(
        "the SPIR-V headers", {"debian": "spirv-headers", "fedora": "spirv-headers-devel", "arch": "spirv-headers"}
    ),
    "hipcc": Need("hipcc, ROCm's compiler", {"debian": "hipcc", "fedora": "hipcc", "arch": "rocm-hip-sdk"}),
    "hipblas headers": Need(
        "the hipBLAS headers", {"debian": "libhipblas-dev", "fedora": "hipblas-devel", "arch": "hipblas"}
    ),
    "rocblas headers": Need(
        "the rocBLAS headers", {"debian": "librocblas-dev", "fedora": "rocblas-devel", "arch": "rocblas"}
    ),
    "nvcc": Need("nvcc, CUDA's compiler", {"debian": "nvidia-cuda-toolkit", "fedora": "cuda-toolkit", "arch": "cuda"}),
}
_BASE = ("cxx", "cc", "cmake", "ninja")
_BY_BACKEND = {
    "cpu": (),
    "vulkan": ("glslc", "vulkan headers", "vulkan loader", "spirv headers"),
    "hip": ("hipcc", "hipblas headers", "rocblas headers"),
    "cuda": ("nvcc",),
}
_OLDEST_VULKAN = 239
"""VK_HEADER_VERSION of Debian 12, the oldest that the patched source was compiled with."""
LAYER_SETTINGS = "vulkan layer settings"
"""In `Toolchain.has` when the Vulkan headers are new enough for the unpatched source too (1.3.272)."""

_HEADERS = {
    "spirv headers": "spirv/unified1/spirv.hpp",
    "hipblas headers": "hipblas/hipblas.h",
    "rocblas headers": "rocblas/rocblas.h",
}
_VULKAN_PROBE = """\
#if __has_include(<vulkan/vulkan.hpp>) && __has_include(<vulkan/vulkan_core.h>)
#include <vulkan/vulkan_core.h>
vulkan_header VK_HEADER_VERSION
#ifdef VK_EXT_layer_settings
has_layer_settings
#endif
#endif
"""
_INSTALL = {"debian": "sudo apt-get install", "fedora": "sudo dnf install", "arch": "sudo pacman -S"}


@dataclass(frozen=True)
class Toolchain:
    """Paths of the tools that are there; `has` names everything of NEEDS that is, headers and libraries too."""

    tools: Mapping[str, str]
    has: frozenset[str]
    nvidia_device: bool = False
    compiler: str = ""
    """First line of `c++ --version`."""
    include: tuple[str, ...] = field(default=())
    """Extra include directories."""

    def missing(self, backend: str) -> list[str]:
        """Names of NEEDS that a build with `backend` lacks."""
        return [name for name in (*_BASE, *_BY_BACKEND[backend]) if name not in self.has]

    def available(self) -> list[str]:
        """Backends that `auto` takes: tools present, and for cuda a card too, because its build takes very long."""
        return [name for name in BACKENDS if not self.missing(name) and (name != "cuda" or self.nvidia_device)]


def survey(
    *, glslc: str | None = None, vulkan_include: str | None = None, environ: Mapping[str, str] = os.environ
) -> Toolchain:
    """Look at the machine: tools on PATH (and beside this Python), headers by the compiler's own search."""
    tools = _find_tools(environ)
    if glslc:
        tools["glslc"] = glslc
    include = tuple(path for path in (vulkan_include, _sdk(environ, "VULKAN_SDK"), _sdk(environ, "ROCM_PATH")) if path)
    has = set(tools)
    if "cxx" in tools:
        has |= _headers(tools["cxx"], include) | _loader(tools["cxx"], environ)
    return Toolchain(tools, frozenset(has), has_nvidia_device(), _first_line(tools.get("cxx")), include)


def advice(names: Iterable[str], family: str | None = None) -> str:
    """What is missing, in words, and the command that installs it."""
    chosen = list(names)
    whats = ", ".join(dict.fromkeys(NEEDS[name].what for name in chosen))
    return f"missing: {whats}. {install_command(chosen, family)}"


def install_command(names: Iterable[str], family: str | None = None) -> str:
    """The package manager's command; for an unknown distribution the packages of all that are known."""
    chosen = list(names)
    family = family or distribution()
    if family in _INSTALL:
        return f"Install with: {_INSTALL[family]} {_packages(chosen, family)}"
    return "; ".join(f"{known}: {command} {_packages(chosen, known)}" for known, command in _INSTALL.items())


def distribution(os_release: Path = Path("/etc/os-release")) -> str:
    """ "debian", "fedora" or "arch" by ID and ID_LIKE; "" when none of them."""
    try:
        text = os_release.read_text("utf-8")
    except OSError:
        return ""
    pairs = (line.partition("=") for line in text.splitlines())
    words = {word for key, _, value in pairs if key in {"ID", "ID_LIKE"} for word in value.strip("\"'").split()}
    names = {"ubuntu": "debian", "rhel": "fedora", "archlinux": "arch"}
    return next((names.get(word, word) for word in sorted(words) if names.get(word, word) in _INSTALL), "")


def has_nvidia_device() -> bool:
    """Whether the kernel shows an NVIDIA card (a toolkit alone says nothing)."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or any(Path("/proc/driver/nvidia/gpus").glob("*"))


def accepts(cxx: str, flags: Iterable[str]) -> bool:
    """Whether the compiler knows these command-line flags."""
    return _run([cxx, *flags, "-x", "c++", "-E", "-"], "").returncode == 0


def _packages(names: list[str], family: str) -> str:
    return " ".join(dict.fromkeys(NEEDS[name].packages[family] for name in names))


def _find_tools(environ: Mapping[str, str]) -> dict[str, str]:
    # cmake and ninja may come from wheels: their commands lie beside this Python, which need not be on PATH.
    path = os.pathsep.join((environ.get("PATH", ""), str(Path(sys.executable).parent)))
    rocm = os.pathsep.join((path, "/opt/rocm/bin"))
    cuda = os.pathsep.join((path, "/usr/local/cuda/bin"))
    candidates = {
        "cxx": [(environ.get("CXX") or "c++", path), ("g++", path), ("clang++", path)],
        "cc": [(environ.get("CC") or "cc", path), ("gcc", path), ("clang", path)],
        "cmake": [("cmake", path)],
        "ninja": [("ninja", path), ("ninja-build", path)],
        "ccache": [("ccache", path)],
        "glslc": [("glslc", path)],
        "hipcc": [("hipcc", rocm)],
        "nvcc": [("nvcc", cuda)],
    }
    found = {name: _first(options) for name, options in candidates.items()}
    return {name: tool for name, tool in found.items() if tool}


def _first(options: list[tuple[str, str]]) -> str | None:
    return next((found for name, path in options if (found := shutil.which(name, path=path))), None)


def _sdk(environ: Mapping[str, str], name: str) -> str | None:
    base = environ.get(name) or ("/opt/rocm" if name == "ROCM_PATH" else "")
    include = Path(base, "include")
    return str(include) if base and include.is_dir() else None


def _headers(cxx: str, include: tuple[str, ...]) -> set[str]:
    """Names of _HEADERS that the preprocessor finds, and how old Vulkan's are; one run for all."""
    lines = [f"#if __has_include(<{path}>)\nfound {path}\n#endif\n" for path in _HEADERS.values()]
    # -P: without it gcc puts line markers between a word and the macro of a system header.
    command = [cxx, *(f"-I{path}" for path in include), "-x", "c++", "-E", "-P", "-"]
    result = _run(command, _VULKAN_PROBE + "".join(lines))
    found = {name for name, path in _HEADERS.items() if f"found {path}" in result.stdout}
    version = re.search(r"^vulkan_header\s+(\d+)", result.stdout, re.MULTILINE)
    if version and int(version[1]) >= _OLDEST_VULKAN:
        found.add("vulkan headers")
        found |= {LAYER_SETTINGS} if "has_layer_settings" in result.stdout else set()
    return found


def _loader(cxx: str, environ: Mapping[str, str]) -> set[str]:
    library = Path(_run([cxx, "-print-file-name=libvulkan.so"], "").stdout.strip())
    sdk = Path(environ.get("VULKAN_SDK") or "/nonexistent", "lib", "libvulkan.so")
    return {"vulkan loader"} if (library.is_absolute() and library.exists()) or sdk.exists() else set()


def _first_line(tool: str | None) -> str:
    return _run([tool, "--version"], "").stdout.partition("\n")[0].strip() if tool else ""


def _run(command: list[str], text: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 127, "", str(error))
