"""Uploads into slots that no step reads, on a thread of their own: what moving bytes costs a context that decodes."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

from daemon.errors import HotsetError
from daemon.hotset.policy import Pace
from daemon.native.hotset import Residency, ResidencyError

_BURSTS = 2
"""So many uploads may follow each other at once where the thread was late."""

Free = tuple[int, int, tuple[int, ...]]
"""A layer, its free slot, and the experts that are not resident in it."""


@contextmanager
def one_free_slot(residency: Residency) -> Iterator[list[Free]]:
    """Takes the expert of the last used slot out of every layer with slots, and brings all of them back at the end.

    Raises:
        HotsetError: there is no resident expert.
    """
    taken: list[tuple[int, int, int]] = []
    free: list[Free] = []
    for index in range(residency.n_layers):
        used = [(slot, expert) for slot, expert in enumerate(residency.resident(index)) if expert >= 0]
        if used:
            slot, expert = used[-1]
            staying = {one for _, one in used[:-1]}
            others = (one for one in range(residency.layer(index).n_expert) if one not in staying)
            taken.append((index, slot, expert))
            free.append((index, slot, tuple(others)))
    if not taken:
        raise HotsetError("no expert is resident, so no slot can be made free")
    residency.publish((index, slot, -1) for index, slot, _ in taken)
    try:
        yield free
    finally:
        residency.stage_all(taken)
        residency.publish(taken)


class Pusher:
    """Uploads experts into the free slots, some `together`, `bytes_per_second` on average; a context manager.

    Nothing is published, so every step computes what it would without. `n_bytes` are those uploaded so far.
    """

    def __init__(self, residency: Residency, free: Sequence[Free], bytes_per_second: float, together: int = 1) -> None:
        self.n_bytes = 0
        self._residency, self._rate = residency, bytes_per_second
        self._sizes = [layer.expert_bytes for layer in residency.layers()]
        self._together = min(together, len(free))
        self._most = self._together * max(self._sizes[index] for index, _, _ in free)
        self._next = itertools.cycle([(index, slot, itertools.cycle(experts)) for index, slot, experts in free])
        self._stop = threading.Event()
        self._fault: ResidencyError | None = None
        self._thread = threading.Thread(target=self._run, name="pusher", daemon=True)

    def _run(self) -> None:
        pace = Pace(self._rate, float(_BURSTS * self._most))
        pace.spend(pace.left)
        last = time.perf_counter()
        try:
            while not self._stop.is_set():
                now = time.perf_counter()
                pace.earn(now - last)
                last = now
                if pace.left < self._most:
                    self._stop.wait((self._most - pace.left) / self._rate)
                    continue
                places = itertools.islice(self._next, self._together)
                moves = [(index, slot, next(experts)) for index, slot, experts in places]
                self._residency.stage_all(moves)
                n_bytes = sum(self._sizes[index] for index, _, _ in moves)
                self.n_bytes += n_bytes
                pace.spend(n_bytes)
        except ResidencyError as error:
            self._fault = error

    def __enter__(self) -> Pusher:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        if self._fault is not None and error is None:
            raise self._fault
