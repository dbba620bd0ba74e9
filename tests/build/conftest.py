"""The pinned source, which `make setup` leaves in the cache."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

import pytest

from daemon.native import pin
from hotset_tools import series, source, unidiff


@pytest.fixture(scope="session")
def sdist(cache_root: Path) -> Path:
    """The whole pinned sdist."""
    path = source.cached_sdist(cache_root)
    if path is None:
        pytest.fail("the pinned source is not in the cache; run `make setup`", pytrace=False)
    return path


@pytest.fixture(scope="session")
def whole_tree(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of the vendored llama.cpp, unpatched; not to be changed."""
    tree = tmp_path_factory.mktemp("whole") / "llama.cpp"
    source.unpack(sdist, tree)
    return tree


@pytest.fixture(scope="session")
def patched_tree(whole_tree: Path) -> Path:
    """The same with the series applied; not to be changed."""
    tree = whole_tree.with_name("patched")
    shutil.copytree(whole_tree, tree, copy_function=hard_link)
    for path in touched():
        if (tree / path).exists():  # no write may reach the other tree through the link
            text = (tree / path).read_bytes()
            (tree / path).unlink()
            (tree / path).write_bytes(text)
    series.apply_series(tree, series.read_series(pin.patches_dir()))
    return tree


@pytest.fixture(scope="session")
def small_sdist(whole_tree: Path, sdist: Path) -> Path:
    """The real files that the series and the build look at, packed as the sdist is; unpacks in no time."""
    path = whole_tree.with_name(sdist.name)
    inside = f"{sdist.name.removesuffix('.tar.gz')}/{pin.upstream().vendored}"
    with tarfile.open(path, "w:gz", compresslevel=1) as archive:
        for name in sorted({"CMakeLists.txt", "ggml/CMakeLists.txt", "include/llama.h", *touched()}):
            if (whole_tree / name).exists():
                archive.add(whole_tree / name, f"{inside}/{name}")
    return path


@pytest.fixture
def small_tree(small_sdist: Path, tmp_path: Path) -> Path:
    """A fresh unpatched copy of the files of `small_sdist` that a test may change."""
    source.unpack(small_sdist, tmp_path / "small")
    return tmp_path / "small"


def touched() -> set[str]:
    """Every path that a patch of the series names."""
    patches = series.read_series(pin.patches_dir())
    return {diff.path for patch in patches for diff in unidiff.parse(patch.diff)}


def hard_link(source: str, target: str) -> None:
    """A copy that costs nothing."""
    Path(target).hardlink_to(source)
