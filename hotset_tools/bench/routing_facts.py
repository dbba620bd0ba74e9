"""Statistics of routing: how local it is in time and how skewed, from the experts that each token picked. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Picked = npt.NDArray[np.bool_]
"""Which experts each token picked in one layer, [n_tokens, n_expert]."""
Counts = npt.NDArray[np.int64]

SHARES = (0.25, 0.40, 0.50, 0.75)


@dataclass(frozen=True)
class RoutingFacts:
    """Shares from 0 to 1; hit rates with the share `SHARES` of a layer's experts resident."""

    repeat_next: float
    repeat_within_8: float
    recent: tuple[float, ...]
    static: tuple[float, ...]


def describe(picked: npt.NDArray[np.bool_], learned: Counts) -> RoutingFacts:
    """The means over layers; `picked` [layers, n_tokens, n_expert], `learned` [layers, n_expert] of other tokens."""
    recent = np.mean([[recent_hits(layer, share) for share in SHARES] for layer in picked], axis=0)
    pairs = list(zip(picked.sum(axis=1), learned, strict=True))
    static = np.mean([[static_hits(counts, heat, share) for share in SHARES] for counts, heat in pairs], axis=0)
    return RoutingFacts(
        repeat_next=float(np.mean([repeats(layer, 1) for layer in picked])),
        repeat_within_8=float(np.mean([repeats(layer, 8) for layer in picked])),
        recent=tuple(float(value) for value in recent),
        static=tuple(float(value) for value in static),
    )


def repeats(picked: Picked, within: int) -> float:
    """The share of picks whose expert is picked again by one of the `within` tokens that follow."""
    n = len(picked) - within
    later = np.zeros((n, picked.shape[1]), bool)
    for distance in range(1, within + 1):
        later |= picked[distance : n + distance]
    return float((picked[:n] & later).sum() / max(1, picked[:n].sum()))


def recent_hits(picked: Picked, share: float) -> float:
    """The hit rate of the experts that were picked last; the first quarter of the tokens only fills them."""
    n_tokens, n_expert = picked.shape
    size, warm = int(share * n_expert), n_tokens // 4
    last = -1 - np.arange(n_expert)
    hits = 0
    for token, row in enumerate(picked):
        if token >= warm:
            resident = np.argpartition(-last, size - 1)[:size]
            hits += int((row[resident] & (last[resident] >= 0)).sum())
        last[row] = token
    return hits / max(1, int(picked[warm:].sum()))


def static_hits(counts: Counts, learned: Counts, share: float) -> float:
    """The hit rate of the experts that are the most popular in `learned`."""
    chosen = popular(learned)[: int(share * len(learned))]
    return float(counts[chosen].sum() / max(1, counts.sum()))


def popular(counts: Counts) -> list[int]:
    """Experts, the most picked first; of equals the smaller number first."""
    return [int(expert) for expert in np.argsort(-counts, kind="stable")]


def distinct_curve(trace: npt.NDArray[np.uint8], order: Sequence[int]) -> tuple[float, ...]:
    """Like `hit_curve`, of the distinct experts that each step of `trace` [n_steps, n_expert] picks.

    `order` is the experts, the first in a slot first.
    """
    used = (trace > 0).sum(axis=0)[list(order)]
    shares = np.concatenate([[0.0], np.cumsum(used) / max(1, int(used.sum()))])
    shares[-1] = 1.0
    return tuple(float(value) for value in np.minimum(shares, 1.0))


def hit_curve(learned: Counts, other: Counts) -> tuple[float, ...]:
    """The hit rate in `other` of the S most popular experts of `learned`, for S = 0 to all; never falls."""
    shares = np.concatenate([[0.0], np.cumsum(other[popular(learned)]) / max(1, other.sum())])
    shares[-1] = 1.0
    return tuple(float(value) for value in np.minimum(shares, 1.0))
