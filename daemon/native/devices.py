"""Compute devices as llama.cpp sees them."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

from daemon.errors import ModelUnusable
from daemon.messages import Device
from daemon.native import backends
from daemon.native.library import backend

_KINDS: dict[int, Any] = {0: "cpu", 1: "gpu", 2: "igpu", 3: "accel"}

_SIGNATURES: dict[str, tuple[list[Any], Any]] = {
    "ggml_backend_dev_count": ([], ctypes.c_size_t),
    "ggml_backend_dev_get": ([ctypes.c_size_t], ctypes.c_void_p),
    "ggml_backend_dev_by_name": ([ctypes.c_char_p], ctypes.c_void_p),
    "ggml_backend_dev_name": ([ctypes.c_void_p], ctypes.c_char_p),
    "ggml_backend_dev_description": ([ctypes.c_void_p], ctypes.c_char_p),
    "ggml_backend_dev_type": ([ctypes.c_void_p], ctypes.c_int),
    "ggml_backend_dev_memory": (
        [ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)],
        None,
    ),
    "ggml_backend_cpu_buffer_type": ([], ctypes.c_void_p),
    "ggml_backend_reg_dev_count": ([ctypes.c_void_p], ctypes.c_size_t),
    "ggml_backend_reg_dev_get": ([ctypes.c_void_p, ctypes.c_size_t], ctypes.c_void_p),
    "ggml_backend_register": ([ctypes.c_void_p], None),
}


class Ggml:
    """The few functions of libggml that llama-cpp-python does not bind."""

    def __init__(self, directory: Path) -> None:
        self._libraries = [_open(directory, name) for name in ("ggml", "ggml-base")]
        for name, (argtypes, restype) in _SIGNATURES.items():
            function = self._find(name)
            function.argtypes, function.restype = argtypes, restype
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def _find(self, name: str) -> Any:
        for library in self._libraries:
            if hasattr(library, name):
                return getattr(library, name)
        raise ModelUnusable(f"the native library does not export {name}; run `hotset build`")


def ggml() -> Ggml:
    """libggml of the build that is in use, its backends initialised."""
    backend()
    return Ggml(_directory())


def _directory() -> Path:
    return Path(os.environ["LLAMA_CPP_LIB_PATH"])


def load_backends(spec: str) -> list[str]:
    """Register the backends that `engine.device` may need, before anything is loaded; returns their names."""
    wanted: tuple[str, ...] = ("cpu",)
    if spec != "cpu":
        wanted = backends.ORDER if "rpc:" in spec else tuple(name for name in backends.ORDER if name != "rpc")
    return backends.load(_directory(), wanted)


def list_devices() -> list[Device]:
    """Every registered device, in llama.cpp's order."""
    g = ggml()
    return [_describe(g, g.ggml_backend_dev_get(i)) for i in range(g.ggml_backend_dev_count())]


def choose(spec: str) -> list[int] | None:
    """Device pointers for `engine.device`; None leaves the choice to llama.cpp, an empty list means the CPU only.

    Raises:
        ModelUnusable: no device has such a name, or an RPC server does not answer.
    """
    if spec == "auto":
        return None
    if spec == "cpu":
        return []
    g = ggml()
    return [pointer for name in spec.split(",") for pointer in _by_name(g, name.strip())]


def _by_name(g: Ggml, name: str) -> list[int]:
    if name.startswith("rpc:"):
        return _rpc(g, name.removeprefix("rpc:"))
    pointer = g.ggml_backend_dev_by_name(name.encode())
    if pointer is None:
        known = ", ".join(device.name for device in list_devices())
        raise ModelUnusable(f"engine.device names {name!r}, but llama.cpp sees only: {known}")
    return [pointer]


def _rpc(g: Ggml, endpoint: str) -> list[int]:
    library = _open(_directory(), "ggml-rpc")
    library.ggml_backend_rpc_add_server.argtypes = [ctypes.c_char_p]
    library.ggml_backend_rpc_add_server.restype = ctypes.c_void_p
    registry = library.ggml_backend_rpc_add_server(endpoint.encode())
    if registry is None:
        raise ModelUnusable(f"engine.device names an RPC server at {endpoint}, which does not answer")
    g.ggml_backend_register(registry)
    return [g.ggml_backend_reg_dev_get(registry, i) for i in range(g.ggml_backend_reg_dev_count(registry))]


def _open(directory: Path, name: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(directory / f"lib{name}.so"))
    except OSError as error:
        raise ModelUnusable(f"lib{name}.so cannot be loaded ({error}); run `hotset build`") from None


def _describe(g: Ggml, pointer: int) -> Device:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    g.ggml_backend_dev_memory(pointer, ctypes.byref(free), ctypes.byref(total))
    return Device(
        name=g.ggml_backend_dev_name(pointer).decode(),
        description=g.ggml_backend_dev_description(pointer).decode(errors="replace"),
        kind=_KINDS.get(g.ggml_backend_dev_type(pointer), "accel"),
        memory_free=free.value,
        memory_total=total.value,
    )
