"""The shared library: where it comes from, when it is loaded, and what it says.

Importing this module loads nothing; the first `lib()` does. The service process never calls it.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import re
from collections import deque
from pathlib import Path
from types import ModuleType
from typing import Any

from daemon.errors import HotsetError

LOG_LINES = 200
LEVELS = {0: "none", 1: "debug", 2: "info", 3: "warning", 4: "error"}
_CONTINUED = 5


class LibraryUnusable(HotsetError):
    """The native library is not built, not found, or does not fit the Python bindings (shown to the operator)."""

    code = "library_unusable"


class LogTail:
    """The last `LOG_LINES` lines of llama.cpp's log, as (level, text), oldest first.

    `write` is called from any thread of the library with pieces of lines.
    """

    def __init__(self, limit: int = LOG_LINES) -> None:
        self._lines: deque[tuple[str, str]] = deque(maxlen=limit)
        self._open: tuple[str, str] | None = None

    def write(self, level: int, text: str) -> None:
        """Add a piece: a new line of `level`, or with `_CONTINUED` more of the line before."""
        name, start = LEVELS.get(level, "none"), ""
        if self._open is not None and level == _CONTINUED:
            name, start = self._open
        elif self._open is not None:
            self._lines.append(self._open)
        self._open = None
        *whole, rest = (start + text).split("\n")
        self._lines.extend((name, line) for line in whole if line.strip())
        if rest:
            self._open = (name, rest)

    def lines(self) -> list[tuple[str, str]]:
        """Every line that is kept, the unfinished one last."""
        return [*self._lines, *([self._open] if self._open else [])]

    def recent_errors(self) -> list[str]:
        """The texts of the error lines that are kept, oldest first."""
        return [text for level, text in self.lines() if level == "error"]

    def clear(self) -> None:
        """Forget everything, so that the next error belongs to the next call."""
        self._lines.clear()
        self._open = None


TAIL = LogTail()
_callbacks: list[Any] = []


@functools.cache
def lib() -> ModuleType:
    """The bindings `llama_cpp.llama_cpp` over the library in `LLAMA_CPP_LIB_PATH`, its log going to `TAIL`.

    No backend is initialised: reading a vocabulary needs none, and a GPU driver would cost memory and time.

    Raises:
        LibraryUnusable: the variable is unset, or the library cannot be loaded.
    """
    directory = os.environ.get("LLAMA_CPP_LIB_PATH", "")
    if not directory:
        raise LibraryUnusable("LLAMA_CPP_LIB_PATH is not set; `hotset build` makes the native library")
    if not Path(directory, "libllama.so").is_file():
        raise LibraryUnusable("LLAMA_CPP_LIB_PATH holds no libllama.so; `hotset build` makes it")
    try:
        module = importlib.import_module("llama_cpp.llama_cpp")
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise LibraryUnusable(f"the native library cannot be loaded: {error}") from error
    _capture(module)
    return module


def handle() -> ctypes.CDLL:
    """libllama itself, for exports that the bindings do not know."""
    library: ctypes.CDLL = lib()._lib
    return library


@functools.cache
def backend() -> ModuleType:
    """`lib()` with llama.cpp's backends initialised, which may start GPU drivers."""
    module = lib()
    module.llama_backend_init()
    return module


def capture_log() -> LogTail:
    """The tail that llama.cpp's log goes to instead of stderr, the library being loaded if it is not yet."""
    lib()
    return TAIL


def recent_errors() -> list[str]:
    """The error lines among the last `LOG_LINES` lines, oldest first."""
    return TAIL.recent_errors()


def load_reason() -> str:
    """Why a load failed: the log's first error since `TAIL.clear()`, without its function's name and directories."""
    lines = recent_errors()
    if not lines:
        return "llama.cpp gave no reason"
    reason = re.sub(r"^\w+: ", "", lines[0].strip()).removeprefix("error loading model: ")
    return re.sub(r"/(?:[^\s'/]+/)+", "", reason)


def _capture(module: ModuleType) -> None:
    @module.llama_log_callback  # type: ignore[untyped-decorator]
    def callback(level: int, text: bytes | None, _data: ctypes.c_void_p) -> None:
        TAIL.write(int(level), (text or b"").decode("utf-8", "replace"))

    # The library keeps the pointer, so the object behind it must live as long as the process.
    _callbacks.append(callback)
    module.llama_log_set(callback, ctypes.c_void_p(0))
