"""Parked sequences and shared beginnings with every architecture: the same numbers, or it is known that they cannot."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.miniarch.run import Report, decode_all
from tests.miniarch.table import MINIS
from tests.miniarch.writer import write_minis

CLOSE = 1e-3
"""Of the spread of logits: cells in another order are added up in another one."""


@pytest.fixture(scope="module")
def reports(library_path: Path) -> dict[str, Report]:
    with tempfile.TemporaryDirectory() as directory:
        paths = write_minis(Path(directory), MINIS, library_path)
        found = decode_all(paths.values(), library_path, "tests.miniarch.states")
        return {name: found[path] for name, path in paths.items()}


@pytest.mark.parametrize("name", MINIS)
def test_what_was_parked_goes_on_with_the_same_numbers(reports: dict[str, Report], name: str) -> None:
    report = reports[name]
    assert not {"died", "error"} & report.keys(), report
    assert report["parked"] < CLOSE
    if report["memory"]:
        assert report["other"] > 10 * CLOSE, "another beginning would show"


@pytest.mark.parametrize("name", MINIS)
def test_beginnings_are_shared_with_the_same_numbers_or_not_at_all(reports: dict[str, Report], name: str) -> None:
    report = reports[name]
    if report["can_share"]:
        assert report["shared"] < CLOSE


def test_no_recurrent_state_and_no_window_is_shared(reports: dict[str, Report]) -> None:
    """A follower would get the state at the end of its leader, or a beginning that has left the window."""
    sharing = {name for name, report in reports.items() if report["can_share"]}
    assert all(reports[name]["plain"] for name in sharing)
    assert {"qwen3moe", "deepseek2", "glm4moe", "minimax-m2"} <= sharing
    assert not {"gpt-oss", "gemma4", "qwen3next", "jamba", "deepseek4", "llama4"} & sharing
