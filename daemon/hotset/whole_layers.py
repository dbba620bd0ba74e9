"""Where memory is short: which layers' experts lie on their device alone, without a copy in memory; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from daemon.hotset.placement import ExpertLayer


def device_of_layer(layer: int, n_layer: int, n_gpu_layers: int, free: Sequence[int]) -> int | None:
    """The device that a layer belongs to, None: the CPU. `free` are the split's weights, one a device.

    The rule of `llama_model_base::load_tensors` (src/llama-model.cpp), where `n_layer` + 1 things are to be placed: the
    layers and the output.
    """
    n_offloaded = n_layer + 1 if n_gpu_layers < 0 else min(n_gpu_layers, n_layer + 1)
    first = n_layer + 1 - n_offloaded
    if layer < first or not free:
        return None
    ends = np.cumsum(np.array(free, np.float32), dtype=np.float32)
    place = np.float32(layer - first) / np.float32(n_offloaded)
    return min(int(np.searchsorted(ends / ends[-1], place, side="right")), len(free) - 1)


def choose(layers: Sequence[ExpertLayer], shortage: int, budgets: Mapping[str, int]) -> list[int]:
    """Layers of the model, from the last on, whose experts free `shortage` bytes of memory within the devices' bytes.

    `layers` are all sets of experts in the order of the model. Sets of one layer go together.
    """
    left = dict(budgets)
    chosen: list[int] = []
    by_layer: dict[int, list[ExpertLayer]] = {}
    for one in layers:
        by_layer.setdefault(one.key[0], []).append(one)
    for layer, sets in sorted(by_layer.items(), reverse=True):
        size, device = sum(one.bytes for one in sets), sets[0].device
        if shortage <= 0:
            break
        if size <= left.get(device, 0):
            left[device] -= size
            shortage -= size
            chosen.append(layer)
    return chosen
