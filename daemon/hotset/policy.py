"""Which experts should move: decayed counts, and a newcomer that must be clearly hotter than what it replaces. Pure.

Chosen by replaying real routing: docs/decisions/2026-12-01-heat.md has the figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]
Resident = npt.NDArray[np.bool_]
"""Which experts have a slot, [layers, n_expert] with `n_expert` of the largest layer."""
Counts = npt.NDArray[np.int64]

NO_VICTIM = -1


@dataclass(frozen=True)
class Settings:
    """`half_life` in tokens of each sequence; `margin` is the heat by which a newcomer must exceed its victim.

    A margin of one selection is admission as well: an expert that was chosen once replaces nothing that was chosen
    lately, and nothing flutters between two experts that are equally hot.
    """

    half_life: float = 16.0
    margin: float = 1.0

    def __post_init__(self) -> None:
        if not (self.half_life > 0 and self.margin >= 0):
            raise ValueError("a half-life is more than 0, a margin not less")


class Move(NamedTuple):
    """Upload `expert` into the slot of `victim`, or into a free one."""

    layer: int
    expert: int
    victim: int = NO_VICTIM


class Heat:
    """Selections of each expert, an old one counting less. `values` [layers, n_expert]; -1: there is no such expert."""

    def __init__(self, n_expert: Sequence[int], settings: Settings, width: int = 0) -> None:
        """`width` is the last dimension where it is more than the largest layer needs."""
        self._layers = np.arange(len(n_expert))[None, :, None]
        self._halvings = 1 / settings.half_life
        self._exist = np.arange(width or max(n_expert)) < np.array(n_expert)[:, None]
        self._all_exist = bool(self._exist.any(axis=0).all())
        self.values: Values = np.where(self._exist, 0.0, -1.0)

    def observe(self, ids: npt.NDArray[np.integer], n_sequences: int = 1) -> None:
        """A decode step chose `ids` [n_tokens, layers, top_k] for `n_sequences` sequences together.

        Every selection counts the same, whose ever it is. Time is what the average sequence has decoded, so that many
        sequences do not forget faster than one.
        """
        np.multiply(self.values, 0.5 ** (self._halvings * len(ids) / n_sequences), out=self.values, where=self._exist)
        if len(ids) == 1:  # `add.at` is slower, and only needed where a place may come twice
            self.values[self._layers[0], ids[0]] += 1
        else:
            np.add.at(self.values, (self._layers, ids), 1)
        if not self._all_exist:  # a column that no layer has stands for "nothing chosen"
            self.values[:, -1] = -1


def decide(heat: Values, resident: Resident, slots: Counts, most: int, settings: Settings) -> list[Move]:
    """At most `most` moves, the most useful first, and one of each layer: its hottest expert without a slot.

    `slots` [layers] is how many experts may be resident. A free slot takes any expert that was chosen; in a layer that
    has a slot for every expert, also the others. Layers with more residents than slots get nothing (see `surplus`).
    """
    if most < 1:
        return []
    layers = np.arange(len(heat))
    newcomer = np.where(resident, -1.0, heat)
    victim = np.where(resident, heat, np.inf)
    new, old = newcomer.argmax(axis=1), victim.argmin(axis=1)
    new_heat, old_heat = newcomer[layers, new], victim[layers, old]
    n_resident = resident.sum(axis=1)
    free = n_resident < slots
    gain = np.where(free, new_heat, new_heat - old_heat - settings.margin)
    full = free & (slots >= (heat >= 0).sum(axis=1)) & (new_heat >= 0)
    useful = np.flatnonzero(((gain > 0) | full) & (n_resident <= slots) & (slots > 0))
    best = useful[np.argsort(-gain[useful], kind="stable")][:most]
    return [Move(int(at), int(new[at]), NO_VICTIM if free[at] else int(old[at])) for at in best]


def surplus(heat: Values, resident: Resident, slots: Counts) -> list[tuple[int, int]]:
    """(layer, expert) of those that must leave because their layer has fewer slots now, the coldest ones."""
    leaving = []
    for layer in np.flatnonzero(resident.sum(axis=1) > slots):
        experts = np.flatnonzero(resident[layer])
        coldest = experts[np.argsort(heat[layer, experts], kind="stable")]
        leaving += [(int(layer), int(expert)) for expert in coldest[: len(experts) - slots[layer]]]
    return leaving


class Pace:
    """An allowance that grows with time or tokens up to `burst`; what is spent beyond it must be earned first."""

    def __init__(self, rate: float, burst: float) -> None:
        if not (rate >= 0 and burst >= 0):
            raise ValueError("neither a rate nor a burst can be less than 0")
        self._rate, self._burst = rate, burst
        self.left = burst

    def earn(self, units: float) -> None:
        """So much time has passed."""
        self.left = min(self._burst, self.left + self._rate * units)

    def spend(self, amount: float) -> None:
        """So much was used."""
        self.left -= amount
