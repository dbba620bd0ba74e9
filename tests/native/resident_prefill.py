"""A child process: the same prompt and steps on a Vulkan device at several residencies; a JSON line for each.

Arguments: a directory for the model, then modes; the first is "stock" and the others are compared with it. Each has a
context of its own. `vulkan_shim.c` must be preloaded: it counts what the backend gives to the driver.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from daemon.native.hotset import Residency
from tests.minigguf import write_moe
from tests.native.test_residency import N_EXPERT, N_LAYER, SIZES, every
from tests.residency_bench import Bench, Logits, fill, kl, open_bench

N_PROMPT, N_STEPS = 40, 4
SLOTS = {"zero": 8, "half": 8, "blocks": 8, "full": N_EXPERT}
RESIDENT = {"zero": {}, "half": every(8), "full": every(N_EXPERT)}
RESIDENT["blocks"] = {i: [0, 1, 2, 3, 8, 9, 10, 11] for i in range(N_LAYER)}
"""Experts of each layer; in blocks, those between are copied in one piece that is large enough for the other queue."""
COUNTED = ("submissions", "semaphore_waits", "fence_waits", "held_back", "fills")
Counts = dict[str, dict[str, int]]
"""Phase -> what the driver was given in it, by `COUNTED`."""


@contextmanager
def counted(counts: Counts, phase: str) -> Iterator[None]:
    before = _now()
    yield
    counts[phase] = {key: now - then for key, now, then in zip(COUNTED, _now(), before, strict=True)}


def _now() -> list[int]:
    out = (ctypes.c_ulong * len(COUNTED))()
    ctypes.CDLL(None).shim_counts(out)
    return list(out)


def walk(bench: Bench, counts: Counts) -> Logits:
    for shape in range(2):  # the first step of each shape has work of its own
        bench.logits([(5 * i % 500, i, 1) for i in range(N_PROMPT)][:: 1 if shape == 0 else N_PROMPT])
        bench.clear()
    with counted(counts, "prompt"):
        rows = [bench.logits([(7 * i % 500, i, 0) for i in range(N_PROMPT)])]
    rows.append(bench.logits([(9, N_PROMPT, 0)]))
    with counted(counts, "steps"):
        rows += [bench.logits([(11 * i % 500, N_PROMPT + i, 0)]) for i in range(1, N_STEPS + 1)]
    rows.append(bench.logits([(13 * i % 500, N_PROMPT + N_STEPS + 1 + i, 0) for i in range(12)]))
    return np.concatenate(rows)


def logits(path: Path, mode: str, counts: Counts) -> Logits:
    with open_bench("Vulkan0", path, load="none") as bench:  # pinned: the device copies by itself
        if mode == "stock":
            return walk(bench, counts)
        with Residency(bench.context.pointer, [SLOTS[mode]] * N_LAYER) as hs:
            fill(hs, RESIDENT[mode])
            return walk(bench, counts)


def main(directory: str, modes: list[str]) -> None:
    path = write_moe(Path(directory) / "model.gguf", experts="F32", layers="F32", vocab="F32", **SIZES)
    stock: Logits | None = None
    for mode in modes:
        counts: Counts = {}
        seen = logits(path, mode, counts)
        stock = seen if stock is None else stock
        difference = float(np.abs(seen - stock)[:N_PROMPT].max())
        line = {"mode": mode, "max_abs_prefill": difference, "kl_decode": float(kl(stock, seen).max())}
        print(json.dumps(line | {"counts": counts}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
