"""Who runs and who waits inside the engine: sequence ids and KV cells have one owner, this one."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from daemon.engine.ports import ContextPort
from daemon.engine.scheduler import Work, may_start
from daemon.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes that the loaded context gives: tokens a step, sequences, cells in all, cells of one sequence."""

    n_ubatch: int
    max_sequences: int
    kv_cells: int
    n_ctx: int


class Roster:
    """Sequences in order of arrival.

    Invariant: the free ids and those of `running` are a partition of [0, max_sequences); only running sequences have
    cells, `n_past` each; their sum never exceeds `kv_cells`.
    """

    def __init__(self, context: ContextPort, limits: Limits) -> None:
        self._context, self._limits = context, limits
        self._free_ids = list(range(limits.max_sequences))[::-1]
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.n_preempted = 0

    @property
    def busy(self) -> bool:
        """Whether anything runs or waits."""
        return bool(self.running or self.waiting)

    @property
    def cells_used(self) -> int:
        """KV cells that running sequences hold."""
        return sum(sequence.n_past for sequence in self.running)

    def find(self, request: str) -> Sequence | None:
        """The sequence of a request, wherever it is."""
        return next((s for s in (*self.running, *self.waiting) if s.id == request), None)

    def work(self) -> list[Work]:
        """The running sequences as the scheduler sees them."""
        return [Work(i, s.n_left, s.decoding) for i, s in enumerate(self.running)]

    def start_next(self) -> Sequence | None:
        """Give the first in line a sequence id, if one is free and so are the cells it needs."""
        if not (self.waiting and self._free_ids):
            return None
        sequence = self.waiting[0]
        more = sequence.submit.max_tokens - sequence.n_predicted
        free = self._limits.kv_cells - sum(len(s.tokens) for s in self.running)
        if not may_start(len(sequence.tokens), more, free, bool(self.running)):
            return None
        self.waiting.popleft()
        sequence.seq_id = self._free_ids.pop()
        self.running.append(sequence)
        return sequence

    def send_back(self, sequence: Sequence) -> None:
        """Take id and cells from a running sequence; it is first in line, and its tokens are computed once more."""
        self._release(sequence)
        self.waiting.appendleft(sequence)
        self.n_preempted += 1

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is, and free what it holds."""
        if sequence.seq_id >= 0:
            self._release(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        if sequence.sampler is not None:
            sequence.sampler.close()
            sequence.sampler = None

    def recount(self) -> None:
        """When nothing runs, every id must be free and without cells.

        Raises:
            RuntimeError: it is not so; better to end and start again than to lose cells bit by bit.
        """
        leaked = [i for i in range(self._limits.max_sequences) if self._context.last_position(i) >= 0]
        if leaked or len(self._free_ids) != self._limits.max_sequences:
            raise RuntimeError(f"sequence ids {leaked} still hold cells although nothing runs")

    def _release(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._context.remove(sequence.seq_id)
        self._free_ids.append(sequence.seq_id)
        sequence.seq_id, sequence.n_past = -1, 0
