"""One daemon for all system tests that do not break it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.daemon_process import Daemon, running


@pytest.fixture(scope="session")
def daemon(tmp_path_factory: pytest.TempPathFactory, library_path: Path) -> Iterator[Daemon]:
    """hotsetd with the embedded model and its default config."""
    with running(tmp_path_factory.mktemp("daemon")) as process:
        yield process
