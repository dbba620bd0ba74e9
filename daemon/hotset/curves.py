"""Hit rates by number of slots, for each layer: what to expect before there is traffic, and what it shows then. Pure.

A curve has n_expert + 1 values: it begins with 0, ends with 1 and does not fall.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

import numpy as np

from daemon.hotset.allotment import Hits

Curve = tuple[float, ...]

OBSERVED_TOKENS = 512
"""So many decoded tokens must have been seen before their curves replace what was expected."""

_SHARES = (0.125, 0.25, 0.5)
_EXPECTED = {
    1: (0.463, 0.671, 0.876),
    2: (0.397, 0.604, 0.833),
    4: (0.363, 0.555, 0.793),
    8: (0.341, 0.527, 0.762),
}
"""By sequences: what experts that follow the traffic served in replays of tests/data/all-domains.trace, with slots for
these shares of the experts (docs/decisions/2026-12-01-heat.md). Published figures of larger models are higher."""


@cache
def expected(n_expert: int, width: int = 1) -> Curve:
    """Where nothing is known: as in the replays of `width` sequences, or of the next larger number that was played."""
    nearest = min((n for n in _EXPECTED if n >= width), default=max(_EXPECTED))
    return through(zip(_SHARES, _EXPECTED[nearest], strict=True), n_expert)


def uniform(n_expert: int) -> Curve:
    """A router without preferences: the share of the slots."""
    return through((), n_expert)


def through(points: Iterable[tuple[float, float]], n_expert: int) -> Curve:
    """Straight lines through (share of the experts, hit rate): those of a hot set's sizes, for example."""
    known = sorted({(0.0, 0.0), (1.0, 1.0), *points})
    shares, rates = np.array(known).T
    values = np.interp(np.arange(n_expert + 1) / n_expert, shares, np.maximum.accumulate(rates))
    return _curve(values)


def counted(counts: Sequence[float]) -> Curve:
    """Counts of each expert, kept from earlier traffic, served by the most used ones."""
    ordered = np.sort(np.asarray(counts, float))[::-1]
    total = float(ordered.sum())
    return _curve(np.concatenate([[0.0], np.cumsum(ordered)]) / total) if total > 0 else uniform(len(ordered))


def observed(hits: Hits, n_tokens: int, before: Sequence[Curve]) -> list[Curve]:
    """What traffic shows, `hits` being `RankCounts.hits()`; `before` until `n_tokens` are enough, and in layers that
    have no counts."""
    if n_tokens < OBSERVED_TOKENS:
        return list(before)
    return [_of_row(row[: len(curve)], curve) for row, curve in zip(hits, before, strict=True)]


def observed_at(slots: Sequence[int], hits: Hits, n_tokens: int, before: Sequence[Curve]) -> list[float]:
    """Of each curve that `observed` would give, the rate of so many slots; cheap enough to ask between steps."""
    enough = n_tokens >= OBSERVED_TOKENS
    totals = [float(row[len(curve) - 1]) for row, curve in zip(hits, before, strict=True)]
    return [
        min(1.0, float(row[n]) / total) if enough and total > 0 and 0 < n < len(curve) - 1 else curve[n]
        for n, row, total, curve in zip(slots, hits, totals, before, strict=True)
    ]


def _of_row(row: Hits, before: Curve) -> Curve:
    return _curve(row / row[-1]) if row[-1] > 0 else before


def _curve(values: Hits) -> Curve:
    clipped = np.minimum(1.0, np.maximum.accumulate(values))
    return (0.0, *map(float, clipped[1:-1]), 1.0)
