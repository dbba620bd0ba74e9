"""The pinned source, which `make setup` leaves in the cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hotset_tools import source


@pytest.fixture(scope="session")
def sdist(cache_root: Path) -> Path:
    path = source.cached_sdist(cache_root)
    if path is None:
        pytest.fail("the pinned source is not in the cache; run `make setup`", pytrace=False)
    return path


@pytest.fixture
def pristine(sdist: Path, tmp_path: Path) -> Callable[[], Path]:
    """Makes a fresh copy of the vendored llama.cpp that a test may change."""

    def unpack() -> Path:
        tree = tmp_path / "pristine"
        source.unpack(sdist, tree)
        return tree

    return unpack
