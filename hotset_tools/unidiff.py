"""Unified diffs, read and applied strictly: every line must be where the diff says it is; pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from daemon.errors import HotsetError

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_NO_NEWLINE = "\\ No newline at end of file"


class PatchFailed(HotsetError):
    """A diff that cannot be read, or does not match its file exactly."""

    code = "patch_failed"


@dataclass(frozen=True)
class Hunk:
    """Lines with their sign (" ", "-", "+") and their line end; `start` is 1-based in the old file."""

    start: int
    lines: tuple[str, ...]

    @property
    def old(self) -> list[str]:
        return [line[1:] for line in self.lines if line[0] in " -"]

    @property
    def new(self) -> list[str]:
        return [line[1:] for line in self.lines if line[0] in " +"]


@dataclass
class FileDiff:
    """One file's part; `old` or `new` is None when the file is created or deleted."""

    old: str | None
    new: str | None
    hunks: list[Hunk] = field(default_factory=list)

    @property
    def path(self) -> str:
        path = self.new or self.old
        assert path is not None
        return path


def lines_of(text: str) -> list[str]:
    """Lines with their ends; only a line feed ends one (str.splitlines knows a dozen others)."""
    return [line for line in re.split(r"(?<=\n)", text) if line]


def parse(text: str) -> list[FileDiff]:
    """The files of a unified diff with a/ and b/ prefixes.

    Raises:
        PatchFailed: something in it is no unified diff.
    """
    lines = lines_of(text)
    files: list[FileDiff] = []
    at = 0
    while at < len(lines):
        if lines[at].startswith("--- "):
            files.append(_file(lines, at))
            at += 2
        elif files and lines[at].startswith("@@ "):
            hunk, at = _hunk(lines, at, files[-1].path)
            files[-1].hunks.append(hunk)
        else:
            raise PatchFailed(f"line {at + 1} of the diff is neither a file nor a hunk: {lines[at].rstrip()[:60]!r}")
    _complain_about_empty(files)
    return files


def apply(diff: FileDiff, content: str | None) -> str | None:
    """The file's content after `diff`; None before creation and after deletion.

    Raises:
        PatchFailed: a hunk's old lines are not exactly at their place.
    """
    if (diff.old is None) != (content is None):
        raise PatchFailed(f"{diff.path}: " + ("exists already" if diff.old is None else "does not exist"))
    source = lines_of(content or "")
    result: list[str] = []
    done = 0
    for hunk in diff.hunks:
        start = max(hunk.start - 1, 0) if hunk.old else hunk.start
        if start < done or source[start : start + len(hunk.old)] != hunk.old:
            raise PatchFailed(f"{diff.path}: the hunk for line {hunk.start} does not match")
        result += source[done:start] + hunk.new
        done = start + len(hunk.old)
    result += source[done:]
    return _finish(diff, result)


def _finish(diff: FileDiff, result: list[str]) -> str | None:
    if diff.new is not None:
        return "".join(result)
    if result:
        raise PatchFailed(f"{diff.path}: lines are left in a file that the diff deletes")
    return None


def _file(lines: list[str], at: int) -> FileDiff:
    if at + 1 >= len(lines) or not lines[at + 1].startswith("+++ "):
        raise PatchFailed(f"line {at + 1} of the diff has no +++ line after it")
    old, new = _name(lines[at], "a/"), _name(lines[at + 1], "b/")
    if (old is None and new is None) or (old and new and old != new):
        raise PatchFailed(f"line {at + 1} of the diff names two different files, or none")
    return FileDiff(old, new)


def _name(line: str, prefix: str) -> str | None:
    name = line[4:].rstrip("\n").split("\t")[0]
    if name == "/dev/null":
        return None
    parts = name.removeprefix(prefix).split("/")
    if not name.startswith(prefix) or ".." in parts or "" in parts:
        raise PatchFailed(f"{name!r} is not a path below {prefix}")
    return name.removeprefix(prefix)


def _hunk(lines: list[str], at: int, path: str) -> tuple[Hunk, int]:
    """The hunk whose header is line `at`, and the line after it."""
    match = _HUNK.match(lines[at])
    if match is None:
        raise PatchFailed(f"{path}: line {at + 1} of the diff is no hunk header")
    old, new = int(match[2] or 1), int(match[4] or 1)
    body: list[str] = []
    at += 1
    while old > 0 or new > 0:
        line = lines[at] if at < len(lines) else ""
        if line[:1] not in {" ", "-", "+"}:
            raise PatchFailed(f"{path}: the diff ends inside a hunk")
        old, new = old - (line[0] in " -"), new - (line[0] in " +")
        body.append(line)
        at += 1
        if at < len(lines) and lines[at].startswith(_NO_NEWLINE):
            body[-1] = line.removesuffix("\n")
            at += 1
    if old or new:
        raise PatchFailed(f"{path}: a hunk has more lines than its header says")
    return Hunk(int(match[1]), tuple(body)), at


def _complain_about_empty(files: list[FileDiff]) -> None:
    for file in files:
        if not file.hunks:
            raise PatchFailed(f"{file.path}: no hunk follows")
