"""Several works for an engine that has nothing else to do, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from daemon.engine.ports import IdlePort


class IdleWorks:
    """One of them at a time; what has begun goes first, the others in their order."""

    def __init__(self, works: Sequence[IdlePort]) -> None:
        self._works = tuple(works)

    @property
    def pending(self) -> bool:
        """Whether any has a step to do."""
        return self._next() is not None

    @property
    def underway(self) -> bool:
        """Whether one has begun."""
        return any(work.underway for work in self._works)

    def step(self) -> None:
        """One step of one of them."""
        work = self._next()
        if work is not None:
            work.step()

    def interrupt(self) -> None:
        """A request came: all of them are told."""
        for work in self._works:
            work.interrupt()

    def _next(self) -> IdlePort | None:
        """The one to go on with; while one is underway that has nothing to do now, nobody else computes."""
        for work in self._works:
            if work.underway:
                return work if work.pending else None
        return next((work for work in self._works if work.pending), None)
