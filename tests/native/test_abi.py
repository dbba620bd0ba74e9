"""The built library is the one that this code was written for."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from daemon.native import abi, locate, pin


@pytest.fixture
def libllama(library_path: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(library_path / "libllama.so"))


def test_library_has_the_expected_abi(libllama: ctypes.CDLL) -> None:
    assert abi.bind(libllama).llama_hotset_abi_version() == abi.ABI_VERSION


def test_library_names_the_series_and_the_backends_it_was_built_from(libllama: ctypes.CDLL, library_path: Path) -> None:
    info = abi.bind(libllama).build_info
    described = locate.read_build(library_path)
    assert info["series"] == pin.series()[:12]
    assert described is not None
    assert info["backends"].split(",") == described.backends


def test_another_abi_number_is_refused(libllama: ctypes.CDLL) -> None:
    other = abi.ABI_VERSION + 1
    said = rf"has ABI {abi.ABI_VERSION}, this code needs {other}; rebuild it with `hotset build`"
    with pytest.raises(abi.AbiMismatch, match=said):
        abi.bind(libllama, expected=other)


def test_a_missing_export_is_named(libllama: ctypes.CDLL) -> None:
    extra = abi.Signature("llama_hotset_no_such_function", ctypes.c_int32)
    with pytest.raises(abi.AbiMismatch, match="lacks llama_hotset_no_such_function"):
        abi.bind(libllama, (*abi.SIGNATURES, extra))


def test_an_export_outside_the_table_cannot_be_called(libllama: ctypes.CDLL) -> None:
    with pytest.raises(AttributeError, match="not in the table"):
        _ = abi.bind(libllama).llama_print_system_info
