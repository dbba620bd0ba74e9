"""How much VRAM experts may take, as config.toml says it; pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

MIB = 1 << 20
EVERY_DEVICE = ""
"""The name under which a budget stands that is not for one device alone."""

SIZE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,39}")
RESERVED = frozenset({"auto"})
"""Words that no size of a hot set may have for a name."""

_NUMBER = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)\s*(%|MiB)?", re.ASCII)
_MOST_MIB = 16_777_216


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


Budget = Share | Bytes | SizeOf


def parse(text: str) -> Budget:
    """A budget from "50%", "4096", "4096 MiB" or the name of a size.

    Raises:
        ValueError: it is none of them, or out of range.
    """
    text = text.strip()
    number = _NUMBER.fullmatch(text)
    if number is None:
        if SIZE_NAME.fullmatch(text) and text not in RESERVED:
            return SizeOf(text)
        raise ValueError(f"{text!r} is no number of MiB, no percentage and no name of a size")
    value = float(number[1])
    if number[2] == "%":
        if value > 100:
            raise ValueError("there are no more than 100%")
        return Share(value / 100)
    if value > _MOST_MIB:
        raise ValueError(f"at most {_MOST_MIB} MiB")
    return Bytes(round(value * MIB))


def parse_all(value: object) -> dict[str, Budget]:
    """Budgets by device from the config's value; one for all stands under `EVERY_DEVICE`. Nothing asked is empty.

    A string may list devices too ("Vulkan0=50%, Vulkan1=4096"), which is how the environment gives them.

    Raises:
        ValueError: a budget is none, or a device has two.
    """
    if isinstance(value, Mapping):
        return {_device(name): parse(_text(budget)) for name, budget in value.items()}
    text = _text(value).strip()
    if "=" not in text:
        return {EVERY_DEVICE: parse(text)} if text else {}
    pairs = [part.partition("=") for part in text.split(",")]
    result = {_device(name): parse(budget) for name, _, budget in pairs}
    if len(result) != len(pairs):
        raise ValueError("a device is named twice")
    return result


def of_device(budgets: Mapping[str, Budget], device: str) -> Budget | None:
    """The budget that applies to a device; None: it gets no experts."""
    return budgets.get(device, budgets.get(EVERY_DEVICE))


def _text(budget: object) -> str:
    if isinstance(budget, bool) or not isinstance(budget, str | int):
        raise ValueError(f"{budget!r} is none of: the name of a size, \"50%\", a whole number of MiB, a table of these")
    return str(budget)


def _device(name: str) -> str:
    if not name.strip():
        raise ValueError("a budget has no device before its =")
    return name.strip()
