"""The tensors of mini models: names and sizes come from llama.cpp itself, types from the table."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tests.miniarch import blocks
from tests.miniarch.skeleton import write_skeleton
from tests.miniarch.table import OPTIONAL, Mini

PROJECT = Path(__file__).parents[2]
_EXPERTS = re.compile(r"ffn_(gate|up|down|gate_up)_(?:ch)?exps\.weight$")
_ROLES = {"gate": 0, "gate_up": 0, "up": 1, "down": 2}


@dataclass(frozen=True)
class Tensor:
    """One tensor; `dims` in llama.cpp's order, the row length first."""

    name: str
    dims: tuple[int, ...]
    kind: str = "F32"

    @property
    def n_elements(self) -> int:
        return math.prod(self.dims)

    @property
    def size(self) -> int:
        """Bytes in the file, without padding."""
        return blocks.size(self.kind, self.n_elements)

    @property
    def holds_experts(self) -> bool:
        """Whether there is a slice for each routed expert (grovemoe's adjugate experts count as such)."""
        return "exps." in self.name


def shapes(minis: Mapping[str, Mini], library: Path) -> dict[str, list[Tensor]]:
    """The tensors of each model, asked for in one child process.

    Raises:
        RuntimeError: llama.cpp refuses the metadata of a model, or ends the child.
    """
    with tempfile.TemporaryDirectory() as temporary:
        paths = {name: Path(temporary, f"{number}.gguf") for number, name in enumerate(minis)}
        for name, mini in minis.items():
            write_skeleton(paths[name], mini)
        answers = _ask(list(paths.values()), library)
    out = {}
    for name, mini in minis.items():
        answer = answers.get(str(paths[name]), {})
        if not answer.get("tensors"):
            raise RuntimeError(f"llama.cpp knows no tensors for {name}: {answer.get('refusal', 'the child died')}")
        out[name] = list(_chosen(mini, ((tensor, tuple(dims)) for tensor, dims in answer["tensors"])))
    return out


def _ask(paths: list[Path], library: Path) -> dict[str, dict[str, Any]]:
    command = [sys.executable, "-m", "tests.miniarch.probe", *map(str, paths)]
    environment = {**os.environ, "LLAMA_CPP_LIB_PATH": str(library), "GGML_NO_BACKTRACE": "1"}
    result = subprocess.run(
        command, cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    if result.returncode:
        raise RuntimeError(
            f"the child that asks for tensors died ({result.returncode}): {result.stdout[-200:]}{result.stderr[-800:]}"
        )
    return {answer["path"]: answer for answer in map(json.loads, result.stdout.splitlines())}


def _chosen(mini: Mini, found: Iterable[tuple[str, tuple[int, ...]]]) -> Iterable[Tensor]:
    """What the model has of all that it could have."""
    for name, dims in found:
        if not _left_out(mini, name):
            yield from (_typed(mini, *part) for part in _parts(mini, name, dims))


def _parts(mini: Mini, name: str, dims: tuple[int, ...]) -> Iterable[tuple[str, tuple[int, ...]]]:
    """Fused experts taken apart where the model wants them apart; one expert without a router in a dense layer."""
    if any(name.startswith(f"blk.{layer}.ffn_") for layer in mini.dense):
        if "_exps." in name:
            yield name.replace("_exps.", "."), dims[:2]
        elif "gate_inp" not in name:
            yield name, dims
    elif "ffn_gate_up_exps." in name and not mini.fused:
        half = (dims[0], dims[1] // 2, *dims[2:])
        yield name.replace("ffn_gate_up_exps.", "ffn_gate_exps."), half
        yield name.replace("ffn_gate_up_exps.", "ffn_up_exps."), half
    else:
        yield name, dims


def _left_out(mini: Mini, name: str) -> bool:
    if any(fnmatchcase(name, pattern) for pattern in mini.without):
        return True
    optional = any(fnmatchcase(name, pattern) for pattern in OPTIONAL)
    return optional and not any(fnmatchcase(name, pattern) for pattern in mini.optional)


def _typed(mini: Mini, name: str, dims: tuple[int, ...]) -> Tensor:
    experts = _EXPERTS.search(name)
    if experts:
        return Tensor(name, dims, mini.quants[_ROLES[experts[1]]])
    return Tensor(name, dims, "I32" if "tid2eid" in name else "F32")
