"""Which nodes llama.cpp computes for a model, in their order: a child process prints them by step as JSON.

Its arguments: a device, a state of residency ("none": it is not even created), model files. With "none" it runs with
unpatched libraries too.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from daemon.native.hotset import Reason, Residency, State
from daemon.native.library import backend
from tests.miniarch.ggml_tensor import TensorHead, base_library
from tests.residency_bench import ROOT, Bench, changed_params, open_bench

STEPS: dict[str, list[tuple[int, int, int]]] = {
    "prompt": [(7 * i % 300, i, 0) for i in range(40)],
    "token": [(11, 40, 0)],
    "sequences": [(13 + s, 0, s) for s in range(1, 5)],
}


class _Tensor(ctypes.Structure):
    """The first fields of struct ggml_tensor, up to the operation."""

    _fields_ = (("head", TensorHead), ("op", ctypes.c_int))


class Nodes:
    """Notes each node as "operation name type shape"; give `callback` to the context's parameters as `cb_eval`."""

    def __init__(self) -> None:
        self._base = base_library()
        self._base.ggml_op_name.argtypes, self._base.ggml_op_name.restype = (ctypes.c_int,), ctypes.c_char_p
        self.seen: list[str] = []
        self.callback = backend().ggml_backend_sched_eval_callback(self._note)

    def take(self) -> list[str]:
        """Those since the last call."""
        seen, self.seen = self.seen, []
        return seen

    def _note(self, tensor: int, ask: bool, _data: Any) -> bool:
        if ask:
            node = _Tensor.from_address(tensor)
            words = (self._base.ggml_op_name(node.op), self._base.ggml_get_name(tensor))
            self.seen.append(f"{' '.join(word.decode() for word in words)} {node.head.type} {list(node.head.ne)}")
        return not ask


NodeLists = dict[str, list[str]]
"""Step -> its nodes."""


def digests(nodes: NodeLists) -> dict[str, str]:
    """By step: how many nodes, and what tells one list from another."""
    return {
        step: f"{len(names)} {hashlib.sha256(json.dumps(names).encode()).hexdigest()[:16]}"
        for step, names in nodes.items()
    }


def in_processes(device: str, state: str, paths: list[Path], library: Path) -> dict[str, NodeLists]:
    """Model -> the nodes of its steps, by the library in this directory.

    Raises:
        subprocess.CalledProcessError: the library ended the process.
    """
    command = [sys.executable, "-m", "tests.node_lists", device, state, *map(str, paths)]
    environment = os.environ | {"LLAMA_CPP_LIB_PATH": str(library)}
    result = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    return {line["model"]: line["nodes"] for line in lines}


def walk(bench: Bench, nodes: Nodes) -> NodeLists:
    """The nodes of each step."""
    seen = {}
    for name, tokens in STEPS.items():
        nodes.take()
        bench.logits(tokens)
        seen[name] = nodes.take()
    return seen


def nodes_of(device: str, state: str, path: Path) -> NodeLists:
    """With half of the experts' slots made, in that state."""
    nodes = Nodes()
    with changed_params(cb_eval=nodes.callback), open_bench(device, path) as bench:
        if state == "none":
            return walk(bench, nodes)
        with Residency(bench.context.pointer) as hs:
            hs.resize([layer.n_expert // 2 if layer.reason == Reason.MANAGED else -1 for layer in hs.layers()])
            hs.set_state(State[state])
            return walk(bench, nodes)


def main(device: str, state: str, *paths: str) -> None:
    for path in map(Path, paths):
        print(json.dumps({"model": path.stem, "nodes": nodes_of(device, state, path)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
