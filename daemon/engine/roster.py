"""Who runs and who waits inside the engine: sequence ids and KV cells have one owner, this one."""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass

from daemon.engine.cells import Cells
from daemon.engine.parking import Lot
from daemon.engine.ports import ContextPort
from daemon.engine.scheduler import Work, may_start
from daemon.engine.sequence import Sequence
from daemon.engine.sharing import best_match
from daemon.messages import Submit

FAVOURED_AFTER = 32
"""Later ones that are started before a waiting sequence; then it counts as one of the first class, to its end."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes that the loaded context gives: tokens a step, sequences, cells in all, cells of one sequence."""

    n_ubatch: int
    max_sequences: int
    kv_cells: int
    n_ctx: int

    def problem(self, submit: Submit, n_vocab: int) -> str | None:
        """Why a request could not be computed even alone; None where it can."""
        if not submit.prompt or submit.max_tokens < 1:
            return "A prompt and room for at least one token are needed."
        if len(submit.prompt) + submit.max_tokens > self.n_ctx:
            return f"Prompt and answer need more than the {self.n_ctx} tokens of the context."
        if min(submit.prompt) < 0 or max(submit.prompt) >= n_vocab:
            return "The prompt holds a token id outside the vocabulary."
        return None


class Roster:
    """Sequences that run, in the order in which they were started, and those that wait.

    Invariant: the free ids and those of `running` are a partition of [0, max_sequences); only running sequences have
    cells, `n_past` each, shared ones counted once by `cells`; what is parked waits.
    """

    def __init__(self, context: ContextPort, limits: Limits, park_mib: int = 0) -> None:
        self._context, self._limits = context, limits
        self._free_ids = list(range(limits.max_sequences))[::-1]
        self._can_share = context.can_share
        self.cells = Cells(limits.kv_cells)
        self.lot = Lot(context, park_mib)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.n_preempted = self.n_shared = 0

    @property
    def busy(self) -> bool:
        """Whether anything runs or waits."""
        return bool(self.running or self.waiting)

    @property
    def parked(self) -> list[Sequence]:
        """What waits with its state in RAM."""
        return [sequence for sequence in self.waiting if sequence.number in self.lot]

    def find(self, request: str) -> Sequence | None:
        """The sequence of a request, wherever it is."""
        return next((s for s in (*self.running, *self.waiting) if s.id == request), None)

    def work(self) -> list[Work]:
        """The running sequences that can be computed, as the scheduler sees them."""
        urgency = self._urgency()
        return [
            Work(i, s.number, s.n_left, s.decoding, urgency[s], s.submit.client)
            for i, s in enumerate(self.running)
            if s.leader is None
        ]

    # -- starting

    def start_next(self) -> Sequence | None:
        """Give the first in line a sequence id, if it finds one and the cells it needs, or background work makes room.

        Nobody behind it is started before: small ones would keep a large one waiting for ever.
        """
        if not self.waiting:
            return None
        first = min(self.waiting, key=lambda sequence: sequence.order)
        if not self._fits(first, []) and not self._make_room_for(first):
            return None
        self.waiting.remove(first)
        self._count_passed(first)
        first.seq_id = self._free_ids.pop()
        if first.number in self.lot:
            self._resume(first)
        else:
            self._follow(first, self.running)
        self.running.append(first)
        return first

    def _fits(self, first: Sequence, gone: Several[Sequence]) -> bool:
        """Whether there are an id and cells once `gone` have left. What others know already has its cells promised."""
        stay = [sequence for sequence in self.running if sequence not in gone]
        if not (self._free_ids or gone):
            return False
        promised = sum(sequence.n_left - sequence.n_awaited for sequence in stay)
        free = self.cells.free + self.cells.freed_by([sequence.seq_id for sequence in gone]) - promised
        return may_start(len(first.tokens) - self._n_shareable(first, stay), first.n_more, free, bool(stay))

    def _n_shareable(self, first: Sequence, others: Several[Sequence]) -> int:
        if not self._can_share or first.number in self.lot:
            return 0
        match = best_match(first.tokens, [sequence.tokens for sequence in others])
        return match.n_tokens if match else 0

    def _make_room_for(self, first: Sequence) -> bool:
        """Park the youngest background sequences for an interactive one, if enough of them run."""
        if first.submit.priority != "interactive":
            return False
        urgency = self._urgency()
        background = [s for s in self.running if s.submit.priority == "background" and urgency[s] > 0]
        victims: list[Sequence] = []
        for sequence in sorted(background, key=lambda one: -one.number):
            victims.append(sequence)
            if self._fits(first, victims):
                for victim in victims:
                    self.send_back(victim)
                return True
        return False

    def _count_passed(self, started: Sequence) -> None:
        for sequence in self.waiting:
            if sequence.number < started.number:
                sequence.n_passed += 1
                sequence.favoured = sequence.favoured or sequence.n_passed >= FAVOURED_AFTER

    def _resume(self, sequence: Sequence) -> None:
        """What cannot be restored is computed once more."""
        if self.lot.resume(sequence.number, sequence.seq_id):
            sequence.n_past = sequence.n_parked
            self.cells.grow(sequence.seq_id, sequence.n_past)
        else:
            sequence.n_cached = 0
        sequence.n_parked = 0

    # -- common beginnings

    def _follow(self, sequence: Sequence, earlier: Several[Sequence]) -> None:
        """Let a sequence without cells wait for one that was started before it, where both begin alike.

        Only for earlier ones, so that nobody waits in a circle.
        """
        match = best_match(sequence.tokens, [one.tokens for one in earlier]) if self._can_share else None
        sequence.leader = earlier[match.place] if match else None
        sequence.n_awaited = match.n_tokens if match else 0

    def settle_followers(self) -> None:
        """Who has waited for a beginning that is there takes its cells; who waited for one that left looks anew."""
        for place, sequence in enumerate(self.running):
            if sequence.leader is None:
                continue
            if sequence.leader not in self.running[:place]:
                self._follow(sequence, self.running[:place])
            leader = sequence.leader
            if leader is not None and leader.n_past >= sequence.n_awaited:
                self._take_cells(sequence, leader)

    def _take_cells(self, sequence: Sequence, leader: Sequence) -> None:
        n = sequence.n_awaited
        self._context.share(leader.seq_id, sequence.seq_id, n)
        self.cells.share(leader.seq_id, sequence.seq_id, n)
        sequence.n_past = n
        sequence.n_cached = min(n, sequence.n_prompt - 1)
        self.n_shared += sequence.n_cached
        sequence.leader, sequence.n_awaited = None, 0

    def _urgency(self) -> dict[Sequence, int]:
        """The best rank of each running sequence and of all that wait for it, who come behind it in `running`."""
        urgency = {sequence: sequence.rank for sequence in self.running}
        for sequence in reversed(self.running):
            if sequence.leader in urgency:
                urgency[sequence.leader] = min(urgency[sequence.leader], urgency[sequence])
        return urgency

    # -- growing and leaving

    def computed(self, sequence: Sequence, n: int) -> int:
        """`n` more tokens of a sequence are in cells; returns how many of them are of its prompt."""
        before = min(sequence.n_past, sequence.n_prompt)
        sequence.n_past += n
        self.cells.grow(sequence.seq_id, n)
        return min(sequence.n_past, sequence.n_prompt) - before

    def last_in_line(self) -> Sequence:
        """Of what runs, the one that makes room when cells run out: of the last class, the youngest."""
        urgency = self._urgency()
        return max(self.running, key=lambda sequence: (urgency[sequence], sequence.number))

    def send_back(self, sequence: Sequence) -> None:
        """Take id and cells from a running sequence, which waits again in its place.

        Its state is parked where there is room for it; else its tokens are computed once more.
        """
        self.n_preempted += 1
        if sequence.n_past and self.lot.park(sequence.number, sequence.seq_id):
            sequence.n_parked = sequence.n_past
        else:
            sequence.n_cached = 0
        self._release(sequence)
        self.waiting.append(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is, and free what it holds."""
        if sequence.seq_id >= 0:
            self._release(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self.lot.forget(sequence.number)
        if sequence.sampler is not None:
            sequence.sampler.close()
            sequence.sampler = None

    def recount(self) -> None:
        """When nothing runs, every id must be free and without cells.

        Raises:
            RuntimeError: it is not so; better to end and start again than to lose cells bit by bit.
        """
        leaked = [i for i in range(self._limits.max_sequences) if self._context.last_position(i) >= 0]
        if leaked or len(self._free_ids) != self._limits.max_sequences or self.cells.used:
            raise RuntimeError(f"sequence ids {leaked} still hold cells although nothing runs")

    def _release(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._context.remove(sequence.seq_id)
        self.cells.release(sequence.seq_id)
        self._free_ids.append(sequence.seq_id)
        sequence.seq_id, sequence.n_past = -1, 0
        sequence.leader, sequence.n_awaited = None, 0
