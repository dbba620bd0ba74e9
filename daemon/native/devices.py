"""Compute devices as llama.cpp sees them."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from daemon.errors import HotsetError, ModelUnusable
from daemon.messages import Device
from daemon.native import backends, cards
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


def list_devices(chosen: Sequence[int] = ()) -> list[Device]:
    """Every registered device, in llama.cpp's order; those of RPC servers only where they are `chosen`.

    One that is not in use may be gone, and ggml ends the process that asks it.
    """
    g = ggml()
    found = [g.ggml_backend_dev_get(i) for i in range(g.ggml_backend_dev_count())]
    return [_describe(g, pointer) for pointer in found if pointer in chosen or not _is_remote(g, pointer)]


class _Props(ctypes.Structure):
    """`struct ggml_backend_dev_props`."""

    _fields_ = (
        *((name, ctypes.c_char_p) for name in ("name", "description")),
        *((name, ctypes.c_size_t) for name in ("memory_free", "memory_total")),
        ("type", ctypes.c_int),
        ("device_id", ctypes.c_char_p),
        *((name, ctypes.c_bool) for name in ("async", "host_buffer", "buffer_from_host_ptr", "events", "mmap_support")),
    )


def choose(spec: str) -> list[int]:
    """Device pointers for `engine.device`, in the order in which layers are spread over them; none: the CPU only.

    Raises:
        ModelUnusable: no device has such a name.
        DeviceUnavailable: an RPC server does not answer.
    """
    if spec == "cpu":
        return []
    g = ggml()
    if spec == "auto":
        return _automatic(g)
    return [pointer for name in spec.split(",") for pointer in _by_name(g, name.strip())]


def describe(pointer: int) -> Device:
    """A device as it is now, its free memory among the rest."""
    return _describe(ggml(), pointer)


def reads_host_memory(pointer: int) -> bool:
    """Whether a device copies from memory that it has pinned, several times as fast as from any other."""
    props = _Props()
    ggml().ggml_backend_dev_get_props(pointer, ctypes.byref(props))
    return bool(props.host_buffer)


def _automatic(g: Ggml) -> list[int]:
    """Llama.cpp's own choice: each GPU once, though two backends see it; integrated ones where there is no other.

    The rule of `llama_prepare_model_devices` (src/llama.cpp), made here so that the choice is known by name. Servers
    of the RPC backend, which has to be asked for, are no part of it.
    """
    found: dict[str, list[tuple[int, int, bytes | None]]] = {"gpu": [], "igpu": []}
    for i in range(g.ggml_backend_dev_count()):
        pointer = g.ggml_backend_dev_get(i)
        registry, props = g.ggml_backend_dev_backend_reg(pointer), _Props()
        group = found.get(_KINDS.get(g.ggml_backend_dev_type(pointer), ""))
        if group is None or _is_remote(g, pointer):
            continue
        g.ggml_backend_dev_get_props(pointer, ctypes.byref(props))
        group.append((pointer, registry, props.device_id))
    gpus = [one for i, one in enumerate(found["gpu"]) if not one[2] or one[2] not in [o[2] for o in found["gpu"][:i]]]
    integrated = [one for one in found["igpu"] if one[1] == found["igpu"][0][1]]
    return [pointer for pointer, *_ in gpus or integrated]


def _is_remote(g: Ggml, pointer: int) -> bool:
    """Whether an RPC server has it; their registries are called "RPC[HOST:PORT]"."""
    return bool(g.ggml_backend_reg_name(g.ggml_backend_dev_backend_reg(pointer)).startswith(b"RPC"))


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
    props = _Props()
    g.ggml_backend_dev_get_props(pointer, ctypes.byref(props))
    pci = cards.address((props.device_id or b"").decode(errors="replace"))
    return Device(
        name=g.ggml_backend_dev_name(pointer).decode(),
        description=g.ggml_backend_dev_description(pointer).decode(errors="replace"),
        kind=_KINDS.get(g.ggml_backend_dev_type(pointer), "accel"),
        memory_free=props.memory_free,
        memory_total=props.memory_total,
        pci=pci,
        remote=_is_remote(g, pointer),
        card=cards.read(pci),
    )
