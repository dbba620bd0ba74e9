"""What a device has free, and what slots take of it, sampled on a thread while a context decodes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

PERIOD_SECONDS = 0.01


class MemoryWatch:
    """`samples` are (perf_counter, bytes free as the driver says, bytes of slots); a context manager."""

    def __init__(self, free: Callable[[], int], held: Callable[[], int]) -> None:
        self.samples: list[tuple[float, int, int]] = []
        self._free, self._held = free, held
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory", daemon=True)

    def _run(self) -> None:
        while True:
            held = self._held()
            self.samples.append((time.perf_counter(), self._free(), held))
            if self._stop.wait(PERIOD_SECONDS):
                return

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
