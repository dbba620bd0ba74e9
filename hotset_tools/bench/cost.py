"""The cost model that measurements are held against. Pure.

A step takes, summed over the layers, g + (p if the layer is partial) + max(GPU bytes / GPU bandwidth, CPU bytes /
CPU bandwidth). Bytes are those of the distinct experts that the step picks in the layer, on either side. All prices are
measured in the same run, for the same number of sequences and threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Trace = npt.NDArray[np.uint8]
"""How often each step picks each expert, [n_steps, layers, n_expert]."""


@dataclass(frozen=True)
class Prices:
    """Seconds per layer and step, bytes per second. `cold` is upstream's hand-over to the CPU."""

    fixed: float
    partial: float
    cold: float
    gpu_bandwidth: float
    cpu_bandwidth: float


@dataclass(frozen=True)
class Probes:
    """Measured seconds per step of the probing placements, and the bytes that a step picks in one layer (mean).

    `n_probed` layers had slots in the last three, all others none. `nearly` has all experts resident but one, so
    `missed` bytes of a layer were still read by the CPU; `empty` has none resident.
    """

    n_layers: int
    n_probed: int
    cold: float
    full: float
    nearly: float
    empty: float
    picked: float
    missed: float


def prices(probes: Probes, gpu_bandwidth: float) -> Prices:
    """Solve the model for its prices.

    Without residents the layer waits for the CPU alone; with nearly all of them for the longer of what is left to the
    CPU and the device's work. Nearly is p dearer than full, and full is g and the device's work.
    """
    layers = probes.n_probed
    device = probes.picked / gpu_bandwidth
    saved = max(1e-9, (probes.empty - probes.nearly) / layers)
    cpu = probes.picked / (saved + device)
    if probes.missed / cpu > device:
        cpu = max(1.0, probes.picked - probes.missed) / saved
    partial = max(0.0, (probes.nearly - probes.full) / layers - max(0.0, probes.missed / cpu - device))
    hand_over = max(0.0, (probes.cold - probes.full) / layers - probes.picked / cpu + device)
    others = (probes.n_layers - layers) * (hand_over + probes.picked / cpu)
    fixed = max(0.0, (probes.full - others - layers * device) / probes.n_layers)
    return Prices(fixed, partial, hand_over, gpu_bandwidth, cpu)


def bandwidth(extra_bytes: float, extra_seconds: float) -> float:
    """Bytes per second of reading more of the same; infinite where the difference is below what can be measured."""
    return extra_bytes / extra_seconds if extra_seconds > 0 and extra_bytes > 0 else float("inf")


def picked_bytes(trace: Trace, expert_bytes: Sequence[int]) -> float:
    """Bytes of the distinct experts that a step picks in a layer, mean over steps and layers."""
    return float(((trace > 0).sum(axis=2) * np.asarray(expert_bytes)).mean())


@dataclass(frozen=True)
class Predicted:
    """Seconds per step: by the model, and by bandwidths alone."""

    model: float
    limit: float


def predict(
    trace: Trace, resident: npt.NDArray[np.bool_], partial: npt.NDArray[np.bool_], sizes: Sequence[int], cost: Prices
) -> Predicted:
    """Predict the mean step of `trace`.

    `resident` [layers, n_expert] are the experts on the device, `partial` [layers] the layers with a chain on each
    side, `sizes` bytes of an expert per layer.
    """
    used = trace > 0
    weights = np.asarray(sizes, float)
    gpu = (used & resident).sum(axis=2) * weights / cost.gpu_bandwidth
    cpu = (used & ~resident).sum(axis=2) * weights / cost.cpu_bandwidth
    limit = float(np.maximum(gpu, cpu).sum(axis=1).mean())
    n_layers = len(weights)
    return Predicted(limit + n_layers * cost.fixed + float(partial.sum()) * cost.partial, limit)


def hit_rate(trace: Trace, resident: npt.NDArray[np.bool_]) -> float:
    """The share of the picks whose expert is on the device."""
    return float((trace * resident).sum() / max(1, int(trace.sum(dtype=np.int64))))
