"""How much VRAM experts may take, as config.toml says it; pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

MIB = 1 << 20
EVERY_DEVICE = ""
"""The name under which a budget stands that is not for one device alone."""

AUTO = "auto"
SIZE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,39}")
RESERVED = frozenset({AUTO})
"""Words that no size of a hot set may have for a name."""

NUMBER = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)\s*(%|MiB)?", re.ASCII)
"""Digits, and their unit or None."""
_MOST_MIB = 16_777_216
_T = TypeVar("_T")


@dataclass(frozen=True)
class Share:
    """Experts of a device's layers, as a fraction 0-1."""

    fraction: float

    def __str__(self) -> str:
        return f"{self.fraction * 100:g}%"


@dataclass(frozen=True)
class Bytes:
    """Memory on a device, everything that slots take counted."""

    n: int

    def __str__(self) -> str:
        return f"{self.n / MIB:.3f}".rstrip("0").rstrip(".") + " MiB"


@dataclass(frozen=True)
class SizeOf:
    """A size of the hot set, by its name."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Auto:
    """What is free, less the reserve; for all experts of a device's layers at most. Of a reserve: by its rule."""

    def __str__(self) -> str:
        return AUTO


Budget = Share | Bytes | SizeOf | Auto


def parse(text: str) -> Budget:
    """A budget from "auto", "50%", "4096", "4096 MiB" or the name of a size.

    Raises:
        ValueError: it is none of them, or out of range.
    """
    text = text.strip()
    if text == AUTO:
        return Auto()
    number = NUMBER.fullmatch(text)
    if number is None:
        if SIZE_NAME.fullmatch(text):
            return SizeOf(text)
        raise ValueError(f"{text!r} is no number of MiB, no percentage, no name of a size and not auto")
    if number[2] != "%":
        return mebibytes(number[1])
    if float(number[1]) > 100:
        raise ValueError("there are no more than 100%")
    return Share(float(number[1]) / 100)


def mebibytes(number: str) -> Bytes:
    """So many MiB.

    Raises:
        ValueError: there is no such memory.
    """
    if float(number) > _MOST_MIB:
        raise ValueError(f"at most {_MOST_MIB} MiB")
    return Bytes(round(float(number) * MIB))


def parse_all(value: object) -> dict[str, Budget]:
    """Budgets by device from the config's value. Nothing asked is empty.

    Raises:
        ValueError: a budget is none, or a device has two.
    """
    return by_device(value, parse)


def by_device(value: object, parse_one: Callable[[str], _T]) -> dict[str, _T]:
    """What the config's value gives each device; one value for all stands under `EVERY_DEVICE`. "" is empty.

    A string may list devices too ("Vulkan0=50%, Vulkan1=4096"), which is how the environment gives them.

    Raises:
        ValueError: a value is none, or a device has two.
    """
    if isinstance(value, Mapping):
        pairs = [(_device(name), parse_one(_text(one))) for name, one in value.items()]
    elif "=" in (text := _text(value).strip()):
        parts = [part.partition("=") for part in text.split(",")]
        pairs = [(_device(name), parse_one(one)) for name, _, one in parts]
    else:
        pairs = [(EVERY_DEVICE, parse_one(text))] if text else []
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a device is named twice")
    return result


def of_device(budgets: Mapping[str, Budget], device: str) -> Budget | None:
    """The budget that applies to a device; None: it gets no experts."""
    return budgets.get(device, budgets.get(EVERY_DEVICE))


def _text(budget: object) -> str:
    if isinstance(budget, bool) or not isinstance(budget, str | int):
        raise ValueError(f"{budget!r} is none of: a text in quotes, a whole number of MiB, a table of these by device")
    return str(budget)


def _device(name: str) -> str:
    if not name.strip():
        raise ValueError("a value has no device before its =")
    return name.strip()
