"""What every group of tests shares: the marker is the folder's name, the environment is clean, the library is found."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from daemon.native import locate

TESTS = Path(__file__).parent
GROUPS = {"pure", "api", "native", "system", "build", "docs"}
CACHE = locate.cache_root()  # read before `clean_environment` hides HOTSET_CACHE from the tests


def pytest_configure() -> None:
    """A shell's background jobs ignore SIGINT, and so would all that tests start and signal."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        group = item.path.relative_to(TESTS).parts[0]
        if group not in GROUPS:
            raise pytest.UsageError(f"{item.path} is in no test group; the groups are {', '.join(sorted(GROUPS))}")
        item.add_marker(group)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's own HOTSET_* settings never decide a test."""
    for name in [name for name in os.environ if name.startswith("HOTSET_")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="session", autouse=True)
def own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What engines learn in tests is not kept among what a developer's own service has learned."""
    patch = pytest.MonkeyPatch()
    patch.delenv("STATE_DIRECTORY", raising=False)
    patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
    yield
    patch.undo()


@pytest.fixture(scope="session")
def cache_root() -> Path:
    """The real cache, with the sdist and the native builds."""
    return CACHE


@pytest.fixture(scope="session")
def library_path(cache_root: Path) -> Iterator[Path]:
    """Directory of the native build; LLAMA_CPP_LIB_PATH names it for this process and its children."""
    try:
        build = locate.require_build({**os.environ, "HOTSET_CACHE": str(cache_root)})
    except locate.BuildMissing as error:
        pytest.fail(f"{error.message} (run `make setup`)", pytrace=False)
    patch = pytest.MonkeyPatch()
    patch.setenv(locate.OVERRIDE, str(build.directory))
    yield build.directory
    patch.undo()
