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
    library = _open(directory)
    if _in_modules(directory):
        for name in ORDER:
            file = directory / f"libggml-{name}.so"
            if file.exists() and (wanted is None or name in wanted or name == "cpu"):
                library.ggml_backend_load(str(file).encode())
    names = registered(library)
    if "CPU" not in names:
        raise BackendMissing("the native build has no CPU backend that runs here; run `hotset build --force`")
    return names


def registered(library: ctypes.CDLL) -> list[str]:
    """Names of the backends that libggml knows now, in its order."""
    return [
        library.ggml_backend_reg_name(library.ggml_backend_reg_get(index)).decode()
        for index in range(library.ggml_backend_reg_count())
    ]


def _open(directory: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(directory / "libggml.so"))
    base = ctypes.CDLL(str(directory / "libggml-base.so"))
    library.ggml_backend_load.argtypes, library.ggml_backend_load.restype = [ctypes.c_char_p], ctypes.c_void_p
    library.ggml_backend_reg_count.argtypes, library.ggml_backend_reg_count.restype = [], ctypes.c_size_t
    library.ggml_backend_reg_get.argtypes = [ctypes.c_size_t]
    library.ggml_backend_reg_get.restype = ctypes.c_void_p
    base.ggml_backend_reg_name.argtypes, base.ggml_backend_reg_name.restype = [ctypes.c_void_p], ctypes.c_char_p
    library.ggml_backend_reg_name = base.ggml_backend_reg_name
    return library


def _in_modules(directory: Path) -> bool:
    """Whether the backends are modules; a linked one lacks the entry point that ggml_backend_load looks for."""
    return hasattr(ctypes.CDLL(str(directory / "libggml-cpu.so")), "ggml_backend_init")
