"""Which drivers compute: what changes when one of them is updated, without starting any."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

_MODULES = ("nvidia", "amdgpu", "i915", "xe")
_MANIFESTS = ("usr/share/vulkan/icd.d", "etc/vulkan/icd.d", "usr/local/share/vulkan/icd.d")
_NAMED = ("VK_DRIVER_FILES", "VK_ICD_FILENAMES")
_ROCM = "opt/rocm/.info/version"


def identity(root: Path = Path("/"), environ: Mapping[str, str] = os.environ, release: str = "") -> str:
    """Kernel, kernel modules, Vulkan drivers and ROCm as one line; the same as long as none of them changes."""
    parts = [f"kernel {release or os.uname().release}"]
    parts += [f"{name} {text}" for name in _MODULES if (text := _text(root / f"sys/module/{name}/version"))]
    parts += sorted(set(_vulkan(root, environ)))
    if rocm := _text(root / _ROCM):
        parts.append(f"rocm {rocm}")
    return "; ".join(parts)


def _vulkan(root: Path, environ: Mapping[str, str]) -> Iterator[str]:
    """Each Vulkan driver with the size and time of its library, where its manifest says where that is."""
    files = [path for place in _MANIFESTS for path in (root / place).glob("*.json")]
    files += [Path(name) for variable in _NAMED for name in environ.get(variable, "").split(":") if name]
    for file in files:
        try:
            driver = json.loads(file.read_text("utf-8"))["ICD"]
            library = Path(driver["library_path"])
            version = driver.get("api_version", "")
        except (OSError, ValueError, KeyError, TypeError):
            continue  # the loader of Vulkan passes over it as well
        yield f"{file.name} {version} {_stamp(library if library.is_absolute() else root / 'nowhere')}".strip()


def _stamp(path: Path) -> str:
    try:
        status = path.stat()
    except OSError:
        return ""
    return f"{status.st_size}@{status.st_mtime_ns}"


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
