"""Compute devices as llama.cpp sees them."""

from __future__ import annotations

import ctypes
import os
import socket
from pathlib import Path
from typing import Any

from daemon.errors import HotsetError, ModelUnusable
from daemon.messages import Device
from daemon.native import backends
from daemon.native.ggml import Ggml
from daemon.native.library import backend

_CONNECT_SECONDS = 5.0


class DeviceUnavailable(HotsetError):
    """A configured RPC server does not answer now; it may later."""

    code = "device_unavailable"


_KINDS: dict[int, Any] = {0: "cpu", 1: "gpu", 2: "igpu", 3: "accel"}


def ggml() -> Ggml:
    """libggml of the build that is in use, its backends initialised."""
    backend()
    return Ggml(_directory())


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
        ModelUnusable: no device has such a name.
        DeviceUnavailable: an RPC server does not answer.
    """
    if spec == "auto":
        return None
    if spec == "cpu":
        return []
    g = ggml()
    return [pointer for name in spec.split(",") for pointer in _by_name(g, name.strip())]


def _directory() -> Path:
    return Path(os.environ["LLAMA_CPP_LIB_PATH"])


def _by_name(g: Ggml, name: str) -> list[int]:
    if name.startswith("rpc:"):
        return _rpc(g, name.removeprefix("rpc:"))
    pointer = g.ggml_backend_dev_by_name(name.encode())
    if pointer is None:
        known = ", ".join(device.name for device in list_devices())
        raise ModelUnusable(f"engine.device names {name!r}, but llama.cpp sees only: {known}")
    return [pointer]


def _rpc(g: Ggml, endpoint: str) -> list[int]:
    """The devices of an RPC server; ggml's RPC backend hands out the function that adds one by name."""
    registry = g.ggml_backend_reg_by_name(b"RPC")
    address = g.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_rpc_add_server") if registry else None
    if not address:
        raise ModelUnusable(f"engine.device names an RPC server at {endpoint}, but the build has no RPC backend")
    _check_endpoint(endpoint)
    server = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)(address)(endpoint.encode())
    count = g.ggml_backend_reg_dev_count(server) if server else 0
    if not count:
        raise DeviceUnavailable(f"the RPC server at {endpoint} offers no device")
    g.ggml_backend_register(server)
    return [g.ggml_backend_reg_dev_get(server, i) for i in range(count)]


def _check_endpoint(endpoint: str) -> None:
    """Ggml aborts the process when it cannot connect, so this tries first."""
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdecimal():
        raise ModelUnusable(f"engine.device: {endpoint!r} is not HOST:PORT")
    try:
        socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise DeviceUnavailable(f"the RPC server at {endpoint} does not answer: {why}") from None


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
