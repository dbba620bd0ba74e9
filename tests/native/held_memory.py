"""A child process: steps while the driver holds back whoever takes or gives back memory for slots on another thread.

Arguments: a directory for the model, then "take" or "give". Prints the slots of a layer at the end. `vulkan_shim.c`
must be preloaded.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from pathlib import Path

from daemon.native.hotset import Residency
from tests.minigguf import write_moe
from tests.native.test_residency import N_EXPERT, N_LAYER, SIZES
from tests.residency_bench import open_bench

KINDS = {"take": (1, 4, N_EXPERT), "give": (2, N_EXPERT, 4)}
"""What is held back, and the slots of every layer before and after."""
N_STEPS = 3


def main(directory: str, what: str) -> None:
    kind, before, after = KINDS[what]
    shim = ctypes.CDLL(None)
    path = write_moe(Path(directory) / "model.gguf", experts="F32", layers="F32", vocab="F32", **SIZES)
    with open_bench("Vulkan0", path) as bench, Residency(bench.context.pointer, [before] * N_LAYER) as hs:
        for position in range(N_STEPS):  # the first steps take memory of their own
            bench.logits([(7, position, 0)])
        bench.clear()
        shim.shim_hold_memory(kind)
        resizing = threading.Thread(target=hs.resize, args=([after] * N_LAYER,), daemon=True)
        resizing.start()
        while not shim.shim_n_held():
            time.sleep(0.001)
        for position in range(N_STEPS):
            bench.logits([(7, position, 0)])
        shim.shim_hold_memory(0)
        resizing.join()
        print(hs.layer(0).n_slots)


if __name__ == "__main__":
    main(*sys.argv[1:])
