"""The sdist is fetched once, and only the pinned one is used."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hotset_tools import source
from hotset_tools.source import SourceUnavailable


class Pip:
    """Pretends to be pip: puts `content` where it is told to download to."""

    def __init__(self, content: bytes, code: int = 0) -> None:
        self.content, self.code = content, code
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        target = Path(command[command.index("--dest") + 1], "llama_cpp_python-0.3.36.tar.gz")
        target.write_bytes(self.content)
        return subprocess.CompletedProcess(command, self.code, "", "ERROR: no network\n")


def test_the_real_one_is_not_fetched_again(sdist: Path, tmp_path: Path) -> None:
    target = source.sdist_path(tmp_path)
    target.parent.mkdir()
    target.symlink_to(sdist)
    pip = Pip(b"")
    assert source.fetch(tmp_path, pip) == target
    assert pip.commands == []


def test_it_is_asked_for_by_name_and_version(sdist: Path, tmp_path: Path) -> None:
    pip = Pip(sdist.read_bytes())
    assert source.sha256(source.fetch(tmp_path, pip)) == source.sha256(sdist)
    (command,) = pip.commands
    assert command[1:4] == ["-m", "pip", "download"]
    assert command[-1] == "llama-cpp-python==0.3.36"
    assert {"--no-deps", "--no-binary"} <= set(command)


def test_another_file_is_refused_and_not_kept(tmp_path: Path) -> None:
    with pytest.raises(SourceUnavailable, match=r"has SHA-256 .*, the pinned one is 832db0"):
        source.fetch(tmp_path, Pip(b"something else"))
    assert list((tmp_path / "source").iterdir()) == []


def test_a_damaged_file_in_the_cache_is_fetched_again(sdist: Path, tmp_path: Path) -> None:
    target = source.sdist_path(tmp_path)
    target.parent.mkdir()
    target.write_bytes(b"half")
    assert source.cached_sdist(tmp_path) is None
    source.fetch(tmp_path, Pip(sdist.read_bytes()))
    assert source.cached_sdist(tmp_path) == target


def test_pip_failing_is_told(tmp_path: Path) -> None:
    with pytest.raises(SourceUnavailable, match="could not fetch the sdist:\n  ERROR: no network"):
        source.fetch(tmp_path, Pip(b"", code=1))
