"""llama.cpp's log arrives in pieces of lines and is kept as lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from daemon.native import library
from daemon.native.library import LibraryUnusable, LogTail

INFO, WARNING, ERROR, CONTINUED = 2, 3, 4, 5


def test_pieces_become_lines_of_their_level() -> None:
    tail = LogTail()
    tail.write(INFO, "loading ")
    tail.write(CONTINUED, ".")
    tail.write(CONTINUED, ".\ndone\n")
    tail.write(ERROR, "it broke\n\nagain")
    assert tail.lines() == [("info", "loading .."), ("info", "done"), ("error", "it broke"), ("error", "again")]
    assert tail.recent_errors() == ["it broke", "again"]


def test_a_line_that_was_never_finished_ends_where_the_next_begins() -> None:
    tail = LogTail()
    tail.write(WARNING, "half")
    tail.write(INFO, "whole\n")
    tail.write(CONTINUED, "rest\n")
    assert tail.lines() == [("warning", "half"), ("info", "whole"), ("none", "rest")]


def test_only_the_last_lines_are_kept() -> None:
    tail = LogTail(limit=3)
    for number in range(10):
        tail.write(ERROR, f"{number}\n")
    assert tail.recent_errors() == ["7", "8", "9"]
    tail.clear()
    assert tail.lines() == []


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """`lib` without what it may have loaded before in this process."""
    monkeypatch.setattr(library, "lib", library.lib.__wrapped__)


@pytest.mark.usefixtures("fresh")
def test_an_unset_path_says_what_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLAMA_CPP_LIB_PATH", raising=False)
    with pytest.raises(LibraryUnusable, match=r"LLAMA_CPP_LIB_PATH is not set.*hotset build"):
        library.lib()


@pytest.mark.usefixtures("fresh")
def test_a_path_without_the_library_says_what_to_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(tmp_path))
    with pytest.raises(LibraryUnusable, match=r"no libllama\.so.*hotset build"):
        library.lib()
