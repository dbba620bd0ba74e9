"""What the tests of residency share: a device without a graphics card, a model in a context on it, and comparisons."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from daemon.config import Config
from daemon.model_files import load_command
from daemon.native import devices
from daemon.native.context import DECODED, Context
from daemon.native.hotset import Residency
from daemon.native.library import backend
from daemon.native.model import Model
from daemon.verify.compare import kl
from hotset_tools.stand_in import RpcServer, rpc_server

__all__ = ["RpcServer", "kl", "rpc_server"]

Logits = npt.NDArray[np.float32]
ROOT = Path(__file__).parents[1]


@dataclass
class Bench:
    """A model whose experts are in memory, in a context that has a device."""

    model: Model
    context: Context

    def logits(self, tokens: Sequence[tuple[int, int, int]]) -> Logits:
        """One step of (token, position, sequence); the logits of every row."""
        assert self.context.decode((*row, True) for row in tokens) == DECODED
        return np.stack([self.context.logits(i).copy() for i in range(len(tokens))])

    def clear(self) -> None:
        """Forget all sequences; text diffusion models have no memory of any."""
        for seq_id in range(backend().llama_n_seq_max(self.context.pointer) if self.context.memory else 0):
            self.context.remove(seq_id)


class open_bench(ExitStack):
    """A bench for one model; `load` and `engine` are settings of the daemon.

    One thread: two that share a core with the device's wait for each other at every node.
    """

    def __init__(self, device: str, path: Path, *, n_ctx: int = 512, load: str = "auto", **engine: Any) -> None:
        super().__init__()
        settings = {"device": device, "threads": 1, "kv_cells": n_ctx, "max_sequences": 8, "ubatch": 64}
        settings |= {"cache_type_k": "f32", "cache_type_v": "f32", "repack": False}
        self.n_ctx = n_ctx
        model = {"path": str(path), "load": load}
        self.spec = load_command(Config.model_validate({"model": model, "engine": settings | engine}))

    def __enter__(self) -> Bench:  # type: ignore[override]
        super().__enter__()
        devices.load_backends(self.spec.device)
        model = self.enter_context(Model(self.spec, lambda _: None))
        threads = self.spec.threads or 1
        with changed_params(flash_attn_type=0):
            context = Context(model, self.spec, n_ctx=self.n_ctx, n_threads=threads, n_threads_batch=threads)
        return Bench(model, self.enter_context(context))


@contextmanager
def changed_params(**changes: Any) -> Iterator[None]:
    """Contexts are made with these parameters.

    Flash attention and an F16 cache are off in these tests: they make a difference of the last bit a thousand times
    larger, so that even stock's own logits differ by KL 1e-7 between a step of 31 tokens and 31 steps.
    """
    lib = backend()
    make = lib.llama_context_default_params

    def params() -> Any:
        made = make()
        for name, value in changes.items():
            setattr(made, name, value)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lib, "llama_context_default_params", params)
        yield


def in_child(function: FunctionType, *args: str, **environment: str) -> str:
    """Call a function of a test module in a process of its own; its output, or a failure with its error output.

    For servers that may go: ggml ends the process that asks one. The child sees `environment` beside this process's.
    """
    module = ".".join(Path(function.__code__.co_filename).relative_to(ROOT).with_suffix("").parts)
    code = f"from {module} import {function.__name__} as run; run(*{args!r})"
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-6000:]
    return result.stdout


def fill(hs: Residency, experts: dict[int, list[int]]) -> None:
    """Make these experts of these layers resident, and no others of theirs, in slots from 0 on."""
    moves = []
    for index in experts:
        moves += [(index, slot, -1) for slot, owner in enumerate(hs.resident(index)) if owner >= 0]
    hs.publish(moves)
    moves = [(index, slot, expert) for index, wanted in experts.items() for slot, expert in enumerate(wanted)]
    for index, slot, expert in moves:
        hs.stage(index, expert, slot)
    hs.publish(moves)
