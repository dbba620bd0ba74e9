"""Registers ggml's backends from the files beside libllama; nothing of a backend is loaded before.

The native build keeps every backend in a module of its own (GGML_BACKEND_DL), so that a machine without, say,
libvulkan can still use the CPU of the same build, and that a process which wants the CPU only starts no GPU driver.
In a build that links its backends, all of them are there from the start and this is a no-op.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection
from pathlib import Path

from daemon.errors import HotsetError
from daemon.native.ggml import Ggml

# In the order in which llama.cpp itself registers them: cards first, the CPU last.
ORDER = ("cuda", "hip", "rpc", "vulkan", "cpu")


class BackendMissing(HotsetError):
    """Not even the CPU backend of the build works on this machine."""

    code = "backend_missing"


def load(directory: Path, wanted: Collection[str] | None = None) -> list[str]:
    """Register the backends of `directory`; `wanted` (of ORDER) leaves the others out, the CPU is always loaded.

    Returns the names that work, in ggml's spelling ("CPU", "RPC", "Vulkan"). A card's backend that does not load
    (no driver, no loader library) is left out. May be called again for more.

    Raises:
        BackendMissing: no CPU backend: the build is damaged or was compiled for another processor.
    """
    ggml = Ggml(directory)
    if _in_modules(directory):
        for name in ORDER:
            file = directory / f"libggml-{name}.so"
            if file.exists() and (wanted is None or name in wanted or name == "cpu"):
                ggml.ggml_backend_load(str(file).encode())
    names = registered(ggml)
    if "CPU" not in names:
        raise BackendMissing("the native build has no CPU backend that runs here; run `hotset build --force`")
    return names


def registered(ggml: Ggml) -> list[str]:
    """Names of the backends that libggml knows now, in its order."""
    entries = (ggml.ggml_backend_reg_get(index) for index in range(ggml.ggml_backend_reg_count()))
    return [ggml.ggml_backend_reg_name(entry).decode() for entry in entries]


def _in_modules(directory: Path) -> bool:
    """Whether the backends are modules; a linked one lacks the entry point that ggml_backend_load looks for."""
    return hasattr(ctypes.CDLL(str(directory / "libggml-cpu.so")), "ggml_backend_init")
