"""What the kernel says of a graphics card, read from sysfs. Nothing here fails: what cannot be read is not known.

Names that are found there are compared with patterns before they become part of a path, no link below the card's own
directory is followed, and only regular files are read, a few bytes of each.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Literal

from daemon.messages import Card

SYSFS = Path("/sys/bus/pci/devices")

_ADDRESS = re.compile(r"(?:0000)?([0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])(?:-v[0-9]{1,4})?")
_CARD = re.compile(r"card[0-9]{1,3}")
_CONNECTOR = re.compile(r"card[0-9]{1,3}-[A-Za-z0-9-]{1,40}")
_NUMBER = re.compile(r"[0-9]{1,15}")
_MOST_ENTRIES = 256
_MOST_BYTES = 64


def address(device_id: str) -> str:
    """The address on the PCI bus that a backend gave as a device's id; empty if it is none.

    Some write more digits for the domain, and CUDA's virtual devices have a number behind it.
    """
    found = _ADDRESS.fullmatch(device_id.strip().lower())
    return found[1] if found else ""


def read(pci: str, root: Path = SYSFS) -> Card | None:
    """The card at an address, below `root`; None where there is none, or its address is none."""
    if not pci or address(pci) != pci:
        return None
    directory = root / pci
    try:
        if not directory.is_dir():
            return None
    except OSError:
        return None
    vram_used, vram_total = _memory(directory, "vram")
    gtt_used, gtt_total = _memory(directory, "gtt")
    return Card(
        display=_display(directory),
        vram_used=vram_used,
        vram_total=vram_total,
        gtt_used=gtt_used,
        gtt_total=gtt_total,
    )


def _memory(directory: Path, kind: str) -> tuple[int, int] | tuple[None, None]:
    """Bytes used and in all, which only amdgpu tells; two figures that cannot both be true are none."""
    used, total = (_text(directory / f"mem_info_{kind}_{name}") for name in ("used", "total"))
    if not (_NUMBER.fullmatch(used) and _NUMBER.fullmatch(total)):
        return None, None
    return (int(used), int(total)) if 0 <= int(used) <= int(total) > 0 else (None, None)


def _display(directory: Path) -> Literal["connected", "boot", "none"]:
    """A driver without connectors (NVIDIA's, by default in older releases) says nothing of displays."""
    found = {
        _text(connector / "status")
        for card in _directories(directory / "drm", _CARD)
        for connector in _directories(card, _CONNECTOR)
    }
    if "connected" in found:
        return "connected"
    return "boot" if not found - {""} and _text(directory / "boot_vga") == "1" else "none"


def _directories(parent: Path, name: re.Pattern[str]) -> Iterator[Path]:
    try:
        with os.scandir(parent) as entries:
            for entry in islice(entries, _MOST_ENTRIES):
                if name.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                    yield parent / entry.name
    except OSError:
        return


def _text(path: Path) -> str:
    """The beginning of a file's text; empty if it has none."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        content = os.read(file, _MOST_BYTES) if stat.S_ISREG(os.fstat(file).st_mode) else b""
    except OSError:
        content = b""
    finally:
        os.close(file)
    return content.decode("ascii", errors="replace").strip()
