"""The cache of native builds: keys, the lock against two builds at once, and installing whole directories only."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from daemon.native.locate import Build, BuildInfo, builds, cache_root, find_build, find_peer, read_build, select

__all__ = ["Build", "BuildInfo", "builds", "cache_root", "find_build", "find_peer", "read_build", "select"]


KEPT = "kept"
"""A file of this name in a work directory says that its owner wants it."""


def make_key(kind: str, version: str, series: str, backends: Sequence[str], parts: Mapping[str, object]) -> str:
    """Directory name of a build: readable where it can be, a hash of `parts` (compiler, flags, options) at the end."""
    text = json.dumps(parts, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return "-".join([kind, version, series[:12] or "unpatched", "+".join(backends), digest])


def find_key(root: Path, key: str) -> Build | None:
    """The complete build of `key`."""
    directory = root / "builds" / key
    info = read_build(directory)
    return Build(directory, info) if info else None


@contextlib.contextmanager
def build_lock(root: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the cache's build lock; `waiting` is called once if another process has it. Freed when the process ends."""
    root.mkdir(parents=True, exist_ok=True)
    with (root / "build.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def staging(root: Path) -> Iterator[Path]:
    """A directory beside the builds that is gone afterwards unless `publish` moved it."""
    (root / "builds").mkdir(parents=True, exist_ok=True)
    path = Path(tempfile.mkdtemp(dir=root / "builds", prefix=".staging-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def copy_products(source: Path, target: Path, programs: Sequence[str] = ()) -> dict[str, int]:
    """Copy the shared libraries (as one file for each name that is loaded) and `programs`; name -> size."""
    wanted = [path for path in sorted(source.iterdir()) if ".so" in path.suffixes or path.name in programs]
    for path in wanted:
        destination = target / path.name
        if path.is_symlink():
            destination.unlink(missing_ok=True)
            destination.symlink_to(os.readlink(path))
        else:
            shutil.copy2(path, destination)
    return {path.name: (target / path.name).stat().st_size for path in wanted}


def publish(root: Path, staged: Path, info: BuildInfo) -> Build:
    """Write build.json into `staged`, flush everything to disk, and rename it to its key in one step."""
    path = staged / "build.json"
    path.write_text(info.model_dump_json(indent=2) + "\n", "utf-8")
    staged.chmod(0o755)
    for file in staged.iterdir():
        _flush(file)
    target = root / "builds" / info.key
    if target.exists():
        target.rename(staged.with_name(staged.name + "-old"))
    staged.rename(target)
    _flush(target.parent)
    shutil.rmtree(staged.with_name(staged.name + "-old"), ignore_errors=True)
    return Build(target, info)


def sweep(root: Path, key: str) -> None:
    """Remove what interrupted builds of other keys than `key` left; call it with the lock held."""
    stale = [path for path in (root / "work").glob("*") if path.name != key and not (path / KEPT).exists()]
    for path in (*stale, *(root / "builds").glob(".staging-*")):
        shutil.rmtree(path, ignore_errors=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
