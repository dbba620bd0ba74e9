"""How much memory this process may still take: the machine's, its control groups', its own limits."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import psutil

_LIMITS = ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData"))
_CGROUPS = Path("/sys/fs/cgroup")


def available() -> int:
    """Bytes that can be taken before something refuses or the kernel kills: the smallest of all limits."""
    return max(0, min(psutil.virtual_memory().available, *_own_limits(), *group_limits(_own_groups(), _CGROUPS)))


def _own_limits() -> Iterator[int]:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text("utf-8").splitlines())
    for limit, used in _LIMITS:
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY:
            yield soft - int(status[used].split()[0]) * 1024


def _own_groups() -> list[tuple[str, str]]:
    """(controllers, path) of every group; version 2 has no controllers in its line."""
    lines = Path("/proc/self/cgroup").read_text("utf-8").splitlines()
    return [(parts[1], parts[2]) for line in lines if len(parts := line.split(":", 2)) == 3]


def group_limits(groups: list[tuple[str, str]], root: Path) -> Iterator[int]:
    """What each control group with a memory limit has left, page cache that can be dropped not counted as used."""
    for controllers, path in groups:
        if controllers == "":
            yield from _limits_upwards(root, path, ("memory.max", "memory.current", "inactive_file"))
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _limits_upwards(root / "memory", path, names)


def _limits_upwards(root: Path, path: str, names: tuple[str, str, str]) -> Iterator[int]:
    """From the group up to the root: each of them limits. In a container the path may be that of the host."""
    here = root / path.strip("/")
    for group in (here, *here.parents):
        if (left := _left(group, *names)) is not None:
            yield left
        if group == root:
            return


def _left(group: Path, limit: str, usage: str, cache: str) -> int | None:
    try:
        most = (group / limit).read_text("ascii").strip()
        used = int((group / usage).read_text("ascii"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text("ascii").splitlines())
    except (OSError, ValueError):
        return None
    return None if most == "max" else int(most) - used + int(stat.get(cache, 0))
