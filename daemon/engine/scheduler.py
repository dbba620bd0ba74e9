"""What the next step computes; pure: what runs, prices and what was computed before go in, a plan comes out.

Decode goes first: every sequence that has a sampled token gets its row. How much of a prompt a step takes beside them
follows from measured prices (docs/scheduling.md):

- Pieces of prompts fill each step up to the target, so many times the step without them, where prompts are read fast
  enough so: at their share of the speed that whole ubatches have.
- Where they are not, because a step has a high price of its own (experts that are copied to the device) or tokens cost
  more in small steps, larger pieces alternate with decode steps, which keep their share of the time.

Where nothing decodes that is as urgent as the prompts are, a step is as large as it can be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile

from daemon.engine.step_prices import FIRST_TRIED, StepPrices
from daemon.engine.turns import Prompt, Turns
from daemon.hotset.controller import WIDEST_PARTIAL
from daemon.messages import Scheduling

HEADROOM = 64
"""Cells beyond its tokens that a sequence must find free to start, so that it is not sent back at once."""
LAST_RANK = 2
"""Of background work: what it decodes may wait for prompts of a better class."""
SMALLEST_PIECE = 8
"""Tokens of prompts that a step takes at least, whatever the target says: a prompt must come to its end. Fewer where it
would leave the hot path for them."""
TIMED_AGAIN = 64
"""Steps after which one without prompts is due, whose price is what the target goes by."""
TRIED_AGAIN = 16
"""Whole ubatches after which a small one tells what such a step costs whatever its tokens."""
NEARLY = 0.8
"""Of their share of speed, what prompts must have for pieces to be kept within the target."""
ECONOMICAL = 1.125
"""What a token may add to a step, against one of a whole ubatch, for smaller ones to alternate with decode steps."""
_EXACT = 1e-9


class Kind(StrEnum):
    """Why a step has its size."""

    DECODE = "decode"
    FULL = "full"
    """Nothing decodes that prompts would have to leave time for: background answers have no claim on better prompts."""
    PIECES = "pieces"
    """Pieces that fill the step up to the target."""
    WHOLE = "whole"
    """A whole ubatch, which decode steps make up for."""


@dataclass(frozen=True, slots=True)
class Work:
    """One running sequence as the scheduler sees it.

    `index` is its place in the caller's list, `number` tells it from others; `n_left` tokens are not computed yet.
    """

    index: int
    number: int
    n_left: int
    decoding: bool
    rank: int = 1
    client: str = ""

    @property
    def prompt(self) -> Prompt:
        """What it is where turns are taken."""
        return Prompt(self.number, self.n_left, self.rank, self.client)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """(index, tokens) pairs in the order of their rows; the first `n_decode` are single generated tokens."""

    parts: tuple[tuple[int, int], ...]
    n_decode: int
    n_prompt: int
    kind: Kind

    @property
    def n_tokens(self) -> int:
        """Rows of the step."""
        return self.n_decode + self.n_prompt


class Scheduler:
    """Plans steps of at most `n_ubatch` tokens. `plan` changes nothing; `computed` tells of a step that is over."""

    def __init__(self, n_ubatch: int, settings: Scheduling | None = None) -> None:
        self.settings = settings or Scheduling()
        self.prices = StepPrices()
        self._n_ubatch = n_ubatch
        self._turns = Turns()
        self._owed = 0.0
        """Seconds of decode steps that whole ubatches have to be made up for with."""
        self._debtors: dict[int, int] = {}
        """The prompts in these, and their classes: others of such a class do not wait for that."""
        self._n_whole = 0
        """Such steps since a small one was tried."""
        self._first = 0
        """Of the sequences that decode, where a step cannot take all of them."""

    def plan(self, running: Sequence[Work]) -> StepPlan:
        """The next step for what runs; without parts if nothing does."""
        reading = [work for work in running if not work.decoding]
        kept = min(SMALLEST_PIECE, self._n_ubatch // 4) if reading else 0
        decoding = self._rows([work for work in running if work.decoding], kept)
        parts = [(work.index, 1) for work in decoding]
        kind, left = self._room(running, decoding, reading)
        places = {work.number: work.index for work in reading}
        order = self._turns.order([work.prompt for work in reading])
        if kind is Kind.WHOLE and self._owed > 0:
            order = self._free_of_debt(decoding, order, left)
        if kind in (Kind.FULL, Kind.WHOLE):
            left = self._in_time(order, len(decoding), left)
        for prompt in order:
            if left <= 0:
                break
            n = min(prompt.n_left, left)
            parts.append((places[prompt.number], n))
            left -= n
        n_prompt = sum(n for _, n in parts[len(decoding) :])
        return StepPlan(tuple(parts), len(decoding), n_prompt, kind if n_prompt else Kind.DECODE)

    def computed(self, plan: StepPlan, running: Sequence[Work], seconds: float) -> None:
        """`plan`, which was made for `running`, was computed in so many seconds."""
        self.prices.observe(plan.n_decode, plan.n_prompt, seconds)
        numbers = {work.index: work.number for work in running}
        tokens = {numbers[index]: n for index, n in plan.parts[plan.n_decode :]}
        self._turns.computed([work.prompt for work in running if not work.decoding], tokens)
        if plan.kind is Kind.WHOLE:
            self._owe(running, tokens, seconds, plan.n_decode)
            self._n_whole = self._n_whole + 1 if plan.n_prompt > FIRST_TRIED else 0
        elif plan.kind is Kind.DECODE:
            self._owed = max(0.0, self._owed - seconds)
        elif plan.kind is Kind.FULL:
            self._owed = 0.0
        if not self._owed:
            self._debtors.clear()
        self._first += plan.n_decode

    def _owe(self, running: Sequence[Work], tokens: Mapping[int, int], seconds: float, width: int) -> None:
        """Never more than what follows one ubatch of the largest size: short prompts might add to it without end."""
        share = self._share(running)
        most = max(seconds, self.prices.mixed(self._n_ubatch, width))
        self._owed = min(self._owed + seconds * share / (1 - share), most * share / (1 - share))
        self._debtors |= {work.number: work.rank for work in running if work.number in tokens}

    def _free_of_debt(self, decoding: Sequence[Work], order: Sequence[Prompt], room: int) -> list[Prompt]:
        """Prompts that may be read although decode is to be made up for: short ones would wait for what others took.

        Of the answers' class or a better one, and as short as one step can read, or better than all that owe. Only
        those whose turn is before that of any that has to wait, who would else wait as long as short ones come.
        """
        best = min((work.rank for work in decoding), default=LAST_RANK)
        owing = min(self._debtors.values(), default=LAST_RANK)

        def free(prompt: Prompt) -> bool:
            short = prompt.n_left <= room or prompt.rank < owing
            return prompt.number not in self._debtors and prompt.rank <= best and short

        return list(takewhile(free, order))

    def _rows(self, decoding: list[Work], kept: int) -> list[Work]:
        """All of them, or as many as a step takes that keeps a few rows for prompts, in turn."""
        most = self._n_ubatch - kept
        if len(decoding) <= most:
            return decoding
        first = self._first % len(decoding)
        return (decoding[first:] + decoding[:first])[:most]

    def _room(self, running: Sequence[Work], decoding: Sequence[Work], reading: Sequence[Work]) -> tuple[Kind, int]:
        """Tokens of prompts that the next step takes, and why."""
        if not reading:
            return Kind.DECODE, 0
        width = len(decoding)
        all_of_it = self._n_ubatch - width
        urgent = min(work.rank for work in reading)
        if all(work.rank == LAST_RANK > urgent for work in decoding):
            return Kind.FULL, all_of_it
        if self.prices.age(width) > TIMED_AGAIN:
            return Kind.DECODE, 0
        n_left = min(all_of_it, sum(work.n_left for work in reading))
        if 0 < (untried := self.prices.untried - width) <= n_left:
            return Kind.WHOLE, untried
        piece = self._piece(width, n_left)
        enough = NEARLY * (1 - self._share(running)) * self._speed(all_of_it, width)
        if piece >= n_left or self._speed(piece, width) >= enough:
            narrow = WIDEST_PARTIAL - width
            return Kind.PIECES, max(piece, min(SMALLEST_PIECE, narrow if 0 < piece <= narrow else all_of_it))
        small = self._n_whole >= TRIED_AGAIN or not self.prices.knows_small
        return Kind.WHOLE, min(FIRST_TRIED, all_of_it) if small else self._economical(width, all_of_it, n_left)

    def _share(self, running: Sequence[Work]) -> float:
        """Of the time, what answers keep where prompts alternate with them: less, the more prompts there are.

        Each prompt of a class that is as good as the best of the answers counts as one of two does in the settings.
        """
        best = min((work.rank for work in running if work.decoding), default=LAST_RANK)
        n_prompts = max(1, sum(work.rank <= best for work in running if not work.decoding))
        share = self.settings.decode_share
        return share / (share + (1 - share) * n_prompts)

    def _in_time(self, order: Sequence[Prompt], width: int, most: int) -> int:
        """How much of `most` tokens a step takes, so that what follows the prompts which it ends does not delay them.

        Not longer than the target's factor; all of it where no prompt ends, or all of them do.
        """
        ending = 0
        for prompt in order:
            if ending + prompt.n_left > most:
                break
            ending += prompt.n_left
        else:
            return most
        if not ending:
            return most
        seconds = self.settings.target_latency * self.prices.mixed(width + ending, width)
        return max(ending, max(self.prices.widest(seconds, width, width + most)) - width)

    def _target(self, width: int) -> float:
        return self.settings.target_latency * self.prices.decode(width)

    def _piece(self, width: int, n_left: int) -> int:
        """Tokens of prompts that keep a step within the target; 0: not even one does.

        A step that leaves the hot path pays only where it reads faster than one that stays on it.
        """
        sizes = [n for n in self.prices.widest(self._target(width), width, width + n_left) if n]
        best = max(sizes, key=lambda n: (n - width) / max(self.prices.mixed(n, width), _EXACT), default=width)
        return best - width

    def _speed(self, n_prompt: int, width: int) -> float:
        """Tokens of prompts a second, with so many in each step."""
        return n_prompt / max(self.prices.mixed(width + n_prompt, width), _EXACT)

    def _economical(self, width: int, most: int, n_left: int) -> int:
        """The smallest ubatch, halving `most`, whose tokens add hardly more to a step than those of a whole one.

        No larger than what is left, and on the hot path if that costs hardly more.
        """
        n, limit = most, ECONOMICAL * self._extra(width, most)
        while n // 2 >= max(SMALLEST_PIECE, WIDEST_PARTIAL + 1 - width) and self._extra(width, n // 2) <= limit:
            n //= 2
        n, narrow = min(n, n_left), WIDEST_PARTIAL - width
        return narrow if 0 < narrow < n and self._extra(width, narrow) <= ECONOMICAL * self._extra(width, n) else n

    def _extra(self, width: int, n_prompt: int) -> float:
        """Seconds that each of so many tokens adds to a step that decodes."""
        return (self.prices.mixed(width + n_prompt, width) - self.prices.decode(width)) / n_prompt


def may_start(n_tokens: int, max_more: int, free_cells: int, others: bool) -> bool:
    """Whether a sequence that needs cells for `n_tokens` and for at most `max_more` new ones may take a free id.

    Alone (`others` false) it only has to fit as it is.
    """
    headroom = min(HEADROOM, max_more) if others else 1
    return n_tokens + headroom <= free_cells
