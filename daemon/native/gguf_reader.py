"""Reads the head of a GGUF file that nobody has vouched for: metadata and tensor table, never tensor data.

Every length is compared with a limit and with what the file holds before it is believed. Reading is by `pread`, not by
a map: a file that shrinks meanwhile is a clear error and not a signal.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from daemon.errors import ModelUnusable
from daemon.native.gguf_cursor import MAX_MESSAGE, MAX_STRING, Cursor, open_model, printable
from daemon.native.gguf_types import (
    ARRAY,
    BOOL,
    SCALARS,
    STRING,
    UINT32,
    VALUE_NAMES,
    Quant,
    quant_of,
)

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

MAX_KEYS = 65_536
MAX_TENSORS = 262_144
MAX_NAME = 63  # llama.cpp keeps a tensor's name in 64 bytes
MAX_KEY = 65_535
MAX_STRINGS = 8 << 20  # of all string arrays together
MAX_ALIGNMENT = 1 << 20
MAX_DIMS = 4
_INT64_MAX = (1 << 63) - 1

Scalar = int | float | bool | str


@dataclass(frozen=True)
class Value:
    """One metadata value as it lies in the file; `kind` is the element's where `n` is not None (an array)."""

    kind: int
    n: int | None
    raw: bytes = field(repr=False)

    @property
    def type_name(self) -> str:
        """For messages: "u32", "array of string"."""
        return VALUE_NAMES[self.kind] if self.n is None else f"array of {VALUE_NAMES[self.kind]}"

    def scalar(self) -> Scalar:
        """The value; a string ends at a zero byte, and has replacement characters where it is not UTF-8."""
        assert self.n is None
        if self.kind == STRING:
            return c_string(self.raw[8:]).decode("utf-8", "replace")
        if self.kind == BOOL:
            return self.raw[0] != 0
        number: int | float = struct.unpack("<" + SCALARS[self.kind], self.raw)[0]
        return number

    def numbers(self) -> tuple[int | float, ...]:
        """The elements of an array of numbers or bools."""
        assert self.n is not None
        assert self.kind != STRING
        return struct.unpack(f"<{self.n}{SCALARS[self.kind]}", self.raw)

    def strings(self) -> list[bytes]:
        """The elements of an array of strings, undecoded."""
        assert self.n is not None
        assert self.kind == STRING
        out, position, unpack, raw = [], 0, struct.Struct("<Q").unpack_from, self.raw
        for _ in range(self.n):
            end = position + 8 + unpack(raw, position)[0]
            out.append(raw[position + 8 : end])
            position = end
        return out


@dataclass(frozen=True)
class TensorEntry:
    """One line of the tensor table; `dims` fastest first, `offset` in bytes from the start of the file."""

    name: str
    dims: tuple[int, ...]
    quant: Quant
    offset: int
    size: int

    @property
    def n_elements(self) -> int:
        """The product of the dimensions."""
        return math.prod(self.dims)


@dataclass(frozen=True)
class Head:
    """What the head of one file says. `size` is the file's, in bytes."""

    path: Path
    size: int
    version: int
    metadata: dict[str, Value]
    tensors: tuple[TensorEntry, ...]

    @property
    def label(self) -> str:
        """The file's name for messages."""
        return printable(self.path.name)

    def fail(self, what: str) -> ModelUnusable:
        """The error that says `what` of this file."""
        return ModelUnusable(printable(f"{self.label}: {what}", MAX_MESSAGE))


def c_string(raw: bytes) -> bytes:
    """The text as llama.cpp sees it: up to the first zero byte."""
    return raw.partition(b"\0")[0]


def read_head(path: Path) -> Head:
    """Read and check the head of one GGUF file.

    Raises:
        ModelUnusable: anything that is not as the format wants it, or beyond the limits above.
    """
    handle = open_model(path)
    try:
        return _Parser(Cursor(handle, printable(path.name)), path).head()
    finally:
        os.close(handle)


