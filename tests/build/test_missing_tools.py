"""The real commands on a machine without tools: one clear message, exit code 1."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(command: list[str], path: Path, cache: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run with nothing on PATH but what `path` holds."""
    kept = {name: value for name, value in os.environ.items() if name in {"HOME", "LANG"}}
    environ = {**kept, "PATH": str(path), "HOTSET_CACHE": str(cache), "PYTHONPATH": str(ROOT), **environ}
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False, cwd=cache)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    path = tmp_path / "cache"
    path.mkdir()
    return path


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    path = tmp_path / "empty"
    path.mkdir()
    return path


@pytest.fixture
def compiler_only(empty: Path) -> Path:
    for name in ("c++", "cc", "cmake", "ninja"):
        (empty / name).write_text("#!/bin/sh\nexit 0\n")
        (empty / name).chmod(0o755)
    return empty


def hotset(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "hotset_tools.cli", *arguments]


@pytest.mark.parametrize("backend", ["auto", "cpu"])
def test_without_a_compiler(backend: str, empty: Path, cache: Path) -> None:
    result = run(hotset("build", "--backend", backend), empty, cache)
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("hotset: The cpu backend cannot be built, missing: a C++ compiler")
    assert "g++" in line
    assert not list(cache.iterdir())


@pytest.mark.parametrize(
    ("backend", "what", "package"),
    [
        ("vulkan", "glslc, the shader compiler", "glslc"),
        ("hip", "the hipBLAS headers", "libhipblas-dev"),
    ],
)
def test_a_named_backend_without_its_tools(
    backend: str, what: str, package: str, compiler_only: Path, cache: Path
) -> None:
    result = run(hotset("build", "--backend", backend), compiler_only, cache)
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1
    assert what in result.stderr
    assert package in result.stderr


def test_an_unknown_backend(compiler_only: Path, cache: Path) -> None:
    result = run(hotset("build", "--backend", "metal"), compiler_only, cache)
    assert (result.returncode, result.stdout) == (1, "")
    assert "choose auto, cpu, vulkan, hip, cuda" in result.stderr


def test_the_doctor_without_a_build_says_what_to_run(empty: Path, cache: Path) -> None:
    result = run(hotset("doctor", "--json"), empty, cache)
    assert result.returncode == 1
    report = json.loads(result.stdout)
    assert "Run `make setup` or `hotset build`" in report["problems"][0]
    assert {backend["name"] for backend in report["backends"]} == {"rpc", "cpu", "vulkan", "hip", "cuda"}
    assert all(not backend["built"] for backend in report["backends"])
    assert report["cache"] == report["cache"] | {"directory": str(cache), "writable": True, "builds": []}


def test_setup_without_python_and_compiler_says_everything_at_once(empty: Path, tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    (checkout / "scripts").mkdir(parents=True)
    for name in ("requirements.lock", "requirements-cmake.lock", "pyproject.toml", "patches/UPSTREAM", "scripts/setup"):
        target = checkout / name
        target.parent.mkdir(exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    for name in ("bash", "cat", "cut", "dirname", "sha256sum"):
        (empty / name).symlink_to(next(p for d in ("/usr/bin", "/bin") if (p := Path(d, name)).exists()))
    result = run(["/bin/bash", str(checkout / "scripts" / "setup")], empty, tmp_path)
    assert result.returncode == 1
    assert "Python 3.11 or newer" in result.stderr
    assert "a C++ compiler" in result.stderr
    assert "sudo apt-get install python3 python3-venv g++" in result.stderr
    assert not (checkout / ".venv").exists()
