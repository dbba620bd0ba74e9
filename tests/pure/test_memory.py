"""How much memory may be taken: whatever limits first."""

from __future__ import annotations

from pathlib import Path

import pytest

from daemon.engine import memory

GIB = 1 << 30


def group(directory: Path, names: tuple[str, str], limit: object, used: int, stat: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, value in zip((*names, "memory.stat"), (limit, used, stat), strict=True):
        (directory / name).write_text(f"{value}\n", "ascii")


V2 = ("memory.max", "memory.current")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def test_every_group_up_to_the_root_limits_and_droppable_cache_is_not_used(tmp_path: Path) -> None:
    group(tmp_path / "system.slice", V2, 8 * GIB, 3 * GIB, f"anon {GIB}\ninactive_file {GIB}")
    group(tmp_path / "system.slice" / "hotset.service", V2, "max", 2 * GIB, "inactive_file 0")
    left = list(memory.group_limits([("", "/system.slice/hotset.service")], tmp_path))
    assert left == [6 * GIB]


def test_a_group_of_the_first_version(tmp_path: Path) -> None:
    group(tmp_path / "memory" / "box", V1, 4 * GIB, GIB, f"total_inactive_file {GIB // 2}")
    assert list(memory.group_limits([("cpu,cpuacct", "/box"), ("memory", "/box")], tmp_path)) == [3 * GIB + GIB // 2]


@pytest.mark.parametrize("path", ["/not/seen/from/here", "/", ""])
def test_groups_that_cannot_be_seen_limit_nothing(path: str, tmp_path: Path) -> None:
    assert list(memory.group_limits([("", path), ("memory", path)], tmp_path)) == []


def test_files_that_are_not_numbers_limit_nothing(tmp_path: Path) -> None:
    group(tmp_path / "a", V2, "much", GIB, "")
    group(tmp_path / "b", V2, GIB, GIB, "broken line here")
    assert list(memory.group_limits([("", "/a"), ("", "/b")], tmp_path)) == []


def test_the_limit_of_the_process_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def limit(kind: int) -> tuple[int, int]:
        return (GIB, GIB) if kind == memory.resource.RLIMIT_DATA else (memory.resource.RLIM_INFINITY,) * 2

    assert memory.available() > 0
    monkeypatch.setattr(memory.resource, "getrlimit", limit)
    assert 0 <= memory.available() < GIB
