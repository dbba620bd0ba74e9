"""The exports of our own patch series, as a table of signatures that is bound and checked in one place.

`tests/build/test_abi_drift.py` compares the table with the prototypes in patches/.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from daemon.errors import HotsetError

ABI_VERSION = 4
"""LLAMA_HOTSET_ABI_VERSION of the series that this code is written for."""


class AbiMismatch(HotsetError):
    """The native library is not the one that this code is written for (shown to the operator)."""

    code = "abi_mismatch"


@dataclass(frozen=True)
class Signature:
    """One C function. Without `restype` ctypes would cut a pointer to 32 bits, so every entry has one."""

    name: str
    restype: Any
    argtypes: tuple[Any, ...] = ()


_I32, _PTR = ctypes.c_int32, ctypes.c_void_p

SIGNATURES = (
    Signature("llama_hotset_abi_version", ctypes.c_int32),
    Signature("llama_hotset_build_info", ctypes.c_char_p),
    Signature("llama_hotset_create", _I32, (_PTR, _PTR, _I32, ctypes.c_uint64, _PTR)),
    Signature("llama_hotset_free", None, (_PTR,)),
    Signature("llama_hotset_last_error", ctypes.c_char_p),
    Signature("llama_hotset_layer_count", _I32, (_PTR,)),
    Signature("llama_hotset_get_layer", _I32, (_PTR, _I32, _PTR)),
    Signature("llama_hotset_get_stats", _I32, (_PTR, _PTR)),
    Signature("llama_hotset_get_counts", _I32, (_PTR, _I32, _PTR, _I32)),
    Signature("llama_hotset_get_ids", _I32, (_PTR, _I32, _PTR, _I32)),
    Signature("llama_hotset_get_map", _I32, (_PTR, _I32, _PTR, _I32)),
    Signature("llama_hotset_stage_experts", _I32, (_PTR, _PTR, _I32)),
    Signature("llama_hotset_publish_moves", _I32, (_PTR, _PTR, _I32, _I32)),
    Signature("llama_hotset_resize_slots", _I32, (_PTR, _PTR, _I32)),
    Signature("llama_hotset_set_state", _I32, (_PTR, _I32)),
)


class Exports:
    """The functions of SIGNATURES as attributes, typed."""

    def __init__(self, functions: dict[str, Any]) -> None:
        self.__dict__.update(functions)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name} is not in the table of exports")

    @property
    def build_info(self) -> dict[str, str]:
        """What the library was built from: "series" (12 hex digits), "backends" (separated by commas)."""
        text = self.llama_hotset_build_info().decode()
        return dict(word.split("=", 1) for word in text.split() if "=" in word)


def bind(library: ctypes.CDLL, signatures: tuple[Signature, ...] = SIGNATURES, expected: int = ABI_VERSION) -> Exports:
    """Look up and type every export of libllama.

    Raises:
        AbiMismatch: a function is missing, or the library has another ABI number.
    """
    missing = [signature.name for signature in signatures if not hasattr(library, signature.name)]
    if missing:
        raise AbiMismatch(f"The native library lacks {', '.join(missing)}; rebuild it with `hotset build`.")
    exports = Exports({signature.name: _typed(library, signature) for signature in signatures})
    found = exports.llama_hotset_abi_version()
    if found != expected:
        raise AbiMismatch(
            f"The native library has ABI {found}, this code needs {expected}; rebuild it with `hotset build`."
        )
    return exports


def _typed(library: ctypes.CDLL, signature: Signature) -> Any:
    function = getattr(library, signature.name)
    function.restype, function.argtypes = signature.restype, list(signature.argtypes)
    return function
