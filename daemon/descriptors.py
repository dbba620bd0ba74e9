"""File descriptors: as many as the system gives, and one line when they run out."""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Callable
from typing import Any

MOST = 65_536
QUIET_SECONDS = 10.0
_RUN_OUT = "socket.accept() out of system resource"

log = logging.getLogger("hotset.descriptors")


def raise_limit() -> None:
    """Clients that connect and say nothing should find no end soon: the soft limit is 1024 on most systems."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class LoopFaults:
    """The event loop's exception handler: what asyncio says hundreds of times a second, with a traceback each time,
    is said once in `QUIET_SECONDS`.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._said = float("-inf")

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if context.get("message") != _RUN_OUT:
            loop.default_exception_handler(context)
        elif self._clock() - self._said >= QUIET_SECONDS:
            self._said = self._clock()
            log.error("no file descriptor is left for another connection")
