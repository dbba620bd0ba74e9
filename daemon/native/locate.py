"""Finds the native build that this checkout may use; loads nothing.

A build is a directory of the cache with the shared libraries and a `build.json`, renamed into place only when it was
complete and had passed its self-test. It is used when it was made from this checkout's upstream release and patch
series, and when this machine has every instruction set that it was compiled for.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from daemon.errors import HotsetError
from daemon.native import cpuinfo, pin

OVERRIDE = "LLAMA_CPP_LIB_PATH"


class BuildMissing(HotsetError):
    """There is no native build that can be used; the message says what to run."""

    code = "build_missing"


class Glslc(BaseModel):
    """The shader compiler of a Vulkan build, and which of ggml's optional shader features it knows."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    version: str
    features: dict[str, bool]


class BuildInfo(BaseModel):
    """build.json."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    format: Literal[1] = 1
    key: str
    kind: Literal["hotset", "peer"]
    version: str
    series: str
    """Hash of the patch series; empty for a peer, which is unpatched."""
    backends: list[str]
    flags_wanted: list[str]
    flags: list[str]
    """GGML_* instruction sets that the CPU backend was compiled for, after any fallback."""
    fallback: list[str]
    """Why `flags` is less than `flags_wanted`, one line for each step down."""
    compiler: str
    options: dict[str, str]
    glslc: Glslc | None
    selftest: dict[str, float]
    """Kind of product -> largest relative error seen."""
    created: str
    seconds: float
    files: dict[str, int]
    """Name -> size in bytes of everything installed."""


@dataclass(frozen=True)
class Build:
    """A usable build. `info` is None for a directory named by LLAMA_CPP_LIB_PATH that has no build.json."""

    directory: Path
    info: BuildInfo | None

    @property
    def backends(self) -> tuple[str, ...]:
        """Names in ggml's spelling, "cpu", "rpc", "vulkan"; empty when unknown."""
        return tuple(self.info.backends) if self.info else ()


def cache_root(environ: Mapping[str, str] = os.environ) -> Path:
    """$HOTSET_CACHE, else $XDG_CACHE_HOME/hotset, else ~/.cache/hotset."""
    if environ.get("HOTSET_CACHE"):
        return Path(environ["HOTSET_CACHE"]).expanduser().absolute()
    base = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "hotset"


def state_root(environ: Mapping[str, str] = os.environ) -> Path | None:
    """$STATE_DIRECTORY (systemd's; the first of several), else $XDG_STATE_HOME/hotset, else ~/.local/state/hotset.

    None where none of them is known, because this user has no home.
    """
    if given := environ.get("STATE_DIRECTORY", "").partition(":")[0]:
        return Path(given).absolute()
    try:
        return Path(environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser().absolute() / "hotset"
    except RuntimeError:
        return None


def read_build(directory: Path) -> BuildInfo | None:
    """The description of a complete build; None for anything partial or damaged."""
    try:
        info = BuildInfo.model_validate_json((directory / "build.json").read_bytes())
        whole = all((directory / name).stat().st_size == size for name, size in info.files.items())
    except (OSError, ValidationError):
        return None
    return info if whole else None


def builds(root: Path, kind: str = "hotset") -> list[Build]:
    """Every complete build of `kind` in the cache, the one selected last first."""
    found = [Build(path, info) for path in sorted((root / "builds").glob("*")) if (info := read_build(path))]
    return sorted((build for build in found if build.info and build.info.kind == kind), key=_selected, reverse=True)


def select(build: Build) -> None:
    """Make `build` the one that `find_build` prefers."""
    os.utime(build.directory / "build.json")


def find_build(
    backend: str | None = None, *, environ: Mapping[str, str] = os.environ, flags: frozenset[str] | None = None
) -> Build | None:
    """The build to use: what LLAMA_CPP_LIB_PATH names, else the one selected last that fits this checkout and machine.

    `backend` asks for a build that has it. `flags` replaces what the machine announces (tests).
    """
    if environ.get(OVERRIDE):
        directory = Path(environ[OVERRIDE])
        return Build(directory, read_build(directory)) if (directory / "libllama.so").exists() else None
    return _first_fitting(builds(cache_root(environ)), pin.series(), backend, flags)


def find_peer(*, environ: Mapping[str, str] = os.environ, flags: frozenset[str] | None = None) -> Build | None:
    """The unpatched llama-server and llama-bench of the same release, if `hotset build --peer` made them."""
    return _first_fitting(builds(cache_root(environ), "peer"), "", None, flags)


def require_build(environ: Mapping[str, str] = os.environ) -> Build:
    """`find_build`, or an error that says what to do.

    Raises:
        BuildMissing: nothing fits.
    """
    build = find_build(environ=environ)
    if build is not None:
        return build
    if environ.get(OVERRIDE):
        raise BuildMissing(f"{OVERRIDE} names a directory without libllama.so; unset it or point it at a build.")
    raise BuildMissing(_why_missing(builds(cache_root(environ))))


def _selected(build: Build) -> int:
    return (build.directory / "build.json").stat().st_mtime_ns


def _first_fitting(
    candidates: list[Build], series: str, backend: str | None, flags: frozenset[str] | None
) -> Build | None:
    machine = cpuinfo.machine_flags() if flags is None else flags
    return next((build for build in candidates if _misfit(build, series, backend, machine) is None), None)


def _misfit(build: Build, series: str, backend: str | None, machine: frozenset[str]) -> str | None:
    """Why this checkout and machine cannot use `build`; None when they can."""
    assert build.info is not None
    if build.info.version != pin.upstream().version:
        return f"it is of release {build.info.version}"
    if build.info.series != series:
        return "it was made from another patch series"
    if lacking := set(build.info.flags) & set(cpuinfo.GGML_FLAGS) - machine:
        return f"this processor lacks {', '.join(sorted(lacking))}"
    if backend is not None and backend not in build.info.backends:
        return f"it lacks the {backend} backend"
    return None


def _why_missing(candidates: list[Build]) -> str:
    machine = cpuinfo.machine_flags()
    reasons = {reason for build in candidates if (reason := _misfit(build, pin.series(), None, machine))}
    found = f" What is in the cache cannot be used: {'; '.join(sorted(reasons))}." if reasons else ""
    return f"There is no native build for this checkout.{found} Run `make setup` or `hotset build`."
