"""One daemon for all system tests that do not break it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.daemon_process import Daemon, running


@pytest.fixture(autouse=True)
def no_memories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that a test starts knows nothing of those that others started."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture(scope="session")
def daemon(tmp_path_factory: pytest.TempPathFactory, library_path: Path) -> Iterator[Daemon]:
    """hotsetd with the embedded model and its default config."""
    with running(tmp_path_factory.mktemp("daemon")) as process:
        yield process
