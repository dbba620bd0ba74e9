"""A position in a file that nobody has vouched for: reads lengths, numbers and strings without believing them."""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Callable
from pathlib import Path

from daemon.errors import ModelUnusable

MAX_STRING = 64 << 20
MAX_HEAD = 256 << 20
MAX_MESSAGE = 500  # characters; keys of a hostile file may be much longer
_CHUNK = 1 << 20


def printable(text: str | bytes, limit: int = 80) -> str:
    """Text of a file that nobody has vouched for, made safe for one line of a terminal or a log."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    clean = "".join(c if c.isprintable() else "?" for c in text[: limit + 1])
    return clean if len(clean) <= limit else clean[:limit] + "..."


def open_model(path: Path) -> int:
    """A read-only descriptor of a regular file.

    Raises:
        ModelUnusable: there is none, or it is something else.
    """
    label = printable(path.name)
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO must not block us
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "its name cannot be a file's"
        raise ModelUnusable(f"{label} cannot be opened: {reason}") from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise ModelUnusable(f"{label} is not a regular file")
    return handle


class Cursor:
    """The part of the file read so far, and a position in it; grows by chunks, never past the limit."""

    def __init__(self, handle: int, label: str) -> None:
        self.label = label
        self.size = os.fstat(handle).st_size
        self.position = 0
        self._handle = handle
        self._buffer = bytearray()

    def fail(self, what: str) -> ModelUnusable:
        """The error that says `what` of this file."""
        return ModelUnusable(printable(f"{self.label}: {what}", MAX_MESSAGE))

    def take(self, count: int, what: Callable[[], str]) -> bytes:
        """The next `count` bytes; `what` names them if the file ends before."""
        start, end = self.position, self.position + count
        self._load(end, what)
        self.position = end
        return bytes(self._buffer[start:end])

    def unsigned(self, width: int, what: Callable[[], str]) -> int:
        """A little-endian number of `width` bytes."""
        return int.from_bytes(self.take(width, what), "little")

    def string(self, limit: int, what: Callable[[], str]) -> bytes:
        """A string of at most `limit` bytes behind its length."""
        length = self.unsigned(8, what)
        if length > limit:
            raise self.fail(f"{what()} claims {length} bytes, at most {limit} are allowed")
        return self.take(length, what)

    def skip_strings(self, count: int, what: Callable[[], str]) -> bytes:
        """Pass over `count` strings; return their bytes. Fast: vocabularies have hundreds of thousands."""
        start = position = self.position
        unpack, buffer, loaded = struct.Struct("<Q").unpack_from, self._buffer, len(self._buffer)
        for _ in range(count):
            if position + 8 > loaded:
                loaded = self._load(position + 8, what)
            (length,) = unpack(buffer, position)
            position += 8 + length
            if position > loaded:
                if length > MAX_STRING:
                    raise self.fail(f"a string in {what()} claims {length} bytes, at most {MAX_STRING} are allowed")
                loaded = self._load(position, what)
        self.position = position
        return bytes(memoryview(buffer)[start:position])

    def _load(self, end: int, what: Callable[[], str]) -> int:
        """Have the file up to `end` in memory; returns how far it is there."""
        if end <= len(self._buffer):
            return len(self._buffer)
        if end > self.size:
            raise ModelUnusable(f"{self.label} is cut off: {what()} needs bytes up to {end}, the file has {self.size}")
        if end > MAX_HEAD:
            raise self.fail(f"metadata and tensor table are larger than {MAX_HEAD} bytes")
        while len(self._buffer) < end:
            ahead = min(_CHUNK, self.size - len(self._buffer), MAX_HEAD - len(self._buffer))
            wanted = max(end - len(self._buffer), ahead)
            try:
                piece = os.pread(self._handle, wanted, len(self._buffer))
            except OSError as error:
                raise ModelUnusable(f"{self.label} cannot be read: {error.strerror}") from None
            if not piece:
                raise ModelUnusable(f"{self.label} became shorter while it was read")
            self._buffer += piece
        return len(self._buffer)
