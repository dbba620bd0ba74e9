"""What a benchmark ran on, for the head of its JSON."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import psutil

from daemon.native import locate, pin

_ROOT = Path(__file__).resolve().parents[2]


def describe() -> dict[str, str | int]:
    """Processor, cores, bytes of RAM, kernel, and the driver of a card where it can be asked."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "ram": int(psutil.virtual_memory().total),
        "kernel": platform.release(),
        "driver": _driver(),
    }


def build(directory: Path) -> dict[str, object]:
    """What is known of a native library."""
    info = locate.read_build(directory)
    if info is None:
        return {"directory": directory.name}
    return {"version": info.version, "series": info.series[:12], "backends": info.backends, "flags": info.flags}


def commit() -> str:
    """The commit of this checkout, or the hash of its patch series where there is no repository."""
    found = _said("git", "-C", str(_ROOT), "rev-parse", "--short=12", "HEAD")
    return found or f"series {pin.series()[:12]}"


def _cpu() -> str:
    try:
        match = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text("utf-8"), re.MULTILINE)
    except OSError:
        match = None
    return match[1] if match else platform.machine()


def _driver() -> str:
    if said := _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"):
        return f"NVIDIA {said.splitlines()[0]}"
    amd = Path("/sys/module/amdgpu/version")
    return f"amdgpu {amd.read_text('utf-8').strip()}" if amd.is_file() else ""


def _said(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    return result.stdout.strip() if result.returncode == 0 else ""
