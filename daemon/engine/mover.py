"""Moves experts between memory and VRAM on its own thread, while the engine decodes.

The thread owns the controller. It uploads into slots that nothing reads, and waits for boundaries between steps; the
engine never waits for it.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from daemon.engine.learnings import Keeper
from daemon.hotset.controller import EMPTY, Batch, Controller, Ids, Spread, Upload, spread
from daemon.native.hotset import Move, Residency, ResidencyError

PICTURE_SECONDS = 0.25
"""How old what `picture` shows may be while tokens are decoded."""
_EARNING_SECONDS = 0.01
"""How often a move that the pace does not allow yet is looked at again."""
_GROUPS = 8
"""Slots change for one part in so many of the layers at a time: no step waits for more, and little is held twice."""
_JOIN_SECONDS = 0.02


@dataclass(frozen=True)
class Picture:
    """The controller at one moment, for status: by layer index, and over all layers with slots."""

    hit_rates: Sequence[float] = ()
    spreads: Sequence[Spread | None] = ()
    hit_rate: float | None = None
    n_moves: int = 0
    n_tokens: int = 0
    at_rest: bool = False
    """Whether nothing is to be moved now."""


@dataclass
class Mover:
    """Everything but `run` and what it calls may be used by any thread.

    `seeds` are experts by layer index that are brought first, at full speed. `keeper` saves what is learned, once in a
    while and at the end. `synchronize` brings the context to a boundary; `stop` calls it, because a context that
    computes no more has no next one.
    """

    residency: Residency
    controller: Controller
    seeds: Mapping[int, Sequence[int]]
    clock: Callable[[], float] = time.monotonic
    keeper: Keeper | None = None
    picture: Picture = field(default_factory=Picture, init=False)
    fault: str = field(default="", init=False)
    seeded: bool = field(default=False, init=False)
    held: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self.run, name="experts", daemon=True)
        self._stopping = self._paused = False
        self._landed: list[Upload] = []
        self._last = self._pictured = self.clock()
        for index in range(self.residency.n_layers):
            self.controller.adopt(index, self.residency.resident(index))

    # -- from other threads

    def start(self) -> None:
        """Begin; a thread that cannot be started is a fault like any other."""
        try:
            self._thread.start()
        except RuntimeError:  # no memory for its stack
            self.fault = "no thread can be started"

    @property
    def running(self) -> bool:
        """Whether the thread works or waits for work."""
        return self._thread.is_alive()

    def observe(self, ids: Ids, n_sequences: int, ranks: bool = True) -> None:
        """A decode step of so many sequences chose `ids` [n_tokens, layers, top_k]; see `Controller.observe`."""
        self.post(partial(self.controller.observe, ids, n_sequences, ranks))

    def post(self, order: Callable[[], None]) -> None:
        """Let the thread do something between two turns; it may call `resize` and the controller.

        After a fault nobody does anything.
        """
        if not self.fault:
            self._inbox.put(order)

    def pause(self, paused: bool) -> None:
        """Whether to leave all experts where they are; orders are still done, and steps observed."""
        self.post(partial(setattr, self, "_paused", paused))

    def hold(self) -> None:
        """Touch nothing until `release`; `held` once that is so."""
        self.post(self._hold)

    def release(self, missing: Sequence[Move], paused: bool) -> None:
        """Look at the slots again, bring these experts back into them, and go on unless paused."""
        self.post(partial(self._release, missing, paused))

    def stop(self, synchronize: Callable[[], None]) -> None:
        """End the thread, from that of the engine."""
        self._stopping = True
        self.post(lambda: None)
        while self._thread.ident is not None and self._thread.is_alive():
            synchronize()
            self._thread.join(_JOIN_SECONDS)

    # -- the thread

    def run(self) -> None:
        """Seed, then follow the traffic until told to stop, or until something fails."""
        try:
            self._work()
        except ResidencyError as error:
            self.fault = error.message
        except Exception as error:  # noqa: BLE001 - a thread that ends in silence would be waited for
            traceback.print_exc()
            self.fault = f"{type(error).__name__}: {error}"
        while self.fault and not self._inbox.empty():
            self._inbox.get_nowait()

    def _work(self) -> None:
        self._seed()
        patience: float | None = 0
        try:
            while not self._stopping:
                self._take(patience)
                patience = self._keep(self._draw(self._turn()))
            self._take(0)  # what the last steps chose is learned too
        finally:
            if self.keeper is not None and self.seeded:  # before, slots hold only a part of what they should
                (self.keeper.close if self._stopping else self.keeper.save)()

    def _hold(self) -> None:
        self._publish(())
        self.held = True

    def _release(self, missing: Sequence[Move], paused: bool) -> None:
        for index in range(self.residency.n_layers):
            self.controller.adopt(index, self.residency.resident(index))
        self._carry_out(self.controller.refill(missing))
        self._paused, self.held = paused, False

    def resize(self, slots: Sequence[int]) -> None:
        """Give layers other numbers of slots, -1: as it is. First those that lose some, then the others.

        Raises:
            ResidencyError: the device has too little memory; layers keep what they have by then.
        """
        now = [len(self.residency.resident(index)) for index in range(self.residency.n_layers)]
        wanted = [old if new < 0 else new for old, new in zip(now, slots, strict=True)]
        self._publish(self.controller.leaving(wanted))
        fewer = [index for index, (old, new) in enumerate(zip(now, wanted, strict=True)) if new < old]
        more = [index for index, (old, new) in enumerate(zip(now, wanted, strict=True)) if new > old]
        size = max(1, -(-self.residency.n_layers // _GROUPS))
        for layers in (fewer, more):
            for start in range(0, len(layers), size):
                self._resize_group(layers[start : start + size], wanted)

    def _resize_group(self, group: Sequence[int], wanted: Sequence[int]) -> None:
        slots = [wanted[index] if index in group else -1 for index in range(self.residency.n_layers)]
        self.residency.resize(slots)
        for index in group:
            self.controller.adopt(index, self.residency.resident(index))

    def bring(self, experts: Mapping[int, Sequence[int]]) -> None:
        """These experts, by layer index, come into the slots, whatever the pace; all others of their layers leave."""
        self._publish([slot for index, wanted in experts.items() for slot in self.controller.keep(index, wanted)])
        for index, wanted in experts.items():
            self._carry_out(self.controller.seed(index, wanted))
        self._publish(())

    def _seed(self) -> None:
        for index, experts in self.seeds.items():
            self._take(0)  # budgets may have changed meanwhile
            while self.held and not self._stopping:
                self._take(None)
            if self._stopping:
                return
            self._carry_out(self.controller.seed(index, experts))
        self._publish(())
        self.seeded = not self._stopping

    def _take(self, patience: float | None) -> None:
        """Do what was posted, after waiting so many seconds for it; None: as long as it takes."""
        try:
            order = self._inbox.get(block=patience != 0, timeout=patience)
            while True:
                order()
                order = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _turn(self) -> float | None:
        """The next moves, and the publication of the last ones; how long to wait for news before the next turn."""
        now = self.clock()
        seconds, self._last = now - self._last, now
        if self.held:
            return None
        if self._paused:
            self._publish(())
            return None
        batch = self.controller.batch(seconds)
        self._carry_out(batch)
        if self._landed:
            return 0
        return _EARNING_SECONDS if batch.more else None

    def _carry_out(self, batch: Batch) -> None:
        self._publish(batch.retired)
        if batch.uploads and not self._stopping:
            self.residency.stage_all((one.layer, one.slot, one.expert) for one in batch.uploads)
            self._landed.extend(batch.uploads)

    def _publish(self, retired: Iterable[tuple[int, int]]) -> None:
        """At the next boundary the last uploads come into use and these slots' experts go back to the CPU."""
        landed, self._landed = self._landed, []
        moves = [(one.layer, one.slot, one.expert) for one in landed] + [(at, slot, EMPTY) for at, slot in retired]
        if moves:
            self.residency.publish(moves)
            self.controller.published(landed)

    def _keep(self, patience: float | None) -> float | None:
        """Save what was learned if it is time; returns how long to wait for news at most."""
        left = self.keeper.wait() if self.keeper is not None else None
        if self.keeper is None or left is None:
            return patience
        if left <= 0:
            self.keeper.save()
            return patience
        return left if patience is None else min(patience, left)

    def _draw(self, patience: float | None) -> float | None:
        """A new picture, if the last one is old and not true any more; returns how long to wait for news at most."""
        now, control, last = self.clock(), self.controller, self.picture
        at_rest = patience is None
        if (last.n_tokens, last.n_moves, last.at_rest) == (control.n_tokens, control.n_moves, at_rest):
            return patience
        due = self._pictured + PICTURE_SECONDS - now
        if due > 0:
            return due if at_rest else patience
        self._pictured = now
        layers = [int(at) for at in np.flatnonzero(control.slots)]
        self.picture = Picture(
            hit_rates=tuple(control.hit_rates().tolist()),
            spreads=tuple(spread(control.heat.values, control.serving)),
            hit_rate=control.hit_rate(layers),
            n_moves=control.n_moves,
            n_tokens=control.n_tokens,
            at_rest=at_rest,
        )
        return patience
