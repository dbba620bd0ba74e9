"""Measures the prices of the cost model, on one context whose slots take all experts of as many layers as fit."""

from __future__ import annotations

import base64
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hotset_tools.bench.cost import Prices, Probes, Trace, bandwidth, picked_bytes, prices
from hotset_tools.bench.routing_facts import Counts, popular
from hotset_tools.bench.shelf import Place, Shelf
from hotset_tools.bench.walks import Walks

WARM, ROUNDS = 3, 3
_SHARE_OF_FREE = 0.85
PROBE_WIDTH = 8
"""Sequences that the device's bandwidth is measured with: what its matrix-vector kernels take at most."""


@dataclass(frozen=True)
class Probed:
    """Prices, and the seconds per step that they come from."""

    cost: Prices
    n_layers: int
    seconds: dict[str, float]


class Prober:
    """Probing placements of one model. `heat` [layers, n_expert] says which expert is missed least."""

    def __init__(self, shelf: Shelf, walks: Walks, heat: Counts) -> None:
        self._shelf, self._walks, self._sizes = shelf, walks, shelf.sizes
        self._order = [popular(counts) for counts in heat]
        self.n_layers = len(heat)
        self.counting = Place("ours", self.n_layers, ())
        self.place = self._probe_place()
        self._gpu: float | None = None

    @property
    def n_probed(self) -> int:
        """Layers that have slots in the probing placements."""
        return sum(slots > 0 for slots in self.place.slots or ())

    def trace(self, steps: Sequence[Sequence[int]]) -> Trace:
        """What each step picks; decoded where that is quickest."""
        self._fill(0)
        reply = self._shelf.ask(self.place, "trace", steps=steps)
        return np.frombuffer(base64.b64decode(reply["counts"]), np.uint8).reshape(reply["shape"])

    def measure(self, n_sequences: int, threads: int) -> Probed:
        """The prices for steps of `n_sequences` tokens."""
        n_steps = 10 if n_sequences <= 4 else 5  # steps of many sequences without residents take long
        steps = self._walks.steps(WARM + n_steps, n_sequences, 9000 + n_sequences)
        trace = self.trace(steps)[WARM:]
        times: dict[str, list[float]] = {"cold": [], "full": [], "nearly": [], "empty": []}
        for _ in range(ROUNDS):
            for name, missing in (("full", 0), ("nearly", 1), ("empty", None)):
                self._fill(missing)
                times[name].append(self._seconds(self.place, steps, threads))
            times["cold"].append(self._seconds(self.counting, steps, threads))
        seconds = {name: statistics.median(values) for name, values in times.items()}
        picked, missed = self._picked(trace), self._missed(trace)
        probes = Probes(self.n_layers, self.n_probed, **seconds, picked=picked, missed=missed)
        return Probed(prices(probes, self._gpu_bandwidth(threads)), self.n_probed, seconds)

    def _gpu_bandwidth(self, threads: int) -> float:
        """From steps of several sequences: with the same token in each they read fewer experts."""
        if self._gpu is None:
            different = self._walks.steps(WARM + 10, PROBE_WIDTH, 9500)
            same = [[step[0]] * PROBE_WIDTH for step in different]
            self._fill(0)
            more, less = (self._picked(self.trace(steps)[WARM:]) for steps in (different, same))
            gaps = [
                self._seconds(self.place, different, threads) - self._seconds(self.place, same, threads)
                for _ in range(2 * ROUNDS + 1)
            ]
            self._gpu = bandwidth((more - less) * self.n_probed, statistics.median(gaps))
        return self._gpu

    def _missed(self, trace: Trace) -> float:
        """Bytes of the experts that `nearly` lacks, mean over steps and layers."""
        lacking = np.zeros(trace.shape[1:], bool)
        lacking[np.arange(self.n_layers), [order[-1] for order in self._order]] = True
        return self._picked(trace * lacking)

    def _picked(self, trace: Trace) -> float:
        return picked_bytes(trace, self._sizes.expert_bytes)

    def _fill(self, missing: int | None) -> None:
        """Make all experts but the `missing` least popular resident in the layers with slots; None: no expert."""
        slots = self.place.slots or ()
        kept = [order[: len(order) - missing] if missing is not None else [] for order in self._order]
        experts = [wanted if n else [] for n, wanted in zip(slots, kept, strict=True)]
        self._shelf.ask(self.place, "place", experts=experts)

    def _seconds(self, place: Place, steps: Sequence[Sequence[int]], threads: int) -> float:
        """Per step."""
        reply = self._shelf.ask(place, "decode", steps=steps, warm=WARM, threads=threads)
        return float(reply["seconds"]) / (len(steps) - WARM)

    def _probe_place(self) -> Place:
        """Slots for all experts of the last layers, as many layers as the device has room for now."""
        counts = [len(order) for order in self._order]
        free = self._shelf.device_free() * _SHARE_OF_FREE or math.inf
        slots = [0] * self.n_layers
        for layer in reversed(range(self.n_layers)):
            slots[layer] = counts[layer]
            if self._sizes.slab_bytes(slots) > free:
                slots[layer] = 0
                break
        return Place("ours", self.n_layers, tuple(slots))
