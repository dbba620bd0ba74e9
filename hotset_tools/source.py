"""The pinned sdist: fetched once by pip into the cache, checked by its SHA-256, and unpacked."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from daemon.errors import HotsetError
from daemon.native import pin

Run = Callable[[list[str]], subprocess.CompletedProcess[str]]


class SourceUnavailable(HotsetError):
    """The sdist could not be fetched, or is not the pinned one."""

    code = "source_unavailable"


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run to the end, output captured; a failure is in the return code."""
    return subprocess.run(command, capture_output=True, text=True, check=False)


def sdist_path(cache: Path) -> Path:
    """Where the sdist lies once it was fetched."""
    upstream = pin.upstream()
    return cache / "source" / f"{upstream.project.replace('-', '_')}-{upstream.version}.tar.gz"


def cached_sdist(cache: Path) -> Path | None:
    """The sdist if it is in the cache and whole; a damaged file counts as missing."""
    path = sdist_path(cache)
    return path if path.is_file() and sha256(path) == pin.upstream().sdist_sha256 else None


def fetch(cache: Path, run: Run = run) -> Path:
    """The checked sdist, downloaded when the cache lacks it.

    Raises:
        SourceUnavailable: pip failed, or the file has another SHA-256.
    """
    return cached_sdist(cache) or _download(sdist_path(cache), run)


def sha256(path: Path) -> str:
    """In hex, of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def unpack(sdist: Path, target: Path) -> None:
    """Put the vendored llama.cpp of the sdist into `target`, which must not exist.

    Raises:
        SourceUnavailable: the archive does not hold it.
    """
    prefix = f"{sdist.name.removesuffix('.tar.gz')}/{pin.upstream().vendored}/"
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="unpack-") as temporary, tarfile.open(sdist) as archive:
        # Debian 12's Python (3.11.2) has no extraction filters; there the SHA-256 alone vouches for the archive.
        if hasattr(tarfile, "data_filter"):
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(temporary, members=_below(archive, prefix))
        top = Path(temporary, prefix)
        if not (top / "CMakeLists.txt").is_file():
            raise SourceUnavailable(f"{sdist.name} holds no llama.cpp at {pin.upstream().vendored}")
        top.rename(target)


def _below(archive: tarfile.TarFile, prefix: str) -> Iterator[tarfile.TarInfo]:
    return (member for member in archive if member.name.startswith(prefix))


def _download(path: Path, run: Run) -> Path:
    upstream = pin.upstream()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="download-") as temporary:
        result = run(_pip_command(upstream.project, upstream.version, temporary))
        if result.returncode != 0:
            last = (result.stderr or result.stdout).strip().splitlines()[-3:]
            raise SourceUnavailable("pip could not fetch the sdist:\n  " + "\n  ".join(last))
        file = Path(temporary, path.name)
        _check(file, upstream.sdist_sha256)
        file.replace(path)
    return path


def _pip_command(project: str, version: str, target: str) -> list[str]:
    # Without build isolation pip needs no second download of the build backend, which the lock installed already.
    options = ["--no-deps", "--no-binary", project, "--no-build-isolation", "--quiet", "--dest", target]
    return [sys.executable, "-m", "pip", "download", *options, f"{project}=={version}"]


def _check(file: Path, expected: str) -> None:
    if not file.is_file():
        raise SourceUnavailable(f"pip fetched no {file.name}")
    if (found := sha256(file)) != expected:
        raise SourceUnavailable(f"{file.name} has SHA-256 {found}, the pinned one is {expected}; it is not used")


if __name__ == "__main__":
    from daemon.native.locate import cache_root

    print(fetch(cache_root()))
