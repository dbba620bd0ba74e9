"""What is in the slots of one context, and what should move next: heat, pace and slots brought together. Pure.

A move is done in three steps: its victim is retired and computed on the CPU from the next step on, the expert is
uploaded into the slot, which nothing reads meanwhile, and then published. Nothing waits for any of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from daemon.hotset.allotment import Hits, RankCounts
from daemon.hotset.policy import NO_VICTIM, Counts, Heat, Pace, Resident, Settings, Values, decide, surplus

Ids = npt.NDArray[np.integer]
"""What a decode step chose, [n_tokens, layers, top_k]."""
Rates = npt.NDArray[np.float64]

EMPTY = -1
WIDEST_PARTIAL = 31
"""Tokens of a step up to which experts in VRAM are used in layers that lack some: `HOTSET_WIDEST` of the patches."""
RECENT_TOKENS = 64.0
"""Half-life of the hit rates that are shown, in tokens."""
BURST_SECONDS = 0.5
"""Uploads of so many seconds may be saved up: after a change of topic they are needed at once."""


class Upload(NamedTuple):
    """An expert, and the slot that it goes to."""

    layer: int
    expert: int
    slot: int


@dataclass(frozen=True)
class Batch:
    """What to do next: slots whose experts retire, as (layer, slot), then the uploads into free slots.

    `more` says that there are useful moves beyond these, which the pace does not allow yet.
    """

    retired: tuple[tuple[int, int], ...] = ()
    uploads: tuple[Upload, ...] = ()
    more: bool = False


class Controller:
    """Slots of all layers with routed experts, by index. `n_expert` and `expert_bytes` are of each layer.

    `top_k` is the largest number of experts that a token chooses in a layer; where layers differ, the ids of the others
    are filled up with `pad`.
    """

    def __init__(
        self,
        n_expert: Sequence[int],
        expert_bytes: Sequence[int],
        *,
        bytes_per_second: float,
        padded: bool = False,
        settings: Settings | None = None,
    ) -> None:
        self.settings = settings or Settings()
        self._sizes = np.array(n_expert)[:, None]
        self._n_expert, self._bytes = list(n_expert), np.array(expert_bytes, np.int64)
        width = max(n_expert) + padded
        self.pad = width - 1
        self._padded = padded
        self._layers = np.arange(len(n_expert))[:, None]
        self.heat = Heat(n_expert, self.settings, width)
        self.ranks = RankCounts(len(n_expert), width)
        self.slots: Counts = np.zeros(len(n_expert), np.int64)
        self._owner: list[list[int]] = [[] for _ in n_expert]
        self._serving: Resident = np.zeros((len(n_expert), width), bool)
        self._taken: Resident = self._serving.copy()
        self._recent: Rates = np.zeros((2, len(n_expert)))
        self.n_tokens = self.n_ranked = self.n_moves = 0
        self.pace(bytes_per_second)

    # -- what is known

    @property
    def n_expert(self) -> list[int]:
        """Experts of each layer."""
        return list(self._n_expert)

    @property
    def serving(self) -> Resident:
        """Which experts are published, [layers, width]."""
        return self._serving

    @property
    def taken(self) -> Resident:
        """Which experts have a slot, those on their way too, [layers, width]."""
        return self._taken

    def hit_rates(self) -> Rates:
        """Share of recent selections that found their expert in VRAM, [layers]; NaN before the first."""
        hits, selections = self._recent
        with np.errstate(invalid="ignore"):
            rates: Rates = hits / selections
        return rates

    def hit_rate(self, layers: Sequence[int]) -> float | None:
        """The same of some layers together."""
        hits, chosen = self._recent[:, list(layers)].sum(axis=1).tolist()
        return hits / chosen if chosen else None

    def served(self, ids: Ids) -> npt.NDArray[np.int64]:
        """For each token of `ids`, how many of its selections are in VRAM, and how many there are, [2, n_tokens]."""
        return np.stack([part.sum(axis=(1, 2)) for part in self._found(ids)])

    def curves(self) -> Hits:
        """Selections that each number of slots would have served, [layers, width + 1]."""
        return self.ranks.hits()

    # -- what changes it

    def pace(self, bytes_per_second: float) -> None:
        """Uploads may take so much from now on; 0: nothing moves."""
        self._moving = bytes_per_second > 0
        burst = max(bytes_per_second * BURST_SECONDS, float(self._bytes.max())) if self._moving else 0.0
        self._pace = Pace(bytes_per_second, burst)

    def observe(self, ids: Ids, n_sequences: int, ranks: bool = True) -> None:
        """A decode step chose `ids` for so many sequences; `ranks`: heat is warm enough to tell how hot they were."""
        found, counted = self._found(ids)
        decay = 0.5 ** (len(ids) / RECENT_TOKENS)
        # In one go: other threads may ask for rates at any time.
        self._recent = self._recent * decay + [part.sum(axis=(0, 2)) for part in (found, counted)]
        if ranks:
            self.ranks.observe(self.heat.values, ids)
            self.n_ranked += len(ids)
        self.heat.observe(ids, n_sequences)
        self.n_tokens += len(ids)

    def recall(self, layer: int, heat: npt.ArrayLike, ranks: npt.ArrayLike) -> None:
        """What an earlier controller knew of a layer's experts, [n_expert] each."""
        n = self._n_expert[layer]
        self.heat.values[layer, :n], self.ranks.counts[layer, :n] = heat, ranks

    def adopt(self, layer: int, owners: Iterable[int]) -> None:
        """The slots of a layer as they are now, by the expert published in each; `EMPTY` for none."""
        self._owner[layer] = list(owners)
        experts = [expert for expert in self._owner[layer] if expert != EMPTY]
        self.slots[layer] = len(self._owner[layer])
        self._serving[layer] = self._taken[layer] = False
        self._serving[layer, experts] = self._taken[layer, experts] = True

    def leaving(self, slots: Sequence[int]) -> list[tuple[int, int]]:
        """(layer, slot) of the coldest experts, which have no place when layers get so many slots."""
        found = surplus(self.heat.values, self._taken, np.array(slots))
        return [self._retire(layer, expert) for layer, expert in found]

    def keep(self, layer: int, experts: Iterable[int]) -> list[tuple[int, int]]:
        """(layer, slot) of all others in a layer, which leave."""
        others = set(self._owner[layer]) - {EMPTY, *experts}
        return [self._retire(layer, expert) for expert in sorted(others)]

    def seed(self, layer: int, experts: Sequence[int]) -> Batch:
        """Bring `experts` into the free slots of a layer, whatever the pace; those that are there stay."""
        missing = [expert for expert in experts if not self._taken[layer, expert]]
        free = [slot for slot, owner in enumerate(self._owner[layer]) if owner == EMPTY]
        return Batch((), tuple(self._assign(layer, expert, slot) for expert, slot in zip(missing, free, strict=False)))

    def refill(self, missing: Iterable[tuple[int, int, int]]) -> Batch:
        """Bring experts back into their slots, as (layer, slot, expert), where nobody else came meanwhile."""
        uploads = [
            self._assign(layer, expert, slot)
            for layer, slot, expert in missing
            if slot < len(self._owner[layer]) and self._owner[layer][slot] == EMPTY and not self._taken[layer, expert]
        ]
        return Batch((), tuple(uploads))

    def batch(self, seconds: float) -> Batch:
        """The most useful moves, at most one a layer, after so many seconds since the last call."""
        self._pace.earn(seconds)
        affordable = max(0, int(self._pace.left / self._bytes.max()))
        moves = decide(self.heat.values, self._taken, self.slots, len(self.slots), self.settings)
        retired, uploads = [], []
        for layer, expert, victim in moves[:affordable]:
            if victim == NO_VICTIM:
                slot = self._owner[layer].index(EMPTY)
            else:
                retired.append(self._retire(layer, victim))
                slot = retired[-1][1]
            uploads.append(self._assign(layer, expert, slot))
            self._pace.spend(float(self._bytes[layer]))
        self.n_moves += len(uploads)
        return Batch(tuple(retired), tuple(uploads), more=len(moves) > affordable and self._moving)

    def published(self, uploads: Iterable[Upload]) -> None:
        """These are in use from now on, but for those that had to leave at the same moment."""
        for layer, expert, slot in uploads:
            self._serving[layer, expert] = self._owner[layer][slot] == expert

    def _found(self, ids: Ids) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Which selections are in VRAM, and which are selections at all; both like `ids`."""
        counted = ids != self.pad if self._padded else np.ones(ids.shape, bool)
        serving = self._serving
        if len(ids) > WIDEST_PARTIAL:
            serving = serving & (serving.sum(axis=1, keepdims=True) == self._sizes)
        return serving[self._layers.T[..., None], ids] & counted, counted

    def _retire(self, layer: int, expert: int) -> tuple[int, int]:
        slot = self._owner[layer].index(expert)
        self._owner[layer][slot] = EMPTY
        self._serving[layer, expert] = self._taken[layer, expert] = False
        return layer, slot

    def _assign(self, layer: int, expert: int, slot: int) -> Upload:
        self._owner[layer][slot] = expert
        self._taken[layer, expert] = True
        return Upload(layer, expert, slot)


@dataclass(frozen=True)
class Spread:
    """How heat spreads over a layer's experts: the share in resident ones, how many hold half and nine tenths of it."""

    resident_share: float
    for_half: int
    for_ninety: int
    hottest: tuple[int, ...]


def spread(heat: Values, resident: Resident, n_shown: int = 4) -> list[Spread | None]:
    """Of each layer, None where nothing is hot."""
    known = np.maximum(heat, 0)
    totals = known.sum(axis=1)
    order = np.argsort(-known, axis=1, kind="stable")
    sums = np.cumsum(np.take_along_axis(known, order, axis=1), axis=1)
    held = (known * resident).sum(axis=1)
    found: list[Spread | None] = []
    for layer, total in enumerate(totals):
        if total <= 0:
            found.append(None)
            continue
        half, ninety = (int((sums[layer] < part * total).sum()) + 1 for part in (0.5, 0.9))
        hottest = tuple(int(one) for one in order[layer, :n_shown] if known[layer, one] > 0)
        found.append(Spread(float(held[layer] / total), half, ninety, hottest))
    return found
