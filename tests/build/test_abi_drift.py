"""The signature table of daemon/native/abi.py says the same as the prototypes that the series adds."""

from __future__ import annotations

import ctypes
import re

from daemon.native import abi, pin
from hotset_tools import series, unidiff

_PROTOTYPE = re.compile(r"^LLAMA_API\s+(?P<result>[\w ]+?[\s*]+)(?P<name>llama_hotset_\w+)\((?P<args>[^)]*)\);", re.M)
_SCALARS = {
    "bool": ctypes.c_bool,
    "float": ctypes.c_float,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "size_t": ctypes.c_size_t,
    "uint32_t": ctypes.c_uint32,
    "uint64_t": ctypes.c_uint64,
    "void": None,
}


def header() -> str:
    """include/llama-hotset.h as the whole series leaves it."""
    content: str | None = None
    for patch in series.read_series(pin.patches_dir()):
        for diff in unidiff.parse(patch.diff):
            if diff.path == "include/llama-hotset.h":
                content = unidiff.apply(diff, content)
    assert content is not None
    return content


def ctype(declaration: str) -> object:
    """The ctypes type that a C type without its name must have in the table; any pointer but text is c_void_p."""
    words = declaration.replace("*", " * ").split()
    if "*" in words:
        return ctypes.c_char_p if words == ["const", "char", "*"] else ctypes.c_void_p
    return _SCALARS[words[-1]]


def arguments(text: str) -> tuple[object, ...]:
    if text.strip() in {"", "void"}:
        return ()
    return tuple(ctype(re.sub(r"\w+$", "", argument.strip())) for argument in text.split(","))


def prototypes() -> dict[str, tuple[object, tuple[object, ...]]]:
    found = _PROTOTYPE.finditer(header())
    return {match["name"]: (ctype(match["result"]), arguments(match["args"])) for match in found}


def test_every_prototype_is_in_the_table_with_its_types() -> None:
    table = {signature.name: (signature.restype, signature.argtypes) for signature in abi.SIGNATURES}
    assert table == prototypes()


def test_the_parser_sees_every_export_of_the_header() -> None:
    assert len(prototypes()) == header().count("LLAMA_API ")


def test_the_abi_number_is_that_of_the_header() -> None:
    number = re.search(r"#define LLAMA_HOTSET_ABI_VERSION (\d+)", header())
    assert number is not None
    assert int(number[1]) == abi.ABI_VERSION
