"""One order to put another engine in the place of the one that runs: what the next engine loads, and how it ends.

Silent and without a clock; the supervisor asks it and does what it says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal

from daemon.messages import Load

HOPELESS_LIVES = 3
"""Engines in a row that died before they were ready, after which nobody is left waiting for the next."""

Next = Literal["begin", "again", "return"]
"""After the end of an engine: the new one is tried, tried once more, or the one of before comes back."""


class Replacement:
    """Tries `load`; where no engine gets ready with it, the one of before is started again.

    `settled` is called once, and before anybody else hears of the engine that is ready: with True when the new one is,
    with False when the one of before is back or will not come either.
    """

    def __init__(self, load: Load, settled: Callable[[bool], None]) -> None:
        self._load, self._settled = load, settled
        self._n_lives = 0
        self.begun = False
        """Whether the engine that runs is no longer the one of before the order."""
        self.failed = ""
        """Why no engine got ready with the new load; from then on the one of before is wanted back."""
        self.outcome: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done when it is over: why it failed, "" when it did not. Once cancelled, nothing is called any more."""

    @property
    def trying(self) -> bool:
        """Whether the engine that runs, or the next one, is to have the new load."""
        return not self.failed

    def begin(self, before: Load) -> Load:
        """What the engine that starts now is to load; `before` is what it was before the order."""
        self.begun = True
        return self._load if self.trying else before

    def ended(self, why: str, *, refused: bool) -> Next:
        """An engine is gone; `refused` when it said itself that it cannot load."""
        if not self.begun:
            return "begin"
        if not self.trying:
            return "again"
        self._n_lives += 1
        if refused or self._n_lives >= HOPELESS_LIVES:
            self.failed = why
            return "return"
        return "again"

    def ready(self) -> None:
        """An engine takes commands that was started after the order."""
        self._end(self.failed)

    def hopeless(self, why: str) -> None:
        """The engine of before does not come back either."""
        self._end(f"{self.failed}; and the engine of before cannot be started again: {why}")

    def _end(self, why: str) -> None:
        if not self.outcome.done():
            self._settled(not why)
            self.outcome.set_result(why)
