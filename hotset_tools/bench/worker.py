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
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import IO, Any

import numpy as np

from daemon.config import Config
from daemon.errors import HotsetError
from daemon.model_files import load_command
from daemon.native import devices
from daemon.native.context import Context
from daemon.native.hotset import Move, Residency, State
from daemon.native.library import backend
from daemon.native.model import Model
from hotset_tools.bench.following import Following
from hotset_tools.bench.memory_watch import MemoryWatch
from hotset_tools.bench.opened import Opened
from hotset_tools.bench.pushing import Pusher, one_free_slot

LEARN_PROMPT = 2048
"""Tokens of one prompt while a hot set is learned."""

Steps = Sequence[Sequence[int]]
"""Token ids [n_steps, n_sequences]."""


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

    def open(
        self,
        context: str,
        model: str,
        n_ctx: int,
        threads: int,
        slots: list[int] | None,
        vram: str = "",
        state: str = "",
    ) -> dict[str, Any]:
        """A context of a loaded model, with residency if there are slots (an empty list: it only counts).

        `vram`: as many slots as this budget gives, and experts that follow the traffic, beginning with what was learned
        in the directory `state`.
        """
        loaded, spec = self._models[model]
        with ExitStack() as stack:
            made = stack.enter_context(Context(loaded, spec, n_ctx=n_ctx, n_threads=threads, n_threads_batch=threads))
            opened = Opened(made, stack, n_sequences=spec.max_sequences)
            if vram:
                directory = Path(state) if state else None
                opened.following = stack.enter_context(Following(made, spec, vram, self._devices, directory))
                opened.residency = opened.following.residency
            elif slots is not None:
                opened.residency = stack.enter_context(Residency(made.pointer, slots or None))
                opened.residency.set_state(State.ON if slots else State.COUNT)
                opened.staged = [{} for _ in range(opened.residency.n_layers)]
            opened.stack = stack.pop_all()
        self._opened[context] = opened
        return {} if opened.residency is None else self._described(opened.residency)

    def place(self, context: str, experts: list[list[int]]) -> dict[str, float]:
        """Make exactly `experts` resident, per layer; slot i gets the i-th, and is uploaded to only if need be."""
        opened = self._opened[context]
        residency = opened.slots
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
        residency.stage_all(move for move in placed if opened.staged[move[0]].get(move[1]) != move[2])
        for layer, slot, expert in placed:
            opened.staged[layer][slot] = expert
        residency.publish(placed)
        return {"seconds": time.perf_counter() - began}

    def learn(self, context: str, tokens: list[int]) -> dict[str, Any]:
        """Counts of a prompt, [layers][experts], one half of it after the other."""
        opened = self._opened[context]
        halves = []
        for part in (tokens[: len(tokens) // 2], tokens[len(tokens) // 2 :]):
            before = opened.counts()
            for start in range(0, len(part), LEARN_PROMPT):
                opened.clear()
                opened.prompt(part[start : start + LEARN_PROMPT])
            halves.append((opened.counts() - before).tolist())
        return {"halves": halves}

    def trace(self, context: str, steps: Steps) -> dict[str, Any]:
        """How often every step selects every expert: uint8 [n_steps, layers, experts], in base 64."""
        opened = self._opened[context]
        opened.clear()
        last = opened.counts()
        seen = []
        for position, tokens in enumerate(steps):
            opened.step(tokens, position)
            now = opened.counts()
            seen.append((now - last).astype(np.uint8))
            last = now
        array = np.stack(seen)
        return {"shape": array.shape, "counts": base64.b64encode(array.tobytes()).decode()}

    def decode(self, context: str, steps: Steps, warm: int, threads: int) -> dict[str, Any]:
        """Seconds of all steps but the first `warm`, and the hits and misses of these."""
        opened = self._opened[context]
        backend().llama_set_n_threads(opened.context.pointer, threads, threads)
        opened.clear()
        with opened.moving():
            for position, tokens in enumerate(steps[:warm]):
                opened.step(tokens, position)
            before, uploads = opened.hits(), opened.uploads()
            began = time.perf_counter()
            for position, tokens in enumerate(steps[warm:], warm):
                opened.step(tokens, position)
            seconds = time.perf_counter() - began
            hits, misses = (opened.hits() - before).tolist()
            n_uploads, n_bytes = (opened.uploads() - uploads).tolist()
        return {"seconds": seconds, "hits": hits, "misses": misses, "uploads": n_uploads, "upload_bytes": n_bytes}

    def push(
        self, context: str, pairs: Sequence[Steps], warm: int, threads: int, bytes_per_second: float, together: int = 1
    ) -> dict[str, Any]:
        """Seconds of each of `pairs`, less its first `warm` steps: with uploads that nobody reads, and without them.

        So many experts are uploaded `together`. Both have the same experts resident; which one is first alternates.
        `bytes` were uploaded in all.
        """
        opened = self._opened[context]
        residency = opened.slots
        seconds: dict[bool, list[float]] = {False: [], True: []}
        n_bytes, pushed = 0, 0.0
        with one_free_slot(residency) as free:
            for number, steps in enumerate(pairs):
                for pushing in (bool(number % 2), not number % 2):
                    pusher = Pusher(residency, free, bytes_per_second, together)
                    began = time.perf_counter()
                    with pusher if pushing else nullcontext():
                        seconds[pushing].append(self.decode(context, steps, warm, threads)["seconds"])
                    if pushing:
                        n_bytes, pushed = n_bytes + pusher.n_bytes, pushed + time.perf_counter() - began
        return {"with": seconds[True], "without": seconds[False], "bytes": n_bytes, "seconds": pushed}

    def change_budgets(
        self, context: str, steps: Steps, threads: int, budgets: Sequence[str], seconds: float
    ) -> dict[str, Any]:
        """Decode for so many seconds, then as long with each of `budgets`, without a pause.

        Returns when every step ended, when budgets were asked for, and (time, bytes that the driver says are free,
        bytes of slots) about every 10 ms. Where the cells end, sequences begin anew.
        """
        opened = self._opened[context]
        following, residency = opened.following, opened.slots
        assert following is not None, "the request needs experts that follow the traffic"
        backend().llama_set_n_threads(opened.context.pointer, threads, threads)
        length = opened.context.n_ctx // len(steps[0])
        ends: list[float] = []
        asked: list[float] = []
        watch = MemoryWatch(lambda: self.memory()["free"], lambda: residency.statistics().device_bytes)
        with following.moving(), watch:
            began = time.perf_counter()
            while (now := time.perf_counter()) < began + seconds * (len(budgets) + 1):
                if len(asked) < len(budgets) and now >= began + seconds * (len(asked) + 1):
                    following.check()
                    asked.append(now)
                    following.adjust(budgets[len(asked) - 1])
                position = len(ends) % length
                if position == 0:
                    opened.clear()
                opened.step(steps[len(ends) % len(steps)], position)
                ends.append(time.perf_counter())
        following.check()
        return {"ends": ends, "asked": asked, "memory": watch.samples}

    def save(self, context: str) -> dict[str, Any]:
        """Keep what was learned in the directory that the context was opened with."""
        following = self._opened[context].following
        assert following is not None, "the request needs experts that follow the traffic"
        following.save()
        return {}

    def prefill(self, context: str, tokens: list[int], threads: int) -> dict[str, Any]:
        """Seconds of one prompt."""
        opened = self._opened[context]
        backend().llama_set_n_threads(opened.context.pointer, threads, threads)
        opened.clear()
        before = opened.hits()
        began = time.perf_counter()
        opened.prompt(tokens)
        seconds = time.perf_counter() - began
        hits, misses = (opened.hits() - before).tolist()
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
                {
                    "n_expert": x.n_expert,
                    "n_used": x.n_expert_used,
                    "bytes": x.expert_bytes,
                    "reason": x.reason.name,
                    "slots": x.n_slots,
                }
                for x in layers
            ],
        }


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
