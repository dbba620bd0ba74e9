"""A child process with one native library: loads models, opens contexts, and measures what its parent asks for.

Requests and replies are lines of JSON on stdin and stdout. The unpatched library has no residency exports, so nothing
here touches them unless a request has slots.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from daemon.config import Config
from daemon.errors import HotsetError
from daemon.model_files import load_command
from daemon.native import devices
from daemon.native.context import DECODED, Context
from daemon.native.hotset import Move, Residency, State
from daemon.native.library import backend
from daemon.native.model import Model

LEARN_PROMPT = 2048
"""Tokens of one prompt while a hot set is learned."""

Steps = Sequence[Sequence[int]]
"""Token ids [n_steps, n_sequences]."""


@dataclass
class Opened:
    """A context; `staged` is layer -> slot -> expert whose bytes it holds."""

    context: Context
    stack: ExitStack
    residency: Residency | None = None
    staged: list[dict[int, int]] = field(default_factory=list)
    n_sequences: int = 1


class Worker:
    """Answers requests; a method per request, its arguments are the request's fields."""

    def __init__(self) -> None:
        self._models: dict[str, tuple[Model, Any]] = {}
        self._opened: dict[str, Opened] = {}
        self._devices: list[int] = []

    def hello(self, device: str) -> dict[str, Any]:
        """Load the backends for `device` (as [engine] device), which all models will use; what the device is."""
        devices.load_backends(device)
        self._devices = devices.choose(device)
        found = [devices.describe(pointer) for pointer in self._devices]
        return {"devices": [one.model_dump(include={"name", "description", "memory_total"}) for one in found]}

    def memory(self) -> dict[str, int]:
        """Bytes of the first device, free and in all; 0: it does not tell."""
        if not self._devices:
            return {"free": 0, "total": 0}
        found = devices.describe(self._devices[0])
        return {"free": found.memory_free, "total": found.memory_total}

    def load(self, model: str, path: str, engine: dict[str, Any], mode: str) -> dict[str, float]:
        """Load `path` under the name `model`; `engine` are keys of [engine], `mode` is model.load."""
        spec = load_command(Config.model_validate({"model": {"path": path, "load": mode}, "engine": engine}))
        began = time.perf_counter()
        self._models[model] = (Model(spec, lambda _: None, chosen=self._devices), spec)
        return {"seconds": time.perf_counter() - began}

    def open(self, context: str, model: str, n_ctx: int, threads: int, slots: list[int] | None) -> dict[str, Any]:
        """A context of a loaded model, with residency if there are slots (an empty list: it only counts)."""
        loaded, spec = self._models[model]
        with ExitStack() as stack:
            made = stack.enter_context(Context(loaded, spec, n_ctx=n_ctx, n_threads=threads, n_threads_batch=threads))
            opened = Opened(made, stack, n_sequences=spec.max_sequences)
            if slots is not None:
                opened.residency = stack.enter_context(Residency(made.pointer, slots or None))
                opened.residency.set_state(State.ON if slots else State.COUNT)
                opened.staged = [{} for _ in range(opened.residency.n_layers)]
            opened.stack = stack.pop_all()
        self._opened[context] = opened
        return {} if opened.residency is None else self._described(opened.residency)

    def place(self, context: str, experts: list[list[int]]) -> dict[str, float]:
        """Make exactly `experts` resident, per layer; slot i gets the i-th, and is uploaded to only if need be."""
        opened = self._opened[context]
        residency = _required(opened)
        began = time.perf_counter()
        retired: list[Move] = []
        placed: list[Move] = []
        for layer, wanted in enumerate(experts):
            now = residency.resident(layer)
            new = [*wanted, *([-1] * (len(now) - len(wanted)))]
            changed = [slot for slot, (old, expert) in enumerate(zip(now, new, strict=True)) if old != expert]
            retired += [(layer, slot, -1) for slot in changed if now[slot] >= 0]
            placed += [(layer, slot, new[slot]) for slot in changed if new[slot] >= 0]
        residency.publish(retired)
        for layer, slot, expert in placed:
            if opened.staged[layer].get(slot) != expert:
                residency.stage(layer, expert, slot)
                opened.staged[layer][slot] = expert
        residency.publish(placed)
        return {"seconds": time.perf_counter() - began}

    def learn(self, context: str, tokens: list[int]) -> dict[str, Any]:
        """Counts of a prompt, [layers][experts], one half of it after the other."""
        opened = self._opened[context]
        residency = _required(opened)
        halves = []
        for part in (tokens[: len(tokens) // 2], tokens[len(tokens) // 2 :]):
            before = _counts(residency)
            for start in range(0, len(part), LEARN_PROMPT):
                _clear(opened)
                _prompt(opened.context, part[start : start + LEARN_PROMPT])
            halves.append((_counts(residency) - before).tolist())
        return {"halves": halves}

    def trace(self, context: str, steps: Steps) -> dict[str, Any]:
        """How often every step selects every expert: uint8 [n_steps, layers, experts], in base 64."""
        opened = self._opened[context]
        residency = _required(opened)
        _clear(opened)
        last = _counts(residency)
        seen = []
        for position, tokens in enumerate(steps):
            _step(opened.context, tokens, position)
            now = _counts(residency)
            seen.append((now - last).astype(np.uint8))
            last = now
        array = np.stack(seen)
        return {"shape": array.shape, "counts": base64.b64encode(array.tobytes()).decode()}

    def decode(self, context: str, steps: Steps, warm: int, threads: int) -> dict[str, Any]:
        """Seconds of all steps but the first `warm`, and the hits and misses of these."""
        opened = self._opened[context]
        backend().llama_set_n_threads(opened.context.pointer, threads, threads)
        _clear(opened)
        for position, tokens in enumerate(steps[:warm]):
            _step(opened.context, tokens, position)
        before = _hits(opened.residency)
        began = time.perf_counter()
        for position, tokens in enumerate(steps[warm:], warm):
            _step(opened.context, tokens, position)
        seconds = time.perf_counter() - began
        hits, misses = (_hits(opened.residency) - before).tolist()
        return {"seconds": seconds, "hits": hits, "misses": misses}

    def prefill(self, context: str, tokens: list[int], threads: int) -> dict[str, Any]:
        """Seconds of one prompt."""
        opened = self._opened[context]
        backend().llama_set_n_threads(opened.context.pointer, threads, threads)
        _clear(opened)
        before = _hits(opened.residency)
        began = time.perf_counter()
        _prompt(opened.context, tokens)
        seconds = time.perf_counter() - began
        hits, misses = (_hits(opened.residency) - before).tolist()
        return {"seconds": seconds, "hits": hits, "misses": misses}

    def close(self, context: str) -> dict[str, Any]:
        """Free a context."""
        self._opened.pop(context).stack.close()
        return {}

    def unload(self, model: str) -> dict[str, Any]:
        """Free a model whose contexts are closed."""
        self._models.pop(model)[0].close()
        return {}

    def _described(self, residency: Residency) -> dict[str, Any]:
        layers = residency.layers()
        return {
            "device_bytes": residency.statistics().device_bytes,
            "layers": [
                {"n_expert": x.n_expert, "n_used": x.n_expert_used, "bytes": x.expert_bytes, "reason": x.reason.name}
                for x in layers
            ],
        }


def _required(opened: Opened) -> Residency:
    assert opened.residency is not None, "the request needs a context with slots"
    return opened.residency


def _clear(opened: Opened) -> None:
    for sequence in range(opened.n_sequences):
        opened.context.remove(sequence)


def _step(context: Context, tokens: Sequence[int], position: int) -> None:
    """One token for each sequence, and its logits."""
    code = context.decode((token, position, sequence, True) for sequence, token in enumerate(tokens))
    if code != DECODED:
        raise HotsetError(f"llama_decode returned {code}")
    context.logits(0)


def _prompt(context: Context, tokens: Sequence[int]) -> None:
    """A prompt in sequence 0, in pieces of the micro-batch, and the logits of its last token."""
    width = context.n_ubatch
    for start in range(0, len(tokens), width):
        part = tokens[start : start + width]
        last = len(tokens) - 1 - start
        code = context.decode((token, start + i, 0, i == last) for i, token in enumerate(part))
        if code != DECODED:
            raise HotsetError(f"llama_decode returned {code}")
    context.logits((len(tokens) - 1) % width)


def _counts(residency: Residency) -> npt.NDArray[np.int64]:
    return np.stack(residency.all_counts()).astype(np.int64)


def _hits(residency: Residency | None) -> npt.NDArray[np.int64]:
    """Hits and misses of all layers so far, each [layers]."""
    if residency is None:
        return np.zeros((2, 0), np.int64)
    layers = residency.layers()
    return np.array([[layer.hits for layer in layers], [layer.misses for layer in layers]], np.int64)


def serve(requests: IO[str], replies: IO[str], worker: object) -> None:
    """Answer every line until there are no more; a request that fails is answered with its error."""
    for line in requests:
        request = json.loads(line)
        method: Callable[..., dict[str, Any]] = getattr(worker, request.pop("do"))
        try:
            reply = method(**request)
        except HotsetError as error:
            reply = {"error": error.message}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def main() -> None:
    """Whatever the library itself prints goes to stderr: stdout is for replies only."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(sys.stdin, replies, Worker())
    os._exit(0)  # a driver's own tear-down may take long or crash, and the kernel frees everything


if __name__ == "__main__":
    main()
