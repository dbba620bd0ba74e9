"""What the child processes need of ggml to look at a tensor."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

_P, _S = ctypes.c_void_p, ctypes.c_size_t


class GgufInit(ctypes.Structure):
    """Struct gguf_init_params."""

    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", _P))


class TensorHead(ctypes.Structure):
    """The first fields of struct ggml_tensor."""

    _fields_ = (("type", ctypes.c_int), ("buffer", _P), ("ne", ctypes.c_int64 * 4), ("nb", _S * 4))


SIGNATURES: dict[str, tuple[tuple[Any, ...], Any]] = {
    "gguf_init_from_file": ((ctypes.c_char_p, GgufInit), _P),
    "gguf_free": ((_P,), None),
    "ggml_get_name": ((_P,), ctypes.c_char_p),
    "ggml_n_dims": ((_P,), ctypes.c_int),
    "ggml_nbytes": ((_P,), _S),
    "ggml_backend_tensor_get": ((_P, _P, _S, _S), None),
}


def base_library() -> ctypes.CDLL:
    """libggml-base of the build that is in use."""
    library = ctypes.CDLL(str(Path(os.environ["LLAMA_CPP_LIB_PATH"], "libggml-base.so")))
    for name, (arguments, result) in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, result
    return library
