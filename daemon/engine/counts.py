"""Selections of experts, without those that a self-test made."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from daemon.native.hotset import Layer, Residency

Counted = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class _Layer:
    """One layer's selections at one moment: by expert [n_expert], and on which side."""

    by_expert: Counted
    hits: int
    misses: int

    def __add__(self, other: _Layer) -> _Layer:
        return _Layer(self.by_expert + other.by_expert, self.hits + other.hits, self.misses + other.misses)

    def __sub__(self, other: _Layer) -> _Layer:
        return _Layer(self.by_expert - other.by_expert, self.hits - other.hits, self.misses - other.misses)


class Counts:
    """What requests selected. Between `stop` and `resume` nothing is added, and nothing that was seen goes away.

    `stop` and `resume` belong to the engine thread, at a boundary; the rest may be asked by any.
    """

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._discount = [_Layer(np.zeros(layer.n_expert, np.uint64), 0, 0) for layer in residency.layers()]
        self._stopped: list[_Layer] | None = None

    def stop(self) -> None:
        """What is selected from now on does not count."""
        self._stopped = self._raw()

    def resume(self) -> None:
        """It counts again."""
        if self._stopped is not None:
            since = zip(self._discount, self._raw(), self._stopped, strict=True)
            self._discount = [discount + (now - before) for discount, now, before in since]
            self._stopped = None

    def layers(self) -> list[Layer]:
        """Every layer, its hits and misses being those of requests."""
        layers = self._residency.layers()
        seen = [(one.hits, one.misses) for one in self._stopped or layers]
        return [
            replace(layer, hits=hits - own.hits, misses=misses - own.misses)
            for layer, (hits, misses), own in zip(layers, seen, self._discount, strict=True)
        ]

    def by_expert(self, index: int) -> Counted:
        """How often requests selected each expert of a layer, [n_expert]."""
        stopped = self._stopped
        raw = stopped[index].by_expert if stopped else self._residency.counts(index)
        return raw - self._discount[index].by_expert

    def _raw(self) -> list[_Layer]:
        both = zip(self._residency.layers(), self._residency.all_counts(), strict=True)
        return [_Layer(counts, layer.hits, layer.misses) for layer, counts in both]
