"""Who holds which KV cells: one that several sequences share counts once, until the last of them goes; pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class _Run:
    """Cells of one stretch of positions, and the sequence ids that hold them."""

    length: int
    owners: set[int] = field(default_factory=set)


class Cells:
    """Counts of `total` cells. A sequence holds runs, in order of their positions, which begin at 0."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0
        self._runs: dict[int, list[_Run]] = {}

    @property
    def free(self) -> int:
        """Cells that nobody holds."""
        return self.total - self.used

    def length(self, seq_id: int) -> int:
        """Cells that a sequence holds, shared ones too."""
        return sum(run.length for run in self._runs.get(seq_id, ()))

    def grow(self, seq_id: int, n: int) -> None:
        """A sequence takes `n` more cells at its end."""
        runs = self._runs.setdefault(seq_id, [])
        if not runs or len(runs[-1].owners) > 1:
            runs.append(_Run(0, {seq_id}))
        runs[-1].length += n
        self.used += n

    def share(self, source: int, target: int, n: int) -> None:
        """`target`, which has none, holds the first `n` cells of `source` too."""
        assert not self._runs.get(target)
        assert n <= self.length(source)
        self._split(source, n)
        taken = self._runs[target] = []
        for run in self._runs[source]:
            if n <= 0:
                break
            run.owners.add(target)
            taken.append(run)
            n -= run.length

    def release(self, seq_id: int) -> None:
        """A sequence gives up all it holds."""
        for run in self._runs.pop(seq_id, ()):
            run.owners.discard(seq_id)
            if not run.owners:
                self.used -= run.length

    def freed_by(self, seq_ids: Collection[int]) -> int:
        """Cells that would be free if all of these sequences gave theirs up."""
        gone = set(seq_ids)
        runs = {id(run): run for seq_id in gone for run in self._runs.get(seq_id, ())}
        return sum(run.length for run in runs.values() if run.owners <= gone)

    def _split(self, seq_id: int, at: int) -> None:
        """Let a run end at `at` cells of a sequence, for all that hold it."""
        for run in self._runs[seq_id]:
            if at <= 0:
                return
            if at < run.length:
                rest = _Run(run.length - at, set(run.owners))
                run.length = at
                for owner in run.owners:
                    held = self._runs[owner]
                    held.insert(held.index(run) + 1, rest)
                return
            at -= run.length
