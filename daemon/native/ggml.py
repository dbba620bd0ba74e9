"""The part of ggml's C API that llama-cpp-python does not bind and that we need, as a table of signatures."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from daemon.errors import HotsetError

_P, _S, _I64, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64, ctypes.c_int
_TEXT = ctypes.c_char_p
MAX_THREADS = 2


class InitParams(ctypes.Structure):
    """Struct ggml_init_params."""

    _fields_ = (("mem_size", _S), ("mem_buffer", _P), ("no_alloc", ctypes.c_bool))


SIGNATURES: dict[str, tuple[tuple[Any, ...], Any]] = {
    "ggml_init": ((InitParams,), _P),
    "ggml_free": ((_P,), None),
    "ggml_tensor_overhead": ((), _S),
    "ggml_graph_overhead": ((), _S),
    "ggml_new_tensor_2d": ((_P, _INT, _I64, _I64), _P),
    "ggml_new_tensor_3d": ((_P, _INT, _I64, _I64, _I64), _P),
    "ggml_mul_mat": ((_P, _P, _P), _P),
    "ggml_mul_mat_id": ((_P, _P, _P, _P), _P),
    "ggml_get_rows": ((_P, _P, _P), _P),
    "ggml_new_graph": ((_P,), _P),
    "ggml_build_forward_expand": ((_P, _P), None),
    "ggml_nbytes": ((_P,), _S),
    "ggml_type_name": ((_INT,), _TEXT),
    "ggml_blck_size": ((_INT,), _I64),
    "ggml_row_size": ((_INT, _I64), _S),
    "ggml_quantize_chunk": ((_INT, _P, _P, _I64, _I64, _I64, _P), _S),
    "ggml_backend_alloc_ctx_tensors_from_buft": ((_P, _P), _P),
    "ggml_backend_buffer_free": ((_P,), None),
    "ggml_backend_buft_name": ((_P,), _TEXT),
    "ggml_backend_dev_backend_reg": ((_P,), _P),
    "ggml_backend_dev_buffer_type": ((_P,), _P),
    "ggml_backend_cpu_buffer_type": ((), _P),
    "ggml_backend_dev_by_name": ((_TEXT,), _P),
    "ggml_backend_dev_by_type": ((_INT,), _P),
    "ggml_backend_dev_count": ((), _S),
    "ggml_backend_dev_get_props": ((_P, _P), None),
    "ggml_backend_dev_description": ((_P,), _TEXT),
    "ggml_backend_dev_get": ((_S,), _P),
    "ggml_backend_dev_init": ((_P, _TEXT), _P),
    "ggml_backend_dev_name": ((_P,), _TEXT),
    "ggml_backend_dev_type": ((_P,), _INT),
    "ggml_backend_dev_supports_op": ((_P, _P), ctypes.c_bool),
    "ggml_backend_free": ((_P,), None),
    "ggml_backend_graph_compute": ((_P, _P), _INT),
    "ggml_backend_load": ((_TEXT,), _P),
    "ggml_backend_reg_by_name": ((_TEXT,), _P),
    "ggml_backend_reg_count": ((), _S),
    "ggml_backend_reg_dev_count": ((_P,), _S),
    "ggml_backend_reg_dev_get": ((_P, _S), _P),
    "ggml_backend_reg_get": ((_S,), _P),
    "ggml_backend_reg_name": ((_P,), _TEXT),
    "ggml_backend_reg_get_proc_address": ((_P, _TEXT), _P),
    "ggml_backend_register": ((_P,), None),
    "ggml_backend_tensor_get": ((_P, _P, _S, _S), None),
    "ggml_backend_tensor_set": ((_P, _P, _S, _S), None),
}


class Ggml:
    """The functions of SIGNATURES as attributes.

    Raises:
        HotsetError: a library cannot be loaded or lacks a function.
    """

    def __init__(self, directory: Path) -> None:
        try:
            libraries = [ctypes.CDLL(str(directory / name)) for name in ("libggml.so", "libggml-base.so")]
        except OSError as error:
            raise HotsetError(f"the native library cannot be loaded: {error}") from None
        for name, (argtypes, restype) in SIGNATURES.items():
            function = next((getattr(library, name) for library in libraries if hasattr(library, name)), None)
            if function is None:
                raise HotsetError(f"the native library does not export {name}; run `hotset build`")
            function.argtypes, function.restype = argtypes, restype
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


class Cpu:
    """The CPU backend and its buffer types: the plain one first, then those that rearrange weights (repack, AMX)."""

    def __init__(self, ggml: Ggml) -> None:
        self._ggml = ggml
        self.device = ggml.ggml_backend_dev_by_type(0)
        self.backend = ggml.ggml_backend_dev_init(self.device, None)
        self._set_threads(MAX_THREADS)
        self.buffer_types = [ggml.ggml_backend_dev_buffer_type(self.device), *self._extra_buffer_types()]

    def close(self) -> None:
        """Free the backend."""
        self._ggml.ggml_backend_free(self.backend)

    def _function(self, name: bytes, restype: Any, *argtypes: Any) -> Any:
        registry = self._ggml.ggml_backend_dev_backend_reg(self.device)
        address = self._ggml.ggml_backend_reg_get_proc_address(registry, name)
        return ctypes.CFUNCTYPE(restype, *argtypes)(address) if address else None

    def _set_threads(self, count: int) -> None:
        set_n_threads = self._function(b"ggml_backend_set_n_threads", None, _P, _INT)
        if set_n_threads is not None:
            set_n_threads(self.backend, count)

    def _extra_buffer_types(self) -> list[int]:
        listing = self._function(b"ggml_backend_dev_get_extra_bufts", ctypes.POINTER(_P), _P)
        found: list[int] = []
        if listing is not None and (types := listing(self.device)):
            while types[len(found)]:
                found.append(types[len(found)])
        return found
