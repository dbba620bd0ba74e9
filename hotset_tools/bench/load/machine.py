"""How much of the machine somebody else used while a server was measured here."""

from __future__ import annotations

import os
import time

import psutil


class CpuWatch:
    """From its making on: CPU seconds of the machine, of a server with its children, and of this process.

    `pid` None: the server is elsewhere, and what others use cannot be told.
    """

    def __init__(self, pid: int | None) -> None:
        self._pid = pid
        self._began = time.perf_counter()
        self._start = self._used()

    def others(self) -> float | None:
        """Share of all processors that others kept busy since; between 0 and 1."""
        start, end = self._start, self._used()
        if start is None or end is None:
            return None
        seconds = (time.perf_counter() - self._began) * (os.cpu_count() or 1)
        return min(1.0, max(0.0, ((end[0] - start[0]) - (end[1] - start[1])) / seconds)) if seconds else None

    def _used(self) -> tuple[float, float] | None:
        """CPU seconds of the whole machine, and of what is measured."""
        if self._pid is None:
            return None
        try:
            server = psutil.Process(self._pid)
            processes = [server, *server.children(recursive=True), psutil.Process()]
            ours = sum(sum(process.cpu_times()[:2]) for process in processes)
        except psutil.Error:
            return None
        times = psutil.cpu_times()
        return sum(times) - times.idle - getattr(times, "iowait", 0.0), ours
