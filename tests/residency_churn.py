"""Residency that never rests: a thread that stages, publishes and resizes at random while others decode."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np

from daemon.native.hotset import Residency

STAGES_PER_CHANGE = 14
STAYS_EMPTY = 0.3
"""How often a slot gets no expert, so that layers do not fill up."""


@dataclass
class Amount:
    """How often something was done, or is to be done."""

    stages: int = 0
    publishes: int = 0
    resizes: int = 0

    def reaches(self, goal: Amount) -> bool:
        """Whether nothing of the goal is left."""
        return self.stages >= goal.stages and self.publishes >= goal.publishes and self.resizes >= goal.resizes


class Churn(threading.Thread):
    """Reaches `goal`, or goes on until `stop` if there is none; `done` is what was done so far.

    `failure` is what ended it before its time.
    """

    def __init__(
        self, hs: Residency, goal: Amount | None = None, *, publishes_per_resize: int = 50, seed: int = 1
    ) -> None:
        super().__init__(name="churn")
        self.done = Amount()
        self.failure: BaseException | None = None
        self._hs, self._goal = hs, goal
        self._random = np.random.default_rng(seed)
        self._stop_asked = threading.Event()  # Thread has a `_stop`
        self._layers = hs.layers()
        self._publishes_per_resize = publishes_per_resize

    def stop(self) -> None:
        """No more changes; the one that is being made still needs a boundary."""
        self._stop_asked.set()

    def run(self) -> None:
        try:
            while not self._stop_asked.is_set() and not (self._goal and self.done.reaches(self._goal)):
                self._change()
        except BaseException as failure:  # noqa: BLE001
            self.failure = failure

    def _change(self) -> None:
        """One layer's slot gets another expert, after others were staged there and not taken; or none."""
        layer = self._layers[self._random.integers(len(self._layers))]
        owners = self._hs.resident(layer.index)
        slot = int(self._random.integers(len(owners)))
        if owners[slot] >= 0:
            self._publish((layer.index, slot, -1))
            owners[slot] = -1
        others = sorted(set(range(layer.n_expert)) - set(owners))
        for expert in self._random.choice(others, STAGES_PER_CHANGE):
            self._hs.stage(layer.index, int(expert), slot)
            self.done.stages += 1
        if self._random.random() >= STAYS_EMPTY:
            self._publish((layer.index, slot, int(expert)))
        if self.done.publishes >= self._publishes_per_resize * (self.done.resizes + 1):
            self._resize()

    def _publish(self, move: tuple[int, int, int]) -> None:
        self._hs.publish([move])
        self.done.publishes += 1

    def _resize(self) -> None:
        """Some layers keep their slots; at least one slot each, up to all experts."""
        slots = [int(self._random.integers(1, layer.n_expert + 1)) for layer in self._layers]
        keep = self._random.random(len(slots)) < 0.3
        self._hs.resize([-1 if kept else n for kept, n in zip(keep, slots, strict=True)])
        self.done.resizes += 1