class _Parser:
    """Walks through one head, in the order of the file."""

    def __init__(self, cursor: Cursor, path: Path) -> None:
        self._cursor = cursor
        self._path = path
        self._strings_left = MAX_STRINGS

    def head(self) -> Head:
        cursor = self._cursor
        version = self._version()
        n_tensors = self._count("tensors", MAX_TENSORS, 24)
        n_keys = self._count("keys", MAX_KEYS, 13)
        metadata = self._metadata(n_keys)
        alignment = self._alignment(metadata)
        tensors = self._tensors(n_tensors, alignment)
        return Head(self._path, cursor.size, version, metadata, tensors)

    def _version(self) -> int:
        cursor = self._cursor
        magic = cursor.take(4, lambda: "the magic number")
        if magic != MAGIC:
            raise ModelUnusable(f"{cursor.label} is not a GGUF file: it starts with {magic.hex(' ')}")
        version = cursor.unsigned(4, lambda: "the version")
        if version and version % 65_536 == 0:
            raise cursor.fail("the file is big-endian; convert it to little-endian for this machine")
        if version not in VERSIONS:
            raise cursor.fail(f"GGUF version {version} is not supported, only 2 and 3")
        return version

    def _count(self, what: str, limit: int, least: int) -> int:
        """A count of things that take at least `least` bytes each."""
        cursor = self._cursor
        count = cursor.unsigned(8, lambda: f"the number of {what}")
        if count > limit:
            raise cursor.fail(f"the file claims {count} {what}, at most {limit} are allowed")
        if count * least > cursor.size:
            raise cursor.fail(f"the file claims {count} {what}, more than its {cursor.size} bytes can hold")
        return count

    def _metadata(self, count: int) -> dict[str, Value]:
        metadata: dict[str, Value] = {}
        for index in range(count):
            key = self._key(index)
            if key in metadata:
                raise self._cursor.fail(f"the key {printable(key)} is there twice")
            metadata[key] = self._value(key)
        return metadata

    def _key(self, index: int) -> str:
        raw = self._cursor.string(MAX_KEY, lambda: f"the name of key {index}")
        if not raw:
            raise self._cursor.fail(f"key {index} has no name")
        return self._name(raw, f"key {index}")

    def _name(self, raw: bytes, what: str) -> str:
        """A name of a key or tensor, which must be plain text: llama.cpp compares names up to a zero byte."""
        name = raw.decode("utf-8", "replace")
        if not name.isprintable() or name.encode() != raw:
            raise self._cursor.fail(f"the name of {what} is no plain text: {printable(raw)}")
        return name

    def _value(self, key: str) -> Value:
        cursor = self._cursor

        def what() -> str:
            return f"the value of {printable(key)}"

        kind = cursor.unsigned(4, what)
        if kind == ARRAY:
            return self._array(key, what)
        if kind == STRING:
            start = cursor.string(MAX_STRING, what)
            return Value(kind, None, len(start).to_bytes(8, "little") + start)
        if kind not in SCALARS:
            raise cursor.fail(f"{what()} has the unknown type {kind}")
        return Value(kind, None, cursor.take(struct.calcsize("<" + SCALARS[kind]), what))

    def _array(self, key: str, what: Callable[[], str]) -> Value:
        cursor = self._cursor
        kind, count = cursor.unsigned(4, what), cursor.unsigned(8, what)
        if kind == ARRAY:
            raise cursor.fail(f"{what()} is an array of arrays, which llama.cpp does not read")
        if kind == STRING:
            return Value(kind, count, self._string_array(count, what))
        if kind not in SCALARS:
            raise cursor.fail(f"{what()} is an array of the unknown type {kind}")
        return Value(kind, count, cursor.take(count * struct.calcsize("<" + SCALARS[kind]), what))

    def _string_array(self, count: int, what: Callable[[], str]) -> bytes:
        cursor = self._cursor
        if count > self._strings_left:
            raise cursor.fail(f"{what()} claims {count} strings, at most {MAX_STRINGS} are allowed in one file")
        if count * 8 > cursor.size - cursor.position:
            raise cursor.fail(f"{what()} claims {count} strings, more than the rest of the file can hold")
        self._strings_left -= count
        return cursor.skip_strings(count, what)

    def _alignment(self, metadata: dict[str, Value]) -> int:
        value = metadata.get("general.alignment")
        if value is None:
            return DEFAULT_ALIGNMENT
        if value.n is not None or value.kind != UINT32:
            raise self._cursor.fail(f"general.alignment must be u32, not {value.type_name}")
        alignment = int(value.scalar())
        if not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self._cursor.fail(f"general.alignment is {alignment}, not a power of two up to {MAX_ALIGNMENT}")
        return alignment

    def _tensors(self, count: int, alignment: int) -> tuple[TensorEntry, ...]:
        seen: set[str] = set()
        table = [self._tensor(index, seen) for index in range(count)]
        data = -(-self._cursor.position // alignment) * alignment
        return self._placed(table, data, alignment)

    def _tensor(self, index: int, seen: set[str]) -> TensorEntry:
        """One line; its offset is still relative to the data."""
        cursor = self._cursor
        name = self._name(cursor.string(MAX_NAME, lambda: f"the name of tensor {index}"), f"tensor {index}")
        if name in seen:
            raise cursor.fail(f"the tensor {name} is there twice")
        seen.add(name)
        dims = self._dims(name)
        number = cursor.unsigned(4, lambda: f"the type of tensor {name}")
        quant = quant_of(number)
        if quant is None:
            raise cursor.fail(f"tensor {name} has the unknown type {number}")
        if dims[0] % quant.elements:
            raise cursor.fail(f"tensor {name} has rows of {dims[0]}, and blocks of {quant.name} hold {quant.elements}")
        size = math.prod(dims) // quant.elements * quant.bytes
        return TensorEntry(name, dims, quant, cursor.unsigned(8, lambda: f"the offset of tensor {name}"), size)

    def _dims(self, name: str) -> tuple[int, ...]:
        cursor = self._cursor
        count = cursor.unsigned(4, lambda: f"the shape of tensor {name}")
        if not 1 <= count <= MAX_DIMS:
            raise cursor.fail(f"tensor {name} has {count} dimensions, not 1 to {MAX_DIMS}")
        dims = tuple(cursor.unsigned(8, lambda: f"the shape of tensor {name}") for _ in range(count))
        if 0 in dims:
            raise cursor.fail(f"tensor {name} has a dimension of 0: {' x '.join(map(str, dims))}")
        if math.prod(dims) > _INT64_MAX // 8:  # no element takes more than 8 bytes
            raise cursor.fail(f"tensor {name} is too large: {' x '.join(map(str, dims))} elements")
        return dims

    def _placed(self, table: list[TensorEntry], data: int, alignment: int) -> tuple[TensorEntry, ...]:
        """The table with offsets from the start of the file; each tensor must lie right behind the one before."""
        cursor, expected, placed = self._cursor, 0, []
        for entry in table:
            if entry.offset != expected:
                how = "overlaps the one before" if entry.offset < expected else "leaves a gap"
                raise cursor.fail(f"tensor {entry.name} starts at {entry.offset} and not {expected}: it {how}")
            if (data + entry.offset) % DEFAULT_ALIGNMENT:
                raise cursor.fail(f"tensor {entry.name} does not lie at a multiple of {DEFAULT_ALIGNMENT} bytes")
            end = data + entry.offset + entry.size
            if end > cursor.size:
                message = f"tensor {entry.name} needs bytes up to {end}, the file has {cursor.size}"
                raise ModelUnusable(f"{cursor.label} is cut off: {message}")
            placed.append(TensorEntry(entry.name, entry.dims, entry.quant, data + entry.offset, entry.size))
            expected += -(-entry.size // alignment) * alignment
        return tuple(placed)
