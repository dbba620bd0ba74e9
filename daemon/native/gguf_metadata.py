"""Metadata with types and bounds: what a key must be, said in one message when it is not."""

from __future__ import annotations

import math

from daemon.errors import ModelUnusable
from daemon.native.gguf_reader import Head, Value
from daemon.native.gguf_types import BOOL, FLOAT32, INT32, STRING, UINT16, UINT32, VALUE_NAMES

MAX_UINT32 = (1 << 32) - 1


class Metadata:
    """The keys of one file. Keys that start with "." belong to the architecture (".block_count")."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._values = head.metadata
        self.architecture = self.text("general.architecture", required=True)

    def fail(self, what: str) -> ModelUnusable:
        """The error that says `what` of this file."""
        return self._head.fail(what)

    def name(self, key: str) -> str:
        """The key as it stands in the file."""
        return self.architecture + key if key.startswith(".") else key

    def value(self, key: str) -> Value | None:
        """The raw value."""
        return self._values.get(self.name(key))

    def text(self, key: str, default: str = "", *, required: bool = False) -> str:
        """A string."""
        value = self._scalar(key, STRING, required)
        return default if value is None else str(value.scalar())

    def flag(self, key: str, default: bool = False) -> bool:
        """A bool."""
        value = self._scalar(key, BOOL, False)
        return default if value is None else bool(value.scalar())

    def number(
        self, key: str, default: int = 0, *, least: int = 0, most: int = MAX_UINT32, required: bool = False
    ) -> int:
        """A u32 from `least` to `most`; `default` where the key is missing."""
        value = self._scalar(key, UINT32, required)
        return default if value is None else self.bounded(key, int(value.scalar()), least, most)

    def small(self, key: str) -> int | None:
        """A u16, or None where the key is missing."""
        value = self._scalar(key, UINT16, False)
        return None if value is None else int(value.scalar())

    def decimal(self, key: str, default: float) -> float:
        """An f32 that is finite and not negative."""
        value = self._scalar(key, FLOAT32, False)
        number = default if value is None else float(value.scalar())
        if not math.isfinite(number) or number < 0:
            raise self.fail(f"{self.name(key)} is {number}, not a number from 0")
        return number

    def per_layer(self, key: str, n_layer: int, default: int, *, exact: bool = True) -> tuple[int, ...]:
        """A number for each layer: one u32 for all, or an array with one for each.

        Arrays that llama.cpp reads as they come (`exact` False) may be of another length; `default` fills them up.
        """
        value = self.value(key)
        if value is None:
            return (default,) * n_layer
        if value.n is None:
            return (self.number(key),) * n_layer
        if value.kind not in (UINT32, INT32, BOOL):
            raise self.fail(f"{self.name(key)} must be u32, or an array of u32 or i32, not {value.type_name}")
        if exact and value.n != n_layer:
            raise self.fail(f"{self.name(key)} has {value.n} values for {n_layer} layers")
        numbers = tuple(self.bounded(key, int(number), 0, MAX_UINT32) for number in value.numbers())
        return (*numbers, *(default,) * n_layer)[:n_layer]

    def array(self, key: str, kind: int) -> Value | None:
        """An array of `kind`, or None where the key is missing."""
        value = self.value(key)
        if value is not None and (value.n is None or value.kind != kind):
            raise self.fail(f"{self.name(key)} must be array of {VALUE_NAMES[kind]}, not {value.type_name}")
        return value

    def bounded(self, key: str, number: int, least: int, most: int) -> int:
        """`number`, which must lie in the bounds."""
        if not least <= number <= most:
            raise self.fail(f"{self.name(key)} is {number}, it must be from {least} to {most}")
        return number

    def _scalar(self, key: str, kind: int, required: bool) -> Value | None:
        """A scalar of exactly the type that llama.cpp asks for."""
        value = self.value(key)
        if value is None:
            if required:
                raise self.fail(f"{self.name(key)} is missing")
            return None
        if value.n is not None or value.kind != kind:
            raise self.fail(f"{self.name(key)} must be {VALUE_NAMES[kind]}, not {value.type_name}")
        return value
