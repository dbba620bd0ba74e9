"""A compiler, cmake and ninja that only pretend, so that the whole pipeline runs in a second."""

from __future__ import annotations

from pathlib import Path

from hotset_tools.toolchain import Toolchain

_CXX = """#!/bin/sh
exit 0
"""
# Notes the flags it was given where ninja's product will show them.
_CMAKE = """#!/bin/sh
echo "configured with: $*"
while [ $# -gt 0 ]; do case "$1" in -B) build=$2; shift ;; -DGGML_*=ON) on="$on $1" ;; esac; shift; done
mkdir -p "$build/bin" && echo "$on" > "$build/bin/libggml-cpu.so"
"""
_NINJA = """#!/bin/sh
while [ $# -gt 0 ]; do case "$1" in -C) build=$2; shift ;; esac; shift; done
echo "[1/2] Building CXX object one.o"
if [ -e "{directory}/broken" ]; then echo "two.cpp:1: error: it is broken"; exit 1; fi
echo "[2/2] Linking libllama.so"
echo elf > "$build/bin/libllama.so.0.5.0"
ln -sf libllama.so.0.5.0 "$build/bin/libllama.so"
echo program > "$build/bin/ggml-rpc-server"
echo program > "$build/bin/llama-server"
echo program > "$build/bin/llama-bench"
echo object > "$build/bin/left-over.o"
"""


def make_tools(directory: Path) -> Toolchain:
    """Write the tools into `directory`; a file "broken" there makes ninja fail."""
    directory.mkdir()
    texts = {"c++": _CXX, "cmake": _CMAKE, "ninja": _NINJA.replace("{directory}", str(directory))}
    for name, text in texts.items():
        (directory / name).write_text(text)
        (directory / name).chmod(0o755)
    paths = {"cxx": "c++", "cc": "c++", "cmake": "cmake", "ninja": "ninja"}
    tools = {name: str(directory / file) for name, file in paths.items()}
    return Toolchain(tools, frozenset(tools), compiler="pretend 1.0")


class Recorder:
    """A reporter that keeps what it is told."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.notes: list[str] = []
        self.steps: list[tuple[int, int]] = []

    def stage(self, text: str) -> None:
        self.stages.append(text)

    def progress(self, done: int, total: int) -> None:
        self.steps.append((done, total))

    def note(self, text: str) -> None:
        self.notes.append(text)

    def close(self) -> None:
        """Nothing to close."""
