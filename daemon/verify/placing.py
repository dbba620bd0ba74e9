"""Puts experts into slots at random, to see whether the numbers stay the same."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from daemon.native.hotset import Layer, Move, Reason, Residency, ResidencyError, Status

_RESIZE_EVERY = 6
_SHARES = (0.0, 0.25, 0.5, 1.0)
"""Slots that a layer may get while residency changes, as a share of its experts: cold, partial, full."""


def managed(residency: Residency) -> list[Layer]:
    """The layers whose experts can have slots."""
    return [layer for layer in residency.layers() if layer.reason is Reason.MANAGED]


def resident_share(residency: Residency) -> float:
    """Published experts by all experts of managed layers."""
    layers = managed(residency)
    return sum(layer.n_resident for layer in layers) / sum(layer.n_expert for layer in layers)


def give_slots(residency: Residency, share: float) -> None:
    """Empty slots for this share of each managed layer's experts; at least one where it is above 0.

    Raises:
        ResidencyError: the device has too little memory; then no layer has slots.
    """
    residency.resize([0] * residency.n_layers)
    slots = [0] * residency.n_layers
    for layer in managed(residency):
        slots[layer.index] = max(1, round(layer.n_expert * share)) if share > 0 else 0
    residency.resize(slots)


def fill(residency: Residency, layers: Sequence[Layer], random: np.random.Generator) -> None:
    """An expert chosen at random for every slot of these layers that has none."""
    moves: list[Move] = []
    for layer in layers:
        owners = residency.resident(layer.index)
        free = [slot for slot, owner in enumerate(owners) if owner < 0]
        others = random.permutation(sorted(set(range(layer.n_expert)) - set(owners)))
        moves += [(layer.index, slot, int(expert)) for slot, expert in zip(free, others, strict=False)]
    residency.stage_all(moves)
    residency.publish(moves)


class Churn:
    """Residency that changes at random before every step, while experts for the next change are uploaded.

    What is resident in which step depends on the seed alone: a thread uploads while a step is computed, and what it
    uploaded is published before the next.
    """

    def __init__(self, residency: Residency, random: np.random.Generator, share: float) -> None:
        self._residency, self._random = residency, random
        self._share = share
        self._moves: list[Move] = []
        self._thread: threading.Thread | None = None
        self._failure: ResidencyError | None = None
        self.shares: list[float] = []
        """Of resident experts in each step."""

    def __call__(self, step: int) -> None:
        """Change what is resident before step number `step`."""
        self._publish_uploaded()
        if step % _RESIZE_EVERY == _RESIZE_EVERY - 1:
            self._resize()
        self.shares.append(resident_share(self._residency))
        self._moves = self._choose()
        self._residency.publish([(index, slot, -1) for index, slot, _ in self._moves if self._holds(index, slot)])
        self._thread = threading.Thread(target=self._upload, name="upload")
        self._thread.start()

    def close(self) -> None:
        """Wait for the upload that may still run."""
        self._publish_uploaded()

    def _publish_uploaded(self) -> None:
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        if self._failure is not None:
            raise self._failure
        self._residency.publish(self._moves)

    def _upload(self) -> None:
        try:
            self._residency.stage_all(self._moves)
        except ResidencyError as error:
            self._failure = error

    def _resize(self) -> None:
        """Layers become cold, partial or full, as far as the slots given at first allow."""
        layers = managed(self._residency)
        budget = round(self._share * sum(layer.n_expert for layer in layers))
        slots = [-1] * self._residency.n_layers
        for layer in self._random.permutation(np.array(layers, dtype=object)):
            slots[layer.index] = min(budget, round(layer.n_expert * float(self._random.choice(_SHARES))))
            budget -= slots[layer.index]
        try:
            self._residency.resize(slots)
        except ResidencyError as error:
            if error.refusal is not Status.NO_MEMORY:  # old and new slots are held together for a moment
                raise
        whole = [layer for layer in managed(self._residency) if layer.n_slots == layer.n_expert]
        fill(self._residency, whole, self._random)

    def _choose(self) -> list[Move]:
        """For about half of the layers that have slots, one slot and an expert that is not resident."""
        moves: list[Move] = []
        for layer in managed(self._residency):
            owners = self._residency.resident(layer.index) if layer.n_slots else []
            others = sorted(set(range(layer.n_expert)) - set(owners))
            if not owners or not others or self._random.random() < 0.5:
                continue
            free = [slot for slot, owner in enumerate(owners) if owner < 0]
            slot = self._random.choice(free or len(owners))
            moves.append((layer.index, int(slot), int(self._random.choice(others))))
        return moves

    def _holds(self, index: int, slot: int) -> bool:
        return self._residency.resident(index)[slot] >= 0
