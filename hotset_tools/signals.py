"""Signals that mean the end, for commands that have something to finish."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager


@contextmanager
def calling(on_signal: Callable[[], None], numbers: Sequence[signal.Signals]) -> Iterator[None]:
    """Call `on_signal` for each of these signals within; one that is ignored stays so, as under nohup."""
    heeded = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda *_: on_signal()) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
