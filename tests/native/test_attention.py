"""The search for the next cell that a mask shows, as the CPU's attention uses it."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st


@pytest.fixture(scope="module")
def next_unmasked(library_path: Path) -> Any:
    function = ctypes.CDLL(str(library_path / "libggml-cpu.so")).ggml_hotset_next_unmasked
    function.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    function.restype = ctypes.c_int64
    return function


@given(shown=st.sets(st.integers(0, 300)), size=st.integers(0, 300), start=st.integers(0, 300))
def test_the_next_unmasked_cell_is_found(next_unmasked: Any, shown: set[int], size: int, start: int) -> None:
    """Wherever it begins and ends, aligned or not; values of ALiBi and -0 are shown, NaN too."""
    start = min(start, size)
    mask = np.full(size + 8, -np.inf, np.float16)
    values = np.array([0.0, -0.0, -65504.0, np.nan, -1.5], np.float16)
    for i in shown:
        if i < len(mask):
            mask[i] = values[i % len(values)]
    expected = min((i for i in shown if start <= i < size), default=size)
    assert next_unmasked(mask.ctypes.data, start, size) == expected
