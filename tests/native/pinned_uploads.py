"""A child process: experts are staged on a Vulkan device from weights that were loaded in one way or another.

Arguments: a directory for the model, then settings of model.load. A JSON line for each: what the driver was given while
all experts, of 512 KiB a tensor, were staged together, and how far logits are from stock's then.
`vulkan_shim.c` must be preloaded.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from daemon.native.hotset import Residency
from tests.minigguf import write_moe
from tests.native.resident_prefill import Counts, counted
from tests.residency_bench import kl, open_bench

N_EXPERT = 4
SIZES: dict[str, Any] = {"n_layer": 2, "n_embd": 512, "n_head": 4, "n_head_kv": 2, "head_size": 128, "n_vocab": 512}
SIZES |= {"n_expert": N_EXPERT, "n_expert_used": 2, "n_ff": 256}
TOKENS = [(7, 0, 0)]


def stage(path: Path, load: str) -> dict[str, Any]:
    counts: Counts = {}
    with open_bench("Vulkan0", path, load=load) as bench:
        stock = bench.logits(TOKENS)
        bench.clear()
        moves = [(layer, expert, expert) for layer in range(SIZES["n_layer"]) for expert in range(N_EXPERT)]
        with Residency(bench.context.pointer, [N_EXPERT] * SIZES["n_layer"]) as hs:
            with counted(counts, "stage"):
                hs.stage_all(moves)
            hs.publish(moves)
            seen = bench.logits(TOKENS)
    return counts["stage"] | {"load": load, "kl": float(kl(stock, seen).max())}


def main(directory: str, loads: list[str]) -> None:
    path = write_moe(Path(directory) / "model.gguf", experts="F32", layers="F32", vocab="F32", **SIZES)
    for load in loads:
        print(json.dumps(stage(path, load)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
