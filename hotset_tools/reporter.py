"""How a long command says what it is doing: rich on a terminal, plain lines elsewhere, nothing beside JSON."""

from __future__ import annotations

import sys
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

_PLAIN_STEP = 0.1


class Reporter(Protocol):
    """Where progress goes."""

    def stage(self, text: str) -> None:
        """A new part of the work begins."""

    def progress(self, done: int, total: int) -> None:
        """Steps of the current stage."""

    def note(self, text: str) -> None:
        """Something the reader should know and that stays on the screen."""

    def close(self) -> None:
        """The work is over, well or not."""


class Silent:
    """Says nothing; for --json and tests."""

    def stage(self, text: str) -> None:
        """Ignored."""

    def progress(self, done: int, total: int) -> None:
        """Ignored."""

    def note(self, text: str) -> None:
        """Ignored."""

    def close(self) -> None:
        """Nothing to close."""


class Plain(Silent):
    """Lines on stderr; progress in tenths."""

    def __init__(self) -> None:
        self._next = _PLAIN_STEP

    def stage(self, text: str) -> None:
        self._next = _PLAIN_STEP
        self.note(text)

    def progress(self, done: int, total: int) -> None:
        if total and done / total >= self._next:
            self._next = done / total + _PLAIN_STEP
            self.note(f"  {done}/{total}")

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class Bars:
    """One rich progress bar for each stage, on stderr."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bars = Progress(*columns, console=Console(stderr=True))
        self._task: TaskID | None = None
        self._bars.start()

    def stage(self, text: str) -> None:
        self._finish()
        self._task = self._bars.add_task(text, total=None)

    def progress(self, done: int, total: int) -> None:
        if self._task is not None:
            self._bars.update(self._task, completed=done, total=total)

    def note(self, text: str) -> None:
        self._bars.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._finish()
        self._bars.stop()

    def _finish(self) -> None:
        if self._task is not None:
            self._bars.stop_task(self._task)
            self._task = None


def make_reporter(*, json: bool) -> Reporter:
    """The reporter for this process."""
    if json:
        return Silent()
    return Bars() if sys.stderr.isatty() else Plain()
