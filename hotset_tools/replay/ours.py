"""Plays traces to the daemon's own policy. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from daemon.hotset.allotment import LEAST_GAIN, RankCounts, allot, gain
from daemon.hotset.policy import NO_VICTIM, Heat, Pace, Settings, Values, decide, surplus
from hotset_tools.replay.clairvoyant import Ids, Slots
from hotset_tools.replay.meter import Tell, unheard
from hotset_tools.replay.rivals import Played

BURST = 64
"""Uploads that may be saved up; a change of topic then fills faster than the average allows."""
REPLAN_TOKENS = 512
"""How often slots may change hands between layers."""


@dataclass(frozen=True)
class Step:
    """One decode step: `ids` [n_tokens, layers, top_k], and which text each token belongs to."""

    ids: Ids
    texts: tuple[int, ...] = (0,)


class Source(Protocol):
    """Whatever makes heat of steps."""

    values: Values

    def take(self, step: Step) -> None:
        """A step was computed."""


class Sum(Heat):
    """What the daemon uses: one heat, to which all sequences add."""

    def take(self, step: Step) -> None:
        """A step was computed."""
        self.observe(step.ids, len(set(step.texts)))


@dataclass
class Placement:
    """Slots of each layer and who is in them, [layers, n_expert]; applies moves at once, as if uploads took no time."""

    slots: npt.NDArray[np.int64]
    resident: npt.NDArray[np.bool_]
    settings: Settings
    pace: Pace
    uploads: int = field(default=0)

    def hits(self, ids: Ids) -> npt.NDArray[np.int64]:
        """Of each token, [n_tokens]."""
        found: npt.NDArray[np.int64] = self.resident[np.arange(len(self.slots))[:, None], ids].sum(axis=(1, 2))
        return found

    def follow(self, heat: Values, n_tokens: int) -> None:
        """Do what the policy says after a step of `n_tokens`."""
        self.pace.earn(n_tokens)
        moves = decide(heat, self.resident, self.slots, int(self.pace.left), self.settings)
        for layer, expert, victim in moves:
            if victim != NO_VICTIM:
                self.resident[layer, victim] = False
            self.resident[layer, expert] = True
        self.pace.spend(len(moves))
        self.uploads += len(moves)

    def resize(self, heat: Values, slots: Sequence[int]) -> None:
        """Give layers other numbers of slots."""
        self.slots = np.array(slots)
        for layer, expert in surplus(heat, self.resident, self.slots):
            self.resident[layer, expert] = False


def single(ids: Ids) -> Iterable[Step]:
    """A trace as one sequence: a token a step."""
    return (Step(ids[token : token + 1]) for token in range(len(ids)))


def play(
    steps: Iterable[Step],
    n_expert: Sequence[int],
    slots: Slots,
    rate: float,
    settings: Settings,
    tell: Tell = unheard,
) -> Played:
    """One case after the other, slots [cases, layers]; at most `rate` uploads a token but for a burst."""
    listed = list(steps)
    return play_with(lambda: Sum(n_expert, settings), listed, n_expert, slots, rate, settings, tell)


def play_with(
    make_heat: Callable[[], Source],
    steps: Sequence[Step],
    n_expert: Sequence[int],
    slots: Slots,
    rate: float,
    settings: Settings,
    tell: Tell = unheard,
) -> Played:
    """The same with heat from another source."""
    hits, uploads = [], []
    for case in slots:
        heat, placement = make_heat(), _empty(n_expert, case, rate, settings)
        found = []
        for step in steps:
            found.append(placement.hits(step.ids))
            heat.take(step)
            placement.follow(heat.values, len(step.ids))
            tell(1 / len(steps) / len(slots))
        hits.append(np.concatenate(found))
        uploads.append(placement.uploads)
    return Played(np.stack(hits, axis=1), np.array(uploads))


def play_pooled(
    ids: Ids,
    n_expert: Sequence[int],
    slots: Slots,
    rate: float,
    settings: Settings,
    least_gain: float = LEAST_GAIN,
    tell: Tell = unheard,
) -> Played:
    """One sequence; layers share the slots of each case, which are allotted anew when that serves enough more.

    The floor is what a token chooses, or what a layer would have without sharing if that is less.
    """
    hits = np.zeros((len(ids), len(slots)), np.int64)
    uploads = []
    for case, given in enumerate(slots):
        heat, placement = Sum(n_expert, settings), _empty(n_expert, given, rate, settings)
        ranks = RankCounts(len(n_expert), max(n_expert))
        floor = min(ids.shape[2], int(given.min()))
        for token, step in enumerate(single(ids)):
            hits[token, case] = placement.hits(step.ids)[0]
            ranks.observe(heat.values, step.ids)
            heat.take(step)
            placement.follow(heat.values, 1)
            tell(1 / len(ids) / len(slots))
            if token % REPLAN_TOKENS == REPLAN_TOKENS - 1:
                budget = int(given.sum()) + len(n_expert)  # slots as the unit of memory; each layer has one for zeros
                wanted = allot(ranks.hits(), n_expert, [1] * len(n_expert), budget, floor)
                if gain(ranks.hits(), list(placement.slots), wanted) >= least_gain:
                    placement.resize(heat.values, wanted)
        uploads.append(placement.uploads)
    return Played(hits, np.array(uploads))


def _empty(n_expert: Sequence[int], slots: npt.NDArray[np.int64], rate: float, settings: Settings) -> Placement:
    resident = np.zeros((len(n_expert), max(n_expert)), bool)
    return Placement(slots, resident, settings, Pace(rate, BURST))
