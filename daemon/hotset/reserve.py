"""How much of a device's memory stays free, and what is left for experts; pure.

The automatic reserve is a compromise between two things that testers report: the last one or two GiB of VRAM make
decoding slower instead of faster, and a card that drives a desktop needs 1.5 to 3 GiB for windows that open later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from daemon.hotset.budget import AUTO, EVERY_DEVICE, MIB, NUMBER, Auto, Budget, Bytes, by_device, mebibytes

GIB = 1 << 30

Display = Literal["connected", "boot", "none", "unknown"]
"""Whether a card drives a display: it does, it starts the machine's and lists no connectors, it does not, not known."""

_TINY_VRAM = GIB
"""An APU's own memory, as most firmware sets it aside; no card of today has so little."""
_REMOTE = 256 * MIB
_HEADLESS = GIB
_DESKTOP = (3 * GIB // 2, 3 * GIB)
_DESKTOP_PART, _DESKTOP_MOST, _OTHER_MOST = 8, 4, 8
"""A desktop is left one part in 8 within its bounds, one in 4 at most; what has none, one in 8 at most."""

SHARED = (
    "its memory is the CPU's: a second copy of an expert there gains nothing "
    "(engine.cpu_moe_layers = 0 gives it whole layers without one)"
)
UNKNOWN = "its driver does not say how much memory it has; give MiB or a percentage"

Reserved = Auto | Bytes


@dataclass(frozen=True)
class Pool:
    """One kind of memory as the kernel counts it, in bytes, the use by all programs among them."""

    used: int
    total: int

    @property
    def free(self) -> int:
        """Not in use."""
        return self.total - self.used


@dataclass(frozen=True)
class Memory:
    """What is known of a device's memory, in bytes.

    `free` and `total` are the driver's; a total of 0 says that it does not know. `vram` and `gtt` are amdgpu's own
    figures, None elsewhere. `remote` devices belong to an RPC server, `integrated` ones to a processor.
    """

    free: int
    total: int
    integrated: bool = False
    remote: bool = False
    display: Display = "unknown"
    vram: Pool | None = None
    gtt: Pool | None = None

    @property
    def shared(self) -> bool:
        """Whether it is the CPU's memory: of an APU or another integrated device.

        Some drivers call an APU a card. It shows where they count more than the VRAM that amdgpu counts, which is
        memory of the system, and where VRAM is tiny and less than what amdgpu may take of the system's (GTT).
        """
        if self.integrated or self.vram is None or self.remote:
            return self.integrated and not self.remote
        more = self.total > self.vram.total + self.vram.total // 8
        return more or (self.vram.total <= _TINY_VRAM and self.gtt is not None and self.gtt.total > self.vram.total)


@dataclass(frozen=True)
class Ram:
    """The machine's memory in bytes: all of it, and what programs may still take."""

    total: int
    available: int


@dataclass(frozen=True)
class Reserve:
    """Bytes of a device that stay free; `asked` as the config has it, `why` in a few words."""

    n_bytes: int
    asked: str
    why: str


@dataclass(frozen=True)
class Spare:
    """Bytes of a device that experts may take; None: not known, so nothing but a failed allocation limits them.

    `why` explains the limit in words. `refused`: there is none however much is free. `shared`: the memory is the CPU's.
    """

    n_bytes: int | None
    reserve: Reserve
    why: str
    refused: bool = False
    shared: bool = False


def parse(text: str) -> Reserved:
    """A reserve from "auto", "1024" or "1024 MiB".

    Raises:
        ValueError: it is none of them, or out of range.
    """
    text = text.strip()
    number = NUMBER.fullmatch(text)
    if text == AUTO:
        return Auto()
    if number is None or number[2] == "%":
        raise ValueError(f"{text!r} is neither {AUTO} nor a number of MiB")
    return mebibytes(number[1])


def parse_all(value: object) -> dict[str, Reserved]:
    """Reserves by device from the config's value, in the forms of budgets.

    Raises:
        ValueError: one is none, a device has two, or there is no value.
    """
    found = by_device(value, parse)
    if not found and not isinstance(value, Mapping):
        parse(str(value))
    return found


def of_device(reserves: Mapping[str, Reserved], device: str) -> Reserved:
    """The reserve that applies to a device; automatic where it has none."""
    return reserves.get(device, reserves.get(EVERY_DEVICE, Auto()))


def reserve(asked: Reserved, memory: Memory) -> Reserve:
    """What stays free of a device."""
    if isinstance(asked, Bytes):
        return Reserve(asked.n, str(asked), "residency.reserve")
    n_bytes, most, why = _rule(memory)
    return Reserve(min(n_bytes, memory.total // most), AUTO, why)


def _rule(memory: Memory) -> tuple[int, int, str]:
    """Bytes, one part in how many of the device is the most, and why."""
    least, enough = _DESKTOP
    desktop = min(max(memory.total // _DESKTOP_PART, least), enough)
    if memory.remote:
        return _REMOTE, _OTHER_MOST, "for the RPC server's other work"
    if memory.shared:
        return desktop, _DESKTOP_MOST, "for the system and other programs, which use the same memory"
    if memory.display == "connected":
        return desktop, _DESKTOP_MOST, "for the display on it"
    if memory.display == "boot":
        return desktop, _DESKTOP_MOST, "for a display: the card starts the machine's and lists no connectors"
    return _HEADLESS, _OTHER_MOST, "for its driver and other programs"


def free(memory: Memory, ram: Ram) -> int:
    """Bytes that can be taken of a device now: the smallest of all counts.

    Where the driver subtracts more than there is, its figure exceeds the total: nothing is free then. amdgpu counts
    what other programs use. Memory that is the machine's ends where RAM does; a CPU that plays a device, behind an RPC
    server or in software, is known by its size.
    """
    counts = [memory.free if memory.free <= memory.total else 0]
    if memory.shared:
        own = memory.vram.free if memory.vram else 0
        counts.append(own + ram.available)
        if memory.vram and memory.gtt:
            counts.append(own + memory.gtt.free)
    elif memory.total == ram.total:
        counts.append(ram.available)
    elif memory.vram and not memory.remote:
        counts.append(memory.vram.free)
    return max(0, min(counts))


def spare(device: str, budget: Budget | None, asked: Reserved, memory: Memory, ram: Ram, held: int = 0) -> Spare:
    """What experts may take of a device now; they have `held` bytes of it already, which count as free."""
    kept, shared = reserve(asked, memory), memory.shared
    if isinstance(budget, Auto) and (shared or not memory.total):
        return Spare(0, kept, SHARED if shared else UNKNOWN, refused=True, shared=shared)
    if not memory.total:
        return Spare(None, kept, "", shared=shared)
    found = free(memory, ram) + held
    left = max(0, found - kept.n_bytes)
    state = "are free or hold experts" if held else "are free"
    sizes = f"{found / MIB:.0f} MiB {state}, {kept.n_bytes / MIB:.0f} MiB stay {'free' if held else 'so'}"
    return Spare(left, kept, f"{device} has {left / MIB:.0f} MiB to spare: {sizes} ({kept.why})", shared=shared)
