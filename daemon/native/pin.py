"""What this checkout is written for: the upstream release of patches/UPSTREAM and the hash of the patch series."""

from __future__ import annotations

import hashlib
import tomllib
from functools import cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

_PACKAGE = Path(__file__).resolve().parents[1]


class Upstream(BaseModel):
    """patches/UPSTREAM: the release that the series applies to."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    project: str
    version: str
    sdist_sha256: str = Field(pattern="^[0-9a-f]{64}$")
    llama_cpp_commit: str = Field(pattern="^[0-9a-f]{9,40}$")
    ggml_version: str
    vendored: str
    """Directory of llama.cpp inside the unpacked sdist's top directory."""


def patches_dir() -> Path:
    """The series of the checkout, or the copy inside an installed package."""
    checkout = _PACKAGE.parent / "patches"
    return checkout if (checkout / "series").is_file() else _PACKAGE / "patches"


def read_upstream(directory: Path) -> Upstream:
    """Read UPSTREAM.

    Raises:
        OSError, tomllib.TOMLDecodeError, pydantic.ValidationError: it is missing or wrong.
    """
    return Upstream.model_validate(tomllib.loads((directory / "UPSTREAM").read_text("utf-8")))


@cache
def upstream() -> Upstream:
    """The pinned release."""
    return read_upstream(patches_dir())


def series_names(directory: Path) -> list[str]:
    """Names of the patches in the order of application; comments and empty lines are skipped."""
    lines = (line.split("#", 1)[0].strip() for line in (directory / "series").read_text("utf-8").splitlines())
    return [line for line in lines if line]


def split_patch(text: str) -> tuple[str, str]:
    """A patch's header and its diff; the diff starts at the first line with "--- "."""
    at = 0 if text.startswith("--- ") else text.find("\n--- ") + 1
    return (text[:at], text[at:]) if at or text.startswith("--- ") else (text, "")


def series_hash(directory: Path) -> str:
    """SHA-256 in hex of the base and of all diffs in order; words in a patch's header do not count."""
    digest = hashlib.sha256(read_upstream(directory).sdist_sha256.encode())
    for name in series_names(directory):
        _, diff = split_patch((directory / name).read_text("utf-8"))
        digest.update(b"\0" + diff.encode())
    return digest.hexdigest()


@cache
def series() -> str:
    """The hash of this checkout's (or package's) series."""
    return series_hash(patches_dir())
