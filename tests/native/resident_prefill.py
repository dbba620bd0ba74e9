"""A child process: the same prompt and steps on a Vulkan device at several residencies; a JSON line for each.

Arguments: a directory for the model, then modes; the first is "stock" and the others are compared with it. Each has a
context of its own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from daemon.native.hotset import Residency
from tests.minigguf import write_moe
from tests.native.test_residency import N_EXPERT, N_LAYER, SIZES, every
from tests.residency_bench import Bench, Logits, fill, kl, open_bench

N_PROMPT = 40
SLOTS = {"zero": 8, "half": 8, "full": N_EXPERT}


def walk(bench: Bench) -> Logits:
    rows = [bench.logits([(7 * i % 500, i, 0) for i in range(N_PROMPT)])]
    rows += [bench.logits([(11 * i % 500, N_PROMPT + i, 0)]) for i in range(4)]
    rows.append(bench.logits([(13 * i % 500, N_PROMPT + 4 + i, 0) for i in range(12)]))
    return np.concatenate(rows)


def logits(path: Path, mode: str) -> Logits:
    with open_bench("Vulkan0", path) as bench:
        if mode == "stock":
            return walk(bench)
        with Residency(bench.context.pointer, [SLOTS[mode]] * N_LAYER) as hs:
            if mode != "zero":
                fill(hs, every(SLOTS[mode]))
            return walk(bench)


def main(directory: str, modes: list[str]) -> None:
    path = write_moe(Path(directory) / "model.gguf", experts="F32", layers="F32", vocab="F32", **SIZES)
    stock = logits(path, modes[0])
    for mode in modes[1:]:
        seen = logits(path, mode)
        difference = float(np.abs(seen - stock)[:N_PROMPT].max())
        print(json.dumps({"mode": mode, "max_abs_prefill": difference, "kl_decode": float(kl(stock, seen).max())}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
