"""The facts that `hotset doctor` reports, each as plain JSON-able data; nothing is judged here."""

from __future__ import annotations

import grp
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

import daemon
from daemon.config import Config
from daemon.model_files import model_path
from daemon.native import locate
from hotset_tools import shaders, toolchain
from hotset_tools.cpuflags import describe

_CHILD_SECONDS = 120.0
_DEVICE_FILES = ("/dev/kfd", "/dev/dri/renderD*", "/dev/nvidia[0-9]*")


def native_build(environ: Mapping[str, str]) -> dict[str, Any]:
    """The build that the daemon would use, or why there is none."""
    facts: dict[str, Any] = {"directory": None, "backends": [], "reason": None, "flags": None, "fallback": []}
    try:
        build = locate.require_build(environ)
    except locate.BuildMissing as error:
        return facts | {"reason": error.message}
    facts["directory"] = str(build.directory)
    facts["reason"] = f"named by {locate.OVERRIDE}" if environ.get(locate.OVERRIDE) else "selected by `hotset build`"
    if build.info is not None:
        facts |= {"backends": build.info.backends, "fallback": build.info.fallback, "created": build.info.created}
        facts |= {"flags": describe(build.info.flags), "series": build.info.series[:12]}
    return facts


def ask_llama(directory: Path, module: str = "daemon.native.report") -> dict[str, Any]:
    """What llama.cpp sees, asked in a child; {"error": ...} when the child dies."""
    environ = {**os.environ, "PYTHONPATH": str(Path(daemon.__file__).resolve().parents[1])}
    try:
        result = subprocess.run(
            [sys.executable, "-m", module, str(directory)],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_CHILD_SECONDS,
            env=environ,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"llama.cpp did not answer within {_CHILD_SECONDS:.0f} s; a GPU driver may hang"}
    if result.returncode < 0:
        name = signal.Signals(-result.returncode).name
        return {"error": f"llama.cpp died with {name} while its devices were listed; a GPU driver may be broken"}
    if result.returncode != 0:
        last = result.stderr.strip().splitlines()[-1:] or ["no message"]
        return {"error": last[0]}
    found: dict[str, Any] = json.loads(result.stdout.strip().splitlines()[-1])
    return found


def backends(built: list[str]) -> list[dict[str, Any]]:
    """Each backend: in the build, buildable, and which packages it lacks."""
    tools = toolchain.survey()
    return [{"name": "rpc", "built": "rpc" in built, "missing": [], "install": None}] + [
        {
            "name": name,
            "built": name in built,
            "missing": [toolchain.NEEDS[need].what for need in tools.missing(name)],
            "install": toolchain.install_command(tools.missing(name)) if tools.missing(name) else None,
        }
        for name in toolchain.BACKENDS
    ]


def glslc() -> dict[str, Any] | None:
    """The shader compiler on PATH and what it is good for; None without one."""
    path = shutil.which("glslc")
    if path is None:
        return None
    found = shaders.probe(path)
    return {"path": path, **found.model_dump(), "verdict": shaders.verdict(found)}


def memory() -> dict[str, int]:
    """RAM in bytes."""
    found = psutil.virtual_memory()
    return {"total": int(found.total), "available": int(found.available), "swap": int(psutil.swap_memory().total)}


def device_files() -> list[dict[str, Any]]:
    """GPU device files, whether this user may open them, and the group that may."""
    paths = [path for pattern in _DEVICE_FILES for path in sorted(Path("/").glob(pattern.lstrip("/")))]
    return [_access(path) for path in paths]


def model(loaded: Config) -> dict[str, Any]:
    """The model file that the config names: size in bytes, and what this user may do with it and its directory."""
    path = model_path(loaded).absolute()
    parts = split_parts(path)
    whole = all(part.is_file() for part in parts)
    return {
        "path": str(path),
        "embedded": not loaded.model.path,
        "exists": whole,
        "parts": len(parts),
        "size": sum(part.stat().st_size for part in parts) if whole else 0,
        "readable": whole and all(os.access(part, os.R_OK) for part in parts),
        "directory": str(path.parent),
        "directory_listable": os.access(path.parent, os.R_OK | os.X_OK),
    }


def split_parts(path: Path) -> list[Path]:
    """All files of a split model that is named by its first part; the file itself otherwise."""
    stem, _, count = path.stem.rpartition("-of-")
    base, _, first = stem.rpartition("-")
    if not (len(count) == len(first) == 5 and count.isdecimal() and first == "00001"):
        return [path]
    return [path.with_name(f"{base}-{number:05d}-of-{count}{path.suffix}") for number in range(1, int(count) + 1)]


def cache(root: Path) -> dict[str, Any]:
    """Where builds go, whether they can, and the free bytes there."""
    existing = next(path for path in (root, *root.parents) if path.exists())
    return {
        "directory": str(root),
        "writable": os.access(existing, os.W_OK | os.X_OK),
        "free": shutil.disk_usage(existing).free,
        "builds": [str(build.directory) for build in locate.builds(root)],
        "peers": [str(build.directory) for build in locate.builds(root, "peer")],
    }


def _access(path: Path) -> dict[str, Any]:
    gid = path.stat().st_gid
    try:
        group = grp.getgrgid(gid).gr_name
    except KeyError:
        group = str(gid)
    return {
        "path": str(path),
        "usable": os.access(path, os.R_OK | os.W_OK),
        "group": group,
        "member": gid in {os.getegid(), *os.getgroups()},
    }
