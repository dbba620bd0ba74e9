"""The patch series as files: headers, diffs, and applying them to a tree."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from daemon.native import pin
from hotset_tools import unidiff
from hotset_tools.unidiff import PatchFailed

FIELDS = ("Description", "Author", "Origin", "Forwarded", "Last-Update", "Reason", "Test")
"""The DEP-3 fields of every patch, and two of our own: why it is needed, and the test that fails without it."""


@dataclass(frozen=True)
class Patch:
    """One file of the series."""

    name: str
    header: str
    diff: str

    @property
    def fields(self) -> dict[str, str]:
        """Header fields; a line that starts with a space continues the field before it."""
        found: dict[str, str] = {}
        key = ""
        for line in self.header.splitlines():
            if line.startswith(" ") and key:
                found[key] += "\n" + line[1:]
            elif ":" in line:
                key, _, value = line.partition(":")
                found[key] = value.strip()
        return found


def read_patch(directory: Path, name: str) -> Patch:
    """Read one patch; line ends are kept as they are."""
    header, diff = pin.split_patch((directory / name).read_bytes().decode("utf-8"))
    return Patch(name, header, diff)


def read_series(directory: Path) -> list[Patch]:
    """All patches in order.

    Raises:
        OSError: one is missing.
    """
    return [read_patch(directory, name) for name in pin.series_names(directory)]


def apply_series(tree: Path, patches: Iterable[Patch]) -> None:
    """Apply to the llama.cpp tree in place.

    Raises:
        PatchFailed: names the patch, the file and the line; the tree may be half changed.
    """
    for patch in patches:
        try:
            for diff in unidiff.parse(patch.diff):
                _apply_file(tree, diff)
        except PatchFailed as error:
            raise PatchFailed(f"{patch.name}: {error}") from None


def _apply_file(tree: Path, diff: unidiff.FileDiff) -> None:
    path = tree / diff.path
    content = path.read_bytes().decode("utf-8", "surrogateescape") if path.is_file() else None
    result = unidiff.apply(diff, content)
    if result is None:
        path.unlink()
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(result.encode("utf-8", "surrogateescape"))
